"""Vision transformers, as `checkpoint.TowerConfig` describes them: over squares of one size, or over pictures and
frames of any size, many in one pass. Both run the same blocks.

    pixels -> patches -> positions, norm -> blocks -> steps of the projector -> rows of the language model's width

A family is data. A mechanism that is missing is a small function in one of these places, and an option of
`TowerConfig`:

- tables of positions: `_POSITIONS`
- frequencies of the rotation (even ones for rows, odd ones for columns): `frames.FREQUENCIES`
- what a block does with queries, keys and values: `vit_parts.Block.run`; with what it adds: `_add` there
- kinds of norms: `vit_parts.RowNorm`
- steps of the projector (another way to merge): a part in `projector`
- pictures of several squares: `SquareVision.encode`
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hydrainfer.checkpoint import ModelConfig, PixelSettings, TowerConfig
from hydrainfer.models.activations import activation, gated
from hydrainfer.models.frames import FrameTower
from hydrainfer.models.patches import PatchLayout
from hydrainfer.models.picture import Normalising, PassSize, PatchedPicture, Squares
from hydrainfer.models.projector import Projector, Surroundings
from hydrainfer.models.slots import Slot, empty
from hydrainfer.models.vit_parts import Block, Linear, RowNorm, Shared, Turns
from hydrainfer.ops import OpSet, Segments

_SQUARES, _SQUARE_ROWS = 16, 32_768
"""The most squares, and the most rows of them, of one pass."""


class Vit:
    """The weights of a tower, and what it does between patches and rows."""

    def __init__(self, c: TowerConfig, ops: OpSet, dtype: torch.dtype, device: torch.device) -> None:
        self.config = c

        def make(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return empty(shape, dtype, device)

        def squares(x: Tensor) -> Tensor:
            if not c.image_size:
                return x.unflatten(0, (-1, c.merge, c.merge))
            tokens = c.side // c.merge
            return x.unflatten(0, (-1, tokens, c.merge, tokens, c.merge)).transpose(2, 3)

        self._ops = ops
        if c.gated:
            inner = gated(c.activation, ops)
        else:
            inner = activation(c.activation, ops)
        self._shared = Shared(ops, c, inner, ops.rope)
        self.patch = Linear.make(3 * c.temporal * c.patch**2, c.hidden, c.patch_bias, make)
        self.patch_norm = RowNorm(c.norm, c.norm_eps, c.hidden, make, ops) if c.patch_norm else None
        self.class_row = make(c.hidden) if c.class_row else None
        self.positions = make(c.position_rows, c.hidden) if c.position_rows else None
        self.pre_norm = RowNorm(c.norm, c.norm_eps, c.hidden, make, ops) if c.pre_norm else None
        self.blocks = [Block.make(c, make, ops) for _ in range(c.depth)]
        around = Surroundings(c.merge, squares, make, ops)
        self._projector = Projector(c.steps, c.hidden * len(c.features), around)
        self._levels = [Projector(steps, c.hidden, around) for steps in c.level_steps]

    def slots(self) -> dict[str, Slot]:
        c = self.config
        slots = self.patch.slots("vision.patch")
        if not c.by_pixel:
            frames = (c.temporal,) * (c.temporal > 1)
            slots["vision.patch.weight"] = Slot(self.patch.weight, (c.hidden, 3, *frames, c.patch, c.patch))
        batch = (1,) * c.batched
        if self.class_row is not None:
            slots["vision.class_row"] = Slot(self.class_row, (*batch, *batch, c.hidden))
        if self.positions is not None:
            shape: tuple[int, ...] = tuple(self.positions.shape)
            if c.positions == "axes":
                shape = 2, c.grid, c.hidden
            slots["vision.positions"] = Slot(self.positions, (*batch, *shape))
        if self.patch_norm is not None:
            slots |= self.patch_norm.slots("vision.patch_norm")
        if self.pre_norm is not None:
            slots |= self.pre_norm.slots("vision.pre_norm")
        for i, block in enumerate(self.blocks):
            slots |= block.slots(f"vision.blocks.{i}", c)
        for projector in (self._projector, *self._levels):
            slots |= projector.slots()
        return slots

    def multiplied(self) -> list[Tensor]:
        blocks = [weight for block in self.blocks[:1] for weight in block.multiplied()]
        return [self.patch.weight, *blocks, *self._projector.multiplied()]

    def embed(self, patches: Tensor) -> Tensor:
        """[rows, patch width] → [rows, hidden]."""
        x = self.patch(patches, self._ops)
        if self.patch_norm is not None:
            x = self.patch_norm(x)
        return x

    def run(
        self, x: Tensor, segments: Callable[[int], Segments], turns: Turns | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Run all blocks over `x` [rows, hidden], which is overwritten. `segments(i)`: the rows that attend to each
        other in layer i. Returns the features [rows, hidden * features], and the projected ones of each level."""
        c = self.config
        if self.pre_norm is not None:
            x = self.pre_norm(x)
        taken, deep = {}, []
        if 0 in c.features:
            taken[0] = x.clone()
        for i, block in enumerate(self.blocks):
            block.run(x, segments(i), self._shared, turns)
            if i in c.levels:
                deep.append(self._levels[c.levels.index(i)](x))
            if i + 1 in c.features:
                taken[i + 1] = x if i + 1 == c.depth else x.clone()
        return _beside([taken[i] for i in c.features]), deep

    def project(self, features: Tensor) -> Tensor:
        """[rows, hidden * features] → [tokens, the language model's width]."""
        rows = self._projector(features)
        if self.config.scale != 1.0:
            rows.mul_(self.config.scale)
        return rows


