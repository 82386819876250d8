"""Vision transformers, as `checkpoint.TowerConfig` describes them: over squares of one size, or over pictures and
frames of any size, many in one pass. Both run the same blocks.

    pixels -> patches -> positions, norm -> blocks -> steps of the projector -> rows of the language model's width

A family is data. A mechanism that is missing is a small function in one of these places, and an option of
`TowerConfig`:

- tables of positions (one for rows and one for columns): `_POSITIONS`
- frequencies of the rotation (even ones for rows, odd ones for columns): `frames.FREQUENCIES`; halves of a head that
  are rotated by themselves: `_Shared.rotate`
- norms of values, another scale of the scores: `Block.run`
- a norm of what a block's matrix makes, before it is added: `_add`; bounds of a matrix: `Linear`
- kinds of norms: `RowNorm`; steps of the projector (standardising, another way to merge): `Projector`
- pictures of several squares: `SquareVision.encode`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hydrainfer.checkpoint import (
    Activation,
    Gate,
    Matrix,
    Merge,
    ModelConfig,
    Norm,
    PixelSettings,
    Steps,
    TowerConfig,
)
from hydrainfer.models.activations import activation, gated
from hydrainfer.models.frames import FrameTower
from hydrainfer.models.patches import PatchLayout
from hydrainfer.models.picture import Normalising, PassSize, PatchedPicture, Squares
from hydrainfer.models.slots import Slot, empty
from hydrainfer.ops import OpSet, Segments

_SQUARES, _SQUARE_ROWS = 16, 32_768
"""The most squares, and the most rows of them, of one pass."""
Make = Callable[..., Tensor]
Turns = tuple[Tensor, Tensor]
"""The cosines and sines of each row, [rows, head_dim / 2] float32."""


class RowNorm:
    """A norm of each row."""

    def __init__(self, kind: str, eps: float, width: int, make: Make, ops: OpSet) -> None:
        self._kind, self._eps, self._ops = kind, eps, ops
        self.weight = make(width, dtype=torch.float32) if kind == "rms+1" else make(width)
        self.bias = make(width) if kind == "layer" else None

    def slots(self, name: str) -> dict[str, Slot]:
        found = {f"{name}.weight": Slot(self.weight, plus=float(self._kind == "rms+1"))}
        return found if self.bias is None else found | {f"{name}.bias": Slot(self.bias)}

    def __call__(self, x: Tensor) -> Tensor:
        shape = self.weight.shape
        if self._kind == "layer":
            return F.layer_norm(x, shape, self.weight, self.bias, self._eps)
        if self._kind == "rms+1":
            return F.rms_norm(x.float(), shape, self.weight, self._eps).to(x.dtype)
        return self._ops.rms_norm(x, self.weight, self._eps)


class Linear(NamedTuple):
    """A matrix [out, in] and its bias."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def make(cls, inner: int, outer: int, bias: bool, make: Make) -> Linear:
        return cls(make(outer, inner), make(outer) if bias else None)

    def slots(self, *names: str) -> dict[str, Slot]:
        """The slots of tensors that lie one after the other, equally large."""
        found = dict(zip((f"{name}.weight" for name in names), map(Slot, self.weight.chunk(len(names)))))
        if self.bias is not None:
            found |= dict(zip((f"{name}.bias" for name in names), map(Slot, self.bias.chunk(len(names)))))
        return found


class _Shared(NamedTuple):
    """What all blocks of a tower share."""

    ops: OpSet
    heads: int
    activation: Callable[[Tensor], Tensor]
    rotate: Callable[[Tensor, Tensor, Tensor], None]


