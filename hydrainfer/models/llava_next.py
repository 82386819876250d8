"""LLaVA-NeXT: a picture is seen whole and in tiles ("anyres"), whose rows are put together, freed of their padding and
each ended by a learned newline (Liu et al., "LLaVA-NeXT: Improved reasoning, OCR, and world knowledge")."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hydrainfer.models.clip_projector import ClipProjector, clip_config
from hydrainfer.models.config import AnyresConfig, ModelConfig, require
from hydrainfer.models.llava import describe
from hydrainfer.models.picture import Picture
from hydrainfer.models.slots import Slot, empty
from hydrainfer.ops import OpSet


def read(hf: Any, path: Path) -> ModelConfig:
    """Check and describe a transformers `LlavaNextConfig`. Raises `CheckpointError`."""
    require(
        hf.model_type == "llava_next", path, f"model_type {hf.model_type!r} is not supported; supported: llava_next"
    )
    clip = clip_config(hf, path)
    require(
        not clip.keep_class, path, "vision_feature_select_strategy 'full' is not supported for LLaVA-NeXT; use default"
    )
    size, side = clip.image_size, clip.image_size // clip.patch_size
    points = hf.image_grid_pinpoints
    require(
        bool(points) and all(n % size == 0 for p in points for n in p),
        path,
        f"image_grid_pinpoints {points} must be pairs of multiples of the vision tower's {size} pixels",
    )
    largest = max(h // size * side * (w // size * side + 1) for h, w in points)
    vision = AnyresConfig(clip, clip.patches + largest)
    return describe("LlavaNextForConditionalGeneration", hf, vision, path)


class LlavaNextVision:
    """`Picture.pixels`: uint8 [1 + tiles, image_size, image_size, 3], the whole picture, then its tiles row by row.
    `Picture.grid`: (rows of tiles; rows, columns of patches that are not padding), as much of it on either side."""

    def __init__(self, config: ModelConfig, ops: OpSet, dtype: torch.dtype, device: torch.device) -> None:
        self.config: AnyresConfig = config.vision
        self._side = self.config.clip.image_size // self.config.clip.patch_size  # patches
        self._tower = ClipProjector(self.config.clip, config.text.hidden, ops, dtype, device)
        self.newline = empty((config.text.hidden,), dtype, device)

    def slots(self) -> dict[str, Slot]:
        return self._tower.slots() | {"projector.newline": Slot(self.newline)}

    def rows(self, picture: Picture) -> int | None:
        """The number of rows of its embedding; None if it is no picture that this tower takes."""
        size, shape = self.config.clip.image_size, picture.pixels.shape
        if picture.grid is None or len(shape) != 4 or shape[1:] != (size, size, 3) or picture.grid[0] < 1:
            return None
        tile_rows, height, width = picture.grid
        tile_columns, left_over = divmod(shape[0] - 1, tile_rows)
        spare = (tile_rows * self._side - height, tile_columns * self._side - width)
        fits = tile_columns > 0 and not left_over and min(height, width, *spare) >= 0 and not any(n % 2 for n in spare)
        return self.config.clip.tokens + height * (width + 1) if fits else None

    def encode(self, pictures: list[Picture]) -> list[Tensor]:
        """[rows, width] each; the squares of all pictures pass CLIP together."""
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
