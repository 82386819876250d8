"""LLaVA-NeXT's vision tower: a picture is encoded whole and in tiles ("anyres"). The tiles' patches form one grid
without its padding, and each row of the grid ends with a learned newline (Liu et al., "LLaVA-NeXT: Improved reasoning,
OCR, and world knowledge")."""

from __future__ import annotations

import torch
from torch import Tensor

from hydrainfer.checkpoint import ModelConfig
from hydrainfer.families.llava import AnyresConfig
from hydrainfer.models.clip_projector import ClipProjector
from hydrainfer.models.picture import PassSize, PatchedPicture
from hydrainfer.models.slots import Slot, empty
from hydrainfer.ops import OpSet


class LlavaNextVision:
    """LLaVA-NeXT's vision tower. `PatchedPicture.pixels`: uint8 [1 + tiles, image_size, image_size, 3], the whole
    picture, then its tiles row by row. `PatchedPicture.grid`: (rows of tiles, rows of patches without padding, columns
    of patches without padding). Opposite sides have the same padding."""

    def __init__(self, config: ModelConfig, ops: OpSet, dtype: torch.dtype, device: torch.device) -> None:
        self.config: AnyresConfig = config.vision
        self._side = self.config.clip.image_size // self.config.clip.patch_size  # patches
        self._tower = ClipProjector(self.config.clip, config.text.hidden, ops, dtype, device)
        self.passes = self._tower.passes
        self.newline = empty((config.text.hidden,), dtype, device)

    @staticmethod
    def pass_size(c: AnyresConfig) -> PassSize:
        return ClipProjector.pass_size(c.clip)

    def slots(self) -> dict[str, Slot]:
        return self._tower.slots() | {"projector.newline": Slot(self.newline)}

    def multiplied(self) -> list[Tensor]:
        return self._tower.multiplied()

    def rows(self, picture: PatchedPicture) -> int | None:
        """The number of rows of the picture's embedding; None if the tower does not take this picture."""
        size, shape = self.config.clip.image_size, picture.pixels.shape
        if picture.grid is None or len(shape) != 4 or shape[1:] != (size, size, 3) or picture.grid[0] < 1:
            return None
        tile_rows, height, width = picture.grid
        tile_columns, left_over = divmod(shape[0] - 1, tile_rows)
        spare = (tile_rows * self._side - height, tile_columns * self._side - width)
        fits = tile_columns > 0 and not left_over and min(height, width, *spare) >= 0 and not any(n % 2 for n in spare)
        return self.config.clip.tokens + height * (width + 1) if fits else None

    def encode(self, pictures: list[PatchedPicture]) -> list[Tensor]:
        """The embedding [rows, width] of each picture. The squares of all pictures go through CLIP together."""
        squares = self._tower.encode([square for p in pictures for square in p.pixels])  # [squares, patches, width]
        parts = squares.split([len(p.pixels) for p in pictures])
        return [self._put_together(part, p.grid) for part, p in zip(parts, pictures)]

    def _put_together(self, squares: Tensor, grid: tuple[int, int, int] | None) -> Tensor:
        """[1 + tiles, patches, width] → the whole picture's rows, then those of the tiles as one picture."""
        assert grid is not None, "rows() has accepted it"
        tile_rows, height, width = grid
        tiles = squares[1:].unflatten(1, (self._side, self._side)).unflatten(0, (tile_rows, -1))
        whole = tiles.transpose(1, 2).flatten(2, 3).flatten(0, 1)  # [rows of patches, columns of patches, width]
        top, left = (whole.shape[0] - height) // 2, (whole.shape[1] - width) // 2
        kept = whole[top : top + height, left : left + width]
        ended = torch.cat((kept, self.newline.expand(height, 1, -1)), dim=1)
        return torch.cat((squares[0], ended.flatten(0, 1)))