@dataclass(slots=True)
class Block:
    """One layer's weights. `qkv`: queries, keys and values; `qk_norms`: of queries and keys; `up`: if the MLP is
    gated, the gate and what it gates."""

    norm_1: RowNorm
    qkv: Linear
    qk_norms: tuple[RowNorm, ...]
    out: Linear
    scale_1: Tensor | None
    norm_2: RowNorm
    up: Linear
    down: Linear
    scale_2: Tensor | None

    @classmethod
    def make(cls, c: TowerConfig, make: Make, ops: OpSet) -> Block:
        inner, width = c.intermediate * (1 + c.gated), c.head_dim if c.qk_norm == "head" else c.heads * c.head_dim
        return cls(
            norm_1=RowNorm(c.norm, c.norm_eps, c.hidden, make, ops),
            qkv=Linear.make(c.hidden, 3 * c.heads * c.head_dim, c.qkv_bias, make),
            qk_norms=tuple(RowNorm("rms", c.qk_eps, width, make, ops) for _ in range(2 * (c.qk_norm != "none"))),
            out=Linear.make(c.heads * c.head_dim, c.hidden, c.out_bias, make),
            scale_1=make(c.hidden) if c.layer_scale else None,
            norm_2=RowNorm(c.norm, c.norm_eps, c.hidden, make, ops),
            up=Linear.make(c.hidden, inner, c.mlp_bias, make),
            down=Linear.make(c.intermediate, c.hidden, c.mlp_bias, make),
            scale_2=make(c.hidden) if c.layer_scale else None,
        )

    def slots(self, prefix: str, c: TowerConfig) -> dict[str, Slot]:
        qkv = ("qkv",) if c.fused else ("q", "k", "v")
        up = ("gate", "up") if c.gated else ("up",)
        found = self.norm_1.slots(f"{prefix}.norm_1") | self.norm_2.slots(f"{prefix}.norm_2")
        for linear, names in ((self.qkv, qkv), (self.out, ("out",)), (self.up, up), (self.down, ("down",))):
            found |= linear.slots(*(f"{prefix}.{name}" for name in names))
        for letter, norm in zip("qk", self.qk_norms):
            found |= norm.slots(f"{prefix}.{letter}_norm")
        scales = {f"{prefix}.scale_1": self.scale_1, f"{prefix}.scale_2": self.scale_2}
        return found | {name: Slot(scale) for name, scale in scales.items() if scale is not None}

    def multiplied(self) -> list[Tensor]:
        return [linear.weight for linear in (self.qkv, self.out, self.up, self.down)]

    def run(self, x: Tensor, segments: Segments, how: _Shared, turns: Turns | None) -> None:
        """Run this block over `x` [rows, hidden] in place."""
        ops, heads = how.ops, how.heads
        rows = ops.linear(self.norm_1(x), *self.qkv)
        for part, norm in zip(rows.chunk(3, dim=1), self.qk_norms):
            wide = part.unflatten(1, (-1, norm.weight.shape[0]))  # each head, or all of them
            wide.copy_(norm(wide.flatten(0, 1)).view(wide.shape))
        qkv = rows.unflatten(1, (3 * heads, -1))  # [rows, 3 * heads, head_dim]
        if turns is not None:
            how.rotate(qkv[:, : 2 * heads], *turns)
        q, k, v = qkv.split(heads, dim=1)
        mixed = ops.attention_segments(q, k, v, segments, q.shape[-1] ** -0.5)
        _add(x, mixed.flatten(1), self.out, self.scale_1, ops)
        inner = how.activation(ops.linear(self.norm_2(x), *self.up))
        _add(x, inner, self.down, self.scale_2, ops)


def _add(x: Tensor, rows: Tensor, linear: Linear, scale: Tensor | None, ops: OpSet) -> None:
    """x += scale * linear(rows), in place."""
    if scale is None:
        ops.linear_add(x, rows, *linear)
    else:
        x.addcmul_(ops.linear(rows, *linear), scale)


