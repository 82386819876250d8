"""The vision tower of LLaVA-NeXT and LLaVA-OneVision: a picture is encoded whole and in tiles ("anyres"). The tiles'
patches form one grid without its padding, and each row of the grid ends with a learned newline (Liu et al.,
"LLaVA-NeXT: Improved reasoning, OCR, and world knowledge"). Large grids may be shrunk, and frames of videos are
(Li et al., "LLaVA-OneVision: Easy visual task transfer")."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hydrainfer.checkpoint import ModelConfig
from hydrainfer.families.llava import FRAME, LAST_FRAME
from hydrainfer.models.picture import PassSize, PatchedPicture
from hydrainfer.models.slots import Slot, empty
from hydrainfer.models.vit import SquareVision
from hydrainfer.ops import OpSet


class AnyresVision(SquareVision):
    """The vision tower of LLaVA-NeXT. `PatchedPicture.pixels`: uint8 [1 + tiles, image_size, image_size, 3], the whole
    picture, then its tiles row by row. `PatchedPicture.grid`: (rows of tiles, rows of patches without padding, columns
    of patches without padding). Opposite sides have the same padding. In families that cut only a lone picture, one of
    several is a single square without a grid, and ends with one newline. So is a frame of a video, whose rows are made
    fewer; its grid says whether it is the last, which ends with a newline."""

    def __init__(self, config: ModelConfig, ops: OpSet, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(replace(config, vision=config.vision.tower), ops, dtype, device)
        self.config = config.vision
        self.newline = empty((config.text.hidden,), dtype, device)

    @classmethod
    def pass_size(cls, c: Any) -> PassSize:
        return super().pass_size(c.tower)

    def slots(self) -> dict[str, Slot]:
        return super().slots() | {"projector.newline": Slot(self.newline)}

    def rows(self, picture: PatchedPicture) -> int | None:
        """The number of rows of the picture's embedding; None if the tower does not take this picture."""
        tower, shape = self.config.tower, picture.pixels.shape
        square = (tower.image_size, tower.image_size, 3)
        if picture.grid is None and self.config.alone and shape == (1, *square):
            return tower.square_tokens + 1
        if picture.grid in (FRAME, LAST_FRAME):
            fits = self.config.videos is not None and shape == (1, *square)
            return self.config.frame_side**2 + (picture.grid == LAST_FRAME) if fits else None
        if picture.grid is None or len(shape) != 4 or shape[1:] != square or picture.grid[0] < 1:
            return None
        tile_rows, height, width = picture.grid
        tile_columns, left_over = divmod(shape[0] - 1, tile_rows)
        spare = (tile_rows * tower.side - height, tile_columns * tower.side - width)
        fits = tile_columns > 0 and not left_over and min(height, width, *spare) >= 0 and not any(n % 2 for n in spare)
        if not fits:
            return None
        height, width = self.config.shrunk(height, width)
        return tower.square_tokens + height * (width + 1)

    def encode(self, pictures: list[PatchedPicture]) -> list[Tensor]:
        """The embedding [rows, width] of each picture."""
        return [self._put_together(part, p.grid) for part, p in zip(self._encode_squares(pictures), pictures)]

    def _put_together(self, squares: Tensor, grid: tuple[int, int, int] | None) -> Tensor:
        """[1 + tiles, patches, width] → the whole picture's rows, then those of the tiles as one picture."""
        newline = self.newline * self.config.tower.scale
        if grid is None:
            return torch.cat((squares[0], newline[None]))
        if grid in (FRAME, LAST_FRAME):
            frame = _shrunk(squares.unflatten(1, (self.config.tower.side, -1))[0], (self.config.frame_side,) * 2)
            return torch.cat((frame.flatten(0, 1), newline.expand(int(grid == LAST_FRAME), -1)))
        tile_rows, height, width = grid
        side = self.config.tower.side
        tiles = squares[1:].unflatten(1, (side, side)).unflatten(0, (tile_rows, -1))
        whole = tiles.transpose(1, 2).flatten(2, 3).flatten(0, 1)  # [rows of patches, columns of patches, width]
        top, left = (whole.shape[0] - height) // 2, (whole.shape[1] - width) // 2
        kept = whole[top : top + height, left : left + width]
        fewer = self.config.shrunk(height, width)
        if fewer != (height, width):
            kept = _shrunk(kept, fewer)
        ended = torch.cat((kept, newline.expand(len(kept), 1, -1)), dim=1)
        return torch.cat((squares[0], ended.flatten(0, 1)))


def _shrunk(grid: Tensor, size: tuple[int, int]) -> Tensor:
    """[rows, columns, width] → [*size, width], bilinearly."""
    return F.interpolate(grid.permute(2, 0, 1)[None], size, mode="bilinear")[0].permute(1, 2, 0)