class _SquarePatches:
    """uint8 [pictures, size, size, 3] → normalised patches [pictures, patches, 3 * patch ** 2]."""

    def __init__(self, pixels: PixelSettings, c: TowerConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._side, self._patch, self._dtype = c.side, c.patch, dtype
        self._normalised = Normalising(pixels, device)

    def __call__(self, pixels: Tensor) -> Tensor:
        side, p = self._side, self._patch
        grid = self._normalised(pixels)[:, : side * p, : side * p].unflatten(2, (side, p)).unflatten(1, (side, p))
        return grid.permute(0, 1, 3, 5, 2, 4).flatten(3).flatten(1, 2).to(self._dtype)


class SquareVision:
    """A `VisionTower` for pictures that are one square, or several. `PatchedPicture.pixels`: uint8 [image_size,
    image_size, 3], or [squares, image_size, image_size, 3]."""

    def __init__(self, config: ModelConfig, ops: OpSet, dtype: torch.dtype, device: torch.device) -> None:
        c: TowerConfig = config.vision
        self.config: Any = c
        self._vit = Vit(c, ops, dtype, device)
        self._patches = _SquarePatches(c.pixels, c, dtype, device)
        self._segments: dict[int, Segments] = {}
        self.passes = Squares(self._pass, c.image_size, device, self._at_once(c))

    @classmethod
    def pass_size(cls, c: Any) -> PassSize:
        captured = Squares.sizes[-1] * c.square_rows
        return PassSize(cls._at_once(c) * c.square_rows, captured, c.hidden, c.intermediate, rotates=False)

    @staticmethod
    def _at_once(c: TowerConfig) -> int:
        return max(1, min(_SQUARES, _SQUARE_ROWS // c.square_rows))

    def slots(self) -> dict[str, Slot]:
        return self._vit.slots()

    def multiplied(self) -> list[Tensor]:
        return self._vit.multiplied()

    def rows(self, picture: PatchedPicture) -> int | None:
        """The number of rows of the picture's embedding; None if the tower does not take this picture."""
        size, shape = self._vit.config.image_size, picture.pixels.shape
        if len(shape) not in (3, 4) or shape[-3:] != (size, size, 3):
            return None
        n_squares = math.prod(shape[:-3])
        if not 0 < n_squares <= self._vit.config.squares:
            return None
        return n_squares * self._vit.config.square_tokens

    def encode(self, pictures: list[PatchedPicture]) -> list[Tensor]:
        """The embedding [squares * tokens, width] of each picture."""
        return [rows.flatten(0, 1) for rows in self._encode_squares(pictures)]

    def _encode_squares(self, pictures: list[PatchedPicture]) -> Sequence[Tensor]:
        """The embeddings [squares, tokens, width] of each picture. The squares of all pictures share passes."""
        squares = [self._squares(p) for p in pictures]
        parts = self.passes.encode([square for some in squares for square in some])
        rows = parts[0]
        if len(parts) > 1:
            rows = torch.cat(parts)
        return rows.split([len(some) for some in squares])

    def _squares(self, picture: PatchedPicture) -> np.ndarray:
        size = self._vit.config.image_size
        return picture.pixels.reshape(-1, size, size, 3)

    def _pass(self, pixels: Tensor) -> Tensor:
        """uint8 [squares, size, size, 3] → [squares, tokens, width]."""
        c, vit = self._vit.config, self._vit
        patches = self._patches(pixels)
        n, n_patches, _ = patches.shape
        x = vit.embed(patches.flatten(0, 1)).unflatten(0, (n, n_patches))
        if vit.class_row is not None:
            x = torch.cat((vit.class_row.expand(n, 1, -1), x), dim=1)
        if vit.positions is not None:
            x = x.add_(vit.positions)
        segments = self._kept_segments(n, pixels.device)
        features, _ = vit.run(x.flatten(0, 1), lambda _: segments)
        if c.class_row and not c.keep_class:
            features = features.unflatten(0, (n, c.square_rows))[:, 1:].flatten(0, 1)
        return vit.project(features).unflatten(0, (n, -1))

    def _kept_segments(self, n: int, device: torch.device) -> Segments:
        """The segments of `n` squares. They are kept, because a CUDA graph must not copy from the host."""
        if n not in self._segments:
            self._segments[n] = Segments([self._vit.config.square_rows] * n, device)
        return self._segments[n]


class FrameVision(FrameTower):
    """A `VisionTower` for pictures and frames of any size. Its rows: [tokens, width * (1 + levels)]."""

    config: TowerConfig
    sizes = range(256, 4097, 256)
    """More patches keep a GPU busy for longer than kernel launches take. Up to 255 patches of a pass are padding."""

    def __init__(self, config: ModelConfig, ops: OpSet, dtype: torch.dtype, device: torch.device) -> None:
        c: TowerConfig = config.vision
        super().__init__(c, ops, dtype, device, max(3 * c.hidden, c.intermediate * (1 + c.gated)), c.window)
        self._vit = Vit(c, self._ops, dtype, device)

    def slots(self) -> dict[str, Slot]:
        return self._vit.slots()

    def multiplied(self) -> list[Tensor]:
        return self._vit.multiplied()

    def _forward(self, patches: Tensor, layout: PatchLayout) -> Tensor:
        c, vit = self.config, self._vit
        x = vit.embed(patches)
        if vit.positions is not None:
            x += _POSITIONS[c.positions](vit.positions, c.grid, layout).to(x.dtype)
        if layout.order is not None:
            x = x.unflatten(0, (-1, c.merge**2))[layout.order].flatten(0, 1)

        def segments(i: int) -> Segments:
            if c.window and i not in c.full_layers:
                return layout.windows
            return layout.frames

        features, deep = vit.run(x, segments, (layout.cos, layout.sin))
        if layout.merged is not None:
            features = features[layout.merged]
        rows = _beside([vit.project(features), *deep])
        if layout.back is not None:
            rows = rows[layout.back]
        return rows


def _beside(parts: Sequence[Tensor]) -> Tensor:
    """Rows that lie beside each other."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(list(parts), dim=-1)


def bilinear(table: Tensor, side: int, layout: PatchLayout) -> Tensor:
    """The learned grid of positions, stretched bilinearly over each picture, corners aligned: [rows, hidden]
    float32."""
    at = layout.places * (side - 1) / (layout.sizes - 1).clamp(min=1)  # [rows, 2]
    low = at.floor()
    part, low = at - low, low.long()
    high = (low + 1).clamp(max=side - 1)
    found = torch.zeros((at.shape[0], table.shape[1]), device=table.device)
    for rows, row_weight in ((low[:, 0], 1 - part[:, 0]), (high[:, 0], part[:, 0])):
        for columns, weight in ((low[:, 1], 1 - part[:, 1]), (high[:, 1], part[:, 1])):
            found += table[rows * side + columns].float() * (row_weight * weight)[:, None]
    return found


def bicubic(table: Tensor, side: int, layout: PatchLayout) -> Tensor:
    """The learned grid of positions, stretched over each picture with cubic polynomials, edges aligned, by
    `grid_sample`: [rows, hidden] float32."""
    at = (layout.places + 0.5) / layout.sizes * 2 - 1  # [rows, (row, column)], from -1 to 1
    grid = table.float().view(side, side, -1).permute(2, 0, 1)[None]  # [1, hidden, side, side]
    found = F.grid_sample(grid, at.flip(-1)[None, None], "bicubic", "border", align_corners=False)
    return found[0, :, 0].T


def axes(table: Tensor, side: int, layout: PatchLayout) -> Tensor:
    """The sum of two rows of the table, for a patch's column and for its row: [rows, hidden]."""
    rows, columns = layout.places.long().unbind(1)
    return table[columns] + table[rows + side]


_POSITIONS: dict[str, Callable[[Tensor, int, PatchLayout], Tensor]] = {
    "bilinear": bilinear,
    "bicubic": bicubic,
    "axes": axes,
}