class Projector:
    """The steps from features to rows of the language model's width. `squares`: a function that gives rows [rows,
    width] as a view of merge squares [..., merge, merge, width]."""

    def __init__(
        self, steps: Steps, width: int, merge: int, squares: Callable[[Tensor], Tensor], make: Make, ops: OpSet
    ) -> None:
        self._squares, self._ops = squares, ops
        self._steps = steps
        self._weights: dict[str, RowNorm | Linear | Tensor] = {}
        self._merge = merge
        self._activations: dict[Activation | Gate, Callable[[Tensor], Tensor]] = {}
        for step in steps:
            if isinstance(step, Norm):
                self._weights[step.name] = RowNorm(step.kind, step.eps, width, make, ops)
            elif isinstance(step, Matrix):
                weight = make(width, step.width) if step.transposed else None
                self._weights[step.name] = Linear.make(width, step.width, step.bias, make) if weight is None else weight
                width = step.width
            elif isinstance(step, Activation):
                self._activations[step] = activation(step.name, ops)
            elif isinstance(step, Gate):
                self._activations[step] = gated(step.activation, ops)
                self._weights[step.gate] = Linear.make(width, 2 * step.width, False, make)
                width = step.width
            elif isinstance(step, Merge) and step.how != "mean":
                width *= merge**2

    def slots(self) -> dict[str, Slot]:
        found: dict[str, Slot] = {}
        for step in self._steps:
            if isinstance(step, Activation | Merge):
                continue
            names = (step.gate, step.up) if isinstance(step, Gate) else (step.name,)
            weights = self._weights[names[0]]
            found |= {names[0]: Slot(weights)} if isinstance(weights, Tensor) else weights.slots(*names)
            if isinstance(step, Matrix) and step.kernel:
                assert isinstance(weights, Linear)
                shape = step.width, weights.weight.shape[1] // self._merge**2, self._merge, self._merge
                found[f"{step.name}.weight"] = Slot(weights.weight, shape)
        return found

    def multiplied(self) -> list[Tensor]:
        return [weights.weight for weights in self._weights.values() if isinstance(weights, Linear)]

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, width] → [tokens, the language model's width]."""
        for step in self._steps:
            if isinstance(step, Activation):
                x = self._activations[step](x)
            elif isinstance(step, Merge):
                squares = self._squares(x)  # [..., merge, merge, width]
                squares = squares.movedim(-1, -3) if step.how == "unfolded" else squares
                merged = squares.mean((-3, -2)) if step.how == "mean" else squares.flatten(-3)
                x = merged.flatten(0, -2)
            else:
                weights = self._weights[step.gate if isinstance(step, Gate) else step.name]
                if isinstance(weights, RowNorm):
                    x = weights(x)
                else:
                    x = x @ weights if isinstance(weights, Tensor) else self._ops.linear(x, *weights)
                x = self._activations[step](x) if isinstance(step, Gate) else x
        return x


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
        inner = gated(c.activation, ops) if c.gated else activation(c.activation, ops)
        self._shared = _Shared(ops, c.heads, inner, ops.rope)
        self.patch = Linear.make(3 * c.temporal * c.patch**2, c.hidden, c.patch_bias, make)
        self.patch_norm = RowNorm(c.norm, c.norm_eps, c.hidden, make, ops) if c.patch_norm else None
        self.class_row = make(c.hidden) if c.class_row else None
        n_positions = c.grid**2 if c.grid else c.square_rows
        self.positions = make(n_positions, c.hidden) if c.positions != "none" else None
        self.pre_norm = RowNorm(c.norm, c.norm_eps, c.hidden, make, ops) if c.pre_norm else None
        self.blocks = [Block.make(c, make, ops) for _ in range(c.depth)]
        self._projector = Projector(c.steps, c.hidden * len(c.features), c.merge, squares, make, ops)
        self._levels = [Projector(steps, c.hidden, c.merge, squares, make, ops) for steps in c.level_steps]

    def slots(self) -> dict[str, Slot]:
        c, found = self.config, self.patch.slots("vision.patch")
        shape = (c.hidden, 3, *([c.temporal] if c.temporal > 1 else []), c.patch, c.patch)
        found["vision.patch.weight"] = Slot(self.patch.weight, shape)
        if self.class_row is not None:
            found["vision.class_row"] = Slot(self.class_row, (1, 1, c.hidden) if c.batched else None)
        if self.positions is not None:
            found["vision.positions"] = Slot(self.positions, (1, *self.positions.shape) if c.batched else None)
        for name, norm in (("patch_norm", self.patch_norm), ("pre_norm", self.pre_norm)):
            found |= norm.slots(f"vision.{name}") if norm is not None else {}
        for i, block in enumerate(self.blocks):
            found |= block.slots(f"vision.blocks.{i}", c)
        for projector in (self._projector, *self._levels):
            found |= projector.slots()
        return found

    def multiplied(self) -> list[Tensor]:
        blocks = [weight for block in self.blocks[:1] for weight in block.multiplied()]
        return [self.patch.weight, *blocks, *self._projector.multiplied()]

    def embed(self, patches: Tensor) -> Tensor:
        """[rows, patch width] → [rows, hidden]."""
        x = self._ops.linear(patches, *self.patch)
        return x if self.patch_norm is None else self.patch_norm(x)

    def run(
        self, x: Tensor, segments: Callable[[int], Segments], turns: Turns | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Run all blocks over `x` [rows, hidden], which is overwritten. `segments(i)`: the rows that attend to each
        other in layer i. Returns the features [rows, hidden * features], and the projected ones of each level."""
        c = self.config
        x = x if self.pre_norm is None else self.pre_norm(x)
        taken = {0: x.clone()} if 0 in c.features else {}
        deep = []
        for i, block in enumerate(self.blocks):
            block.run(x, segments(i), self._shared, turns)
            if i in c.levels:
                deep.append(self._levels[c.levels.index(i)](x))
            if i + 1 in c.features:
                taken[i + 1] = x if i + 1 == c.depth else x.clone()
        features = [taken[i] for i in c.features]
        return features[0] if len(features) == 1 else torch.cat(features, dim=-1), deep

    def project(self, features: Tensor) -> Tensor:
        """[rows, hidden * features] → [tokens, the language model's width]."""
        rows = self._projector(features)
        return rows if self.config.scale == 1.0 else rows.mul_(self.config.scale)


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
        n_squares = shape[0] if len(shape) == 4 else 1
        fits = len(shape) in (3, 4) and shape[-3:] == (size, size, 3) and 0 < n_squares <= self._vit.config.squares
        return n_squares * self._vit.config.square_tokens if fits else None

    def encode(self, pictures: list[PatchedPicture]) -> list[Tensor]:
        """The embedding [squares * tokens, width] of each picture."""
        return [rows.flatten(0, 1) for rows in self._encode_squares(pictures)]

    def _encode_squares(self, pictures: list[PatchedPicture]) -> Sequence[Tensor]:
        """The embeddings [squares, tokens, width] of each picture. The squares of all pictures share passes."""
        squares = [self._squares(p) for p in pictures]
        parts = self.passes.encode([square for some in squares for square in some])
        rows = parts[0] if len(parts) == 1 else torch.cat(parts)
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
            return layout.frames if not c.window or i in c.full_layers else layout.windows

        features, deep = vit.run(x, segments, (layout.cos, layout.sin))
        rows = torch.cat([vit.project(features), *deep], dim=1) if deep else vit.project(features)
        return rows if layout.back is None else rows[layout.back]


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


_POSITIONS: dict[str, Callable[[Tensor, int, PatchLayout], Tensor]] = {"bilinear": bilinear, "bicubic": bicubic}
