"""Vision transformers, as `checkpoint.TowerConfig` describes them: over squares of one size, or over pictures and
frames of any size, many in one pass. Both run the same blocks.

    pixels -> patches -> positions, norm -> blocks -> steps of the projector -> rows of the language model's width

A family is data. A mechanism that is missing is a small function in one of these places, and an option of
`TowerConfig`:

- tables of positions (bicubic): `_POSITIONS`; a norm of patches before them: `Vit.embed`
- frequencies of the rotation (even ones for rows, odd ones for columns): `frames.FREQUENCIES`
- norms of whole rows of queries and keys: `Block.run`, between the matrix and `attend`
- what follows a block's matrix before it is added (a scale): `_add`
- kinds of norms: `RowNorm`; steps of the projector (gated matrices, another way to merge, convolutions, which are a
  `Merge` and a `Matrix`): `Projector`
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

from hydrainfer.checkpoint import Activation, Matrix, Merge, ModelConfig, Norm, PixelSettings, Pool, Steps, TowerConfig
from hydrainfer.models.activations import activation, gated
from hydrainfer.models.frames import FrameTower
from hydrainfer.models.patches import PatchLayout
from hydrainfer.models.picture import Normalising, PassSize, PatchedPicture, Squares
from hydrainfer.models.slots import Slot, empty
from hydrainfer.ops import HeadNorms, OpSet, Segments

_SQUARES, _SQUARE_ROWS = 16, 32_768
"""The most squares, and the most rows of them, of one pass."""
Make = Callable[..., Tensor]
Turns = tuple[Tensor, Tensor]
"""The cosines and sines of each row, [rows, head_dim / 2] float32."""


class RowNorm:
    """A norm of each row."""

    def __init__(self, kind: str, eps: float, width: int, make: Make, ops: OpSet) -> None:
        self._kind, self._eps, self._ops = kind, eps, ops
        self._width = width
        self.weight = None
        if kind != "plain":
            self.weight = make(width, dtype=torch.float32) if kind == "rms+1" else make(width)
        self.bias = make(width) if kind == "layer" else None

    def slots(self, name: str) -> dict[str, Slot]:
        if self.weight is None:
            return {}
        found = {f"{name}.weight": Slot(self.weight, plus=float(self._kind == "rms+1"))}
        return found if self.bias is None else found | {f"{name}.bias": Slot(self.bias)}

    def __call__(self, x: Tensor) -> Tensor:
        shape = (self._width,)
        if self.weight is None:
            return F.rms_norm(x.float(), shape, eps=self._eps).to(x.dtype)
        if self._kind == "layer":
            return F.layer_norm(x, shape, self.weight, self.bias, self._eps)
        if self._kind == "rms+1":
            return F.rms_norm(x.float(), shape, self.weight, self._eps).to(x.dtype)
        return self._ops.rms_norm(x, self.weight, self._eps)


class Linear(NamedTuple):
    """A matrix [out, in] and its bias. `bounds` [4]: the least and greatest number that goes in, and that comes out."""

    weight: Tensor
    bias: Tensor | None
    bounds: Tensor | None = None

    @classmethod
    def make(cls, inner: int, outer: int, bias: bool, make: Make, clamped: bool = False) -> Linear:
        return cls(make(outer, inner), make(outer) if bias else None, make(4) if clamped else None)

    def slots(self, *names: str) -> dict[str, Slot]:
        """The slots of tensors that lie one after the other, equally large; one, if there are bounds."""
        found = dict(zip((f"{name}.weight" for name in names), map(Slot, self.weight.chunk(len(names)))))
        if self.bias is not None:
            found |= dict(zip((f"{name}.bias" for name in names), map(Slot, self.bias.chunk(len(names)))))
        if self.bounds is not None:
            (name,) = names
            found |= {f"{name}.{bound}": Slot(at) for bound, at in zip(_BOUNDS, self.bounds)}
        return found

    def __call__(self, x: Tensor, ops: OpSet) -> Tensor:
        """[rows, in] → [rows, out]."""
        if self.bounds is None:
            return ops.linear(x, self.weight, self.bias)
        low, high, least, most = self.bounds
        return ops.linear(x.clamp(low, high), self.weight, self.bias).clamp_(least, most)


_BOUNDS = "input_min", "input_max", "output_min", "output_max"


class Beside(NamedTuple):
    """Matrices over the same rows, whose products lie beside each other: one matrix, or several with bounds."""

    parts: list[Linear]

    @classmethod
    def make(cls, n: int, inner: int, outer: int, c: TowerConfig, make: Make) -> Beside:
        """`n` equally large matrices, together [outer, inner]."""
        n = n if c.clamped else 1
        return cls([Linear.make(inner, outer // n, c.biases, make, c.clamped) for _ in range(n)])

    def slots(self, *names: str) -> dict[str, Slot]:
        if len(self.parts) == 1:
            return self.parts[0].slots(*names)
        return {key: slot for part, name in zip(self.parts, names) for key, slot in part.slots(name).items()}

    def __call__(self, x: Tensor, ops: OpSet) -> Tensor:
        made = [part(x, ops) for part in self.parts]
        return made[0] if len(made) == 1 else torch.cat(made, dim=1)


class _Shared(NamedTuple):
    """What all blocks of a tower share."""

    ops: OpSet
    config: TowerConfig
    activation: Callable[[Tensor], Tensor]
    rotate: Callable[[Tensor, Tensor, Tensor], None]


@dataclass(slots=True)
class Block:
    """One layer's weights. `qkv`: queries, keys and values; `up`: if the MLP is gated, the gate and what it gates.
    `out_norm`, `down_norm`: of what is added; `heads`: of queries and keys."""

    norm_1: RowNorm
    qkv: Beside
    out: Linear
    norm_2: RowNorm
    up: Beside
    down: Linear
    out_norm: RowNorm | None
    down_norm: RowNorm | None
    heads: HeadNorms | None

    @classmethod
    def make(cls, c: TowerConfig, make: Make, ops: OpSet) -> Block:
        inner, width = c.intermediate * (1 + c.gated), c.heads * c.head_dim

        def norm() -> RowNorm:
            return RowNorm(c.norm, c.norm_eps, c.hidden, make, ops)

        return cls(
            norm_1=norm(),
            qkv=Beside.make(3, c.hidden, 3 * width, c, make),
            out=Linear.make(width, c.hidden, c.biases, make, c.clamped),
            norm_2=norm(),
            up=Beside.make(1 + c.gated, c.hidden, inner, c, make),
            down=Linear.make(c.intermediate, c.hidden, c.biases, make, c.clamped),
            out_norm=norm() if c.sandwich else None,
            down_norm=norm() if c.sandwich else None,
            heads=HeadNorms(make(c.head_dim), make(c.head_dim), c.norm_eps) if c.head_norms else None,
        )

    def slots(self, prefix: str, c: TowerConfig) -> dict[str, Slot]:
        qkv = ("qkv",) if c.fused else ("q", "k", "v")
        up = ("gate", "up") if c.gated else ("up",)
        norms = {"norm_1": self.norm_1, "norm_2": self.norm_2, "out_norm": self.out_norm, "down_norm": self.down_norm}
        found: dict[str, Slot] = {}
        for name, norm in norms.items():
            found |= {} if norm is None else norm.slots(f"{prefix}.{name}")
        for linear, names in ((self.qkv, qkv), (self.out, ("out",)), (self.up, up), (self.down, ("down",))):
            found |= linear.slots(*(f"{prefix}.{name}" for name in names))
        if self.heads is not None:
            found |= {f"{prefix}.q_norm.weight": Slot(self.heads.q), f"{prefix}.k_norm.weight": Slot(self.heads.k)}
        if c.rotation == "axial":
            turned = {f"{prefix}.{name}.weight" for name in ("q", "k", "q_norm", "k_norm")} & set(found)
            found |= {name: found[name]._replace(quarters=c.head_dim) for name in turned}
        return found

    def multiplied(self) -> list[Tensor]:
        return [linear.weight for linear in (*self.qkv.parts, self.out, *self.up.parts, self.down)]

    def run(self, x: Tensor, segments: Segments, how: _Shared, turns: Turns | None) -> None:
        """Run this block over `x` [rows, hidden] in place."""
        ops, c, heads = how.ops, how.config, how.config.heads
        qkv = self.qkv(self.norm_1(x), ops).unflatten(1, (3 * heads, -1))  # [rows, 3 * heads, head_dim]
        if self.heads is not None:
            assert turns is not None, "norms of heads in a tower without rotation"
            q, k = ops.norm_rope(qkv[:, : 2 * heads], heads, self.heads, *turns, ops)
            v = F.rms_norm(qkv[:, 2 * heads :].float(), (c.head_dim,), eps=c.norm_eps).to(x.dtype)
        else:
            if turns is not None:
                how.rotate(qkv[:, : 2 * heads], *turns)
            q, k, v = qkv.split(heads, dim=1)
        mixed = ops.attention_segments(q, k, v, segments, c.attention_scale or c.head_dim**-0.5)
        _add(x, mixed.flatten(1), self.out, self.out_norm, ops)
        inner = how.activation(self.up(self.norm_2(x), ops))
        _add(x, inner, self.down, self.down_norm, ops)


def _add(x: Tensor, rows: Tensor, linear: Linear, norm: RowNorm | None, ops: OpSet) -> None:
    """x += linear(rows) in place, normalised first if there is a `norm`."""
    if norm is None and linear.bounds is None:
        ops.linear_add(x, rows, linear.weight, linear.bias)
    else:
        made = linear(rows, ops)
        x.add_(made if norm is None else norm(made))


class Projector:
    """The steps from features to rows of the language model's width. `squares`: a function that gives rows [rows,
    width] as a view of merge squares [..., merge, merge, width]."""

    def __init__(
        self, steps: Steps, width: int, merge: int, squares: Callable[[Tensor], Tensor], make: Make, ops: OpSet
    ) -> None:
        self._squares, self._ops = squares, ops
        self._steps = steps
        self._weights: dict[str, RowNorm | Linear | Tensor] = {}
        self._activations = {step: activation(step.name, ops) for step in steps if isinstance(step, Activation)}
        for step in steps:
            if isinstance(step, Norm):
                self._weights[step.name] = RowNorm(step.kind, step.eps, width, make, ops)
            elif isinstance(step, Matrix):
                weight = make(width, step.width) if step.transposed else None
                self._weights[step.name] = Linear.make(width, step.width, step.bias, make) if weight is None else weight
                width = step.width
            elif isinstance(step, Pool) and step.name:
                self._weights |= {f"{step.name}.{end}": make(width) for end in ("bias", "scale")}
            elif isinstance(step, Merge) and step.how == "beside":
                width *= merge**2

    def slots(self) -> dict[str, Slot]:
        found: dict[str, Slot] = {}
        for name, weights in self._weights.items():
            found |= {name: Slot(weights)} if isinstance(weights, Tensor) else weights.slots(name)
        return found

    def multiplied(self) -> list[Tensor]:
        return [weights.weight for weights in self._weights.values() if isinstance(weights, Linear)]

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, width] → [tokens, the language model's width]."""
        for step in self._steps:
            if isinstance(step, Activation):
                x = self._activations[step](x)
            elif isinstance(step, Merge):
                squares = self._squares(x)
                merged = squares.mean((-3, -2)) if step.how == "mean" else squares.flatten(-3)
                x = merged.flatten(0, -2)
            elif isinstance(step, Pool):
                x = self._pool(x, step)
            else:
                weights = self._weights[step.name]
                if isinstance(weights, RowNorm):
                    x = weights(x)
                else:
                    x = x @ weights if isinstance(weights, Tensor) else weights(x, self._ops)
        return x

    def _pool(self, x: Tensor, step: Pool) -> Tensor:
        wide = self._squares(x.float()).mean((-3, -2)).flatten(0, -2).mul_(step.factor)
        if step.name:
            bias, scale = (self._weights[f"{step.name}.{end}"] for end in ("bias", "scale"))
            assert isinstance(bias, Tensor) and isinstance(scale, Tensor)
            wide.sub_(bias).mul_(scale)
        return wide.to(x.dtype)


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
        self._shared = _Shared(ops, c, inner, ops.rope)
        self.patch = Linear.make(3 * c.temporal * c.patch**2, c.hidden, c.patch_bias, make)
        self.class_row = make(c.hidden) if c.class_row else None
        self.positions = make(c.position_rows, c.hidden) if c.position_rows else None
        self.pre_norm = RowNorm(c.norm, c.norm_eps, c.hidden, make, ops) if c.pre_norm else None
        self.blocks = [Block.make(c, make, ops) for _ in range(c.depth)]
        self.project = Projector(c.steps, c.hidden * len(c.features), c.merge, squares, make, ops)
        self._levels = [Projector(steps, c.hidden, c.merge, squares, make, ops) for steps in c.level_steps]

    def slots(self) -> dict[str, Slot]:
        c, found = self.config, self.patch.slots("vision.patch")
        shape = (c.hidden, 3, *([c.temporal] if c.temporal > 1 else []), c.patch, c.patch)
        found["vision.patch.weight"] = Slot(self.patch.weight, None if c.by_pixel else shape)
        if self.class_row is not None:
            found["vision.class_row"] = Slot(self.class_row)
        if self.positions is not None:
            table = (2, c.grid, c.hidden) if c.positions == "axes" else None
            found["vision.positions"] = Slot(self.positions, table)
        found |= self.pre_norm.slots("vision.pre_norm") if self.pre_norm is not None else {}
        for i, block in enumerate(self.blocks):
            found |= block.slots(f"vision.blocks.{i}", c)
        for projector in (self.project, *self._levels):
            found |= projector.slots()
        return found

    def multiplied(self) -> list[Tensor]:
        blocks = [weight for block in self.blocks[:1] for weight in block.multiplied()]
        return [self.patch.weight, *blocks, *self.project.multiplied()]

    def embed(self, patches: Tensor) -> Tensor:
        """[rows, patch width] → [rows, hidden]."""
        return self.patch(patches, self._ops)

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
        fits = len(shape) in (3, 4) and shape[-3:] == (size, size, 3) and shape[0] > 0
        return len(self._squares(picture)) * self._vit.config.tokens if fits else None

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


def axes(table: Tensor, side: int, layout: PatchLayout) -> Tensor:
    """The sum of a patch's column's row and its row's row of the table: [rows, hidden]."""
    rows, columns = layout.places.long().unbind(1)
    return table[columns] + table[rows + side]


_POSITIONS: dict[str, Callable[[Tensor, int, PatchLayout], Tensor]] = {"bilinear": bilinear, "axes": axes}
