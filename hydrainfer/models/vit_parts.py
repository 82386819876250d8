"""The parts of a vision transformer: norms, matrices and blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hydrainfer.checkpoint import TowerConfig
from hydrainfer.models.slots import Slot
from hydrainfer.ops import OpSet, Segments

Make = Callable[..., Tensor]
Turns = tuple[Tensor, Tensor]
"""The cosines and sines of each row, [rows, head_dim / 2] float32."""


class RowNorm:
    """A norm of each row."""

    def __init__(self, kind: str, eps: float, width: int, make: Make, ops: OpSet) -> None:
        self._kind, self._eps, self._ops = kind, eps, ops
        self.width = width
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        if kind == "rms+1":
            self.weight = make(width, dtype=torch.float32)
        elif kind != "plain":
            self.weight = make(width)
        if kind == "layer":
            self.bias = make(width)

    def slots(self, name: str) -> dict[str, Slot]:
        if self.weight is None:
            return {}
        slots = {f"{name}.weight": Slot(self.weight, plus=float(self._kind == "rms+1"))}
        if self.bias is not None:
            slots[f"{name}.bias"] = Slot(self.bias)
        return slots

    def __call__(self, x: Tensor) -> Tensor:
        shape = (self.width,)
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
        linear = cls(make(outer, inner), None)
        if bias:
            linear = linear._replace(bias=make(outer))
        if clamped:
            linear = linear._replace(bounds=make(4))
        return linear

    def slots(self, *names: str) -> dict[str, Slot]:
        """The slots of tensors that lie one after the other, equally large; of one, if there are bounds."""
        n = len(names)
        slots = {f"{name}.weight": Slot(part) for name, part in zip(names, self.weight.chunk(n))}
        if self.bias is not None:
            slots |= {f"{name}.bias": Slot(part) for name, part in zip(names, self.bias.chunk(n))}
        if self.bounds is not None:
            (name,) = names
            slots |= {f"{name}.{bound}": Slot(number) for bound, number in zip(_BOUNDS, self.bounds)}
        return slots

    def __call__(self, x: Tensor, ops: OpSet) -> Tensor:
        """[rows, in] → [rows, out]."""
        if self.bounds is None:
            return ops.linear(x, self.weight, self.bias)
        low, high, least, most = self.bounds
        return ops.linear(x.clamp(low, high), self.weight, self.bias).clamp_(least, most)


_BOUNDS = "input_min", "input_max", "output_min", "output_max"


class Beside(NamedTuple):
    """Matrices over the same rows, whose products lie beside each other: as one matrix, or several with bounds."""

    parts: list[Linear]

    @classmethod
    def make(cls, n: int, inner: int, outer: int, bias: bool, make: Make, clamped: bool) -> Beside:
        """`n` equally large matrices, together [outer, inner]."""
        if not clamped:
            n = 1
        return cls([Linear.make(inner, outer // n, bias, make, clamped) for _ in range(n)])

    def slots(self, *names: str) -> dict[str, Slot]:
        if len(self.parts) == 1:
            return self.parts[0].slots(*names)
        return {key: slot for part, name in zip(self.parts, names) for key, slot in part.slots(name).items()}

    def __call__(self, x: Tensor, ops: OpSet) -> Tensor:
        products = [part(x, ops) for part in self.parts]
        if len(products) == 1:
            return products[0]
        return torch.cat(products, dim=1)


class Shared(NamedTuple):
    """What all blocks of a tower share."""

    ops: OpSet
    config: TowerConfig
    activation: Callable[[Tensor], Tensor]
    rotate: Callable[[Tensor, Tensor, Tensor], None]


@dataclass(slots=True)
class Block:
    """One layer's weights. `qkv`: queries, keys and values; `heads_norms`: of queries, keys and values; `up`: if the
    MLP is gated, the gate and what it gates. `scale_1`, `scale_2`: what is added is multiplied by a vector, or
    normalised."""

    norm_1: RowNorm
    qkv: Beside
    heads_norms: tuple[RowNorm, ...]
    out: Linear
    scale_1: Tensor | RowNorm | None
    norm_2: RowNorm
    up: Beside
    down: Linear
    scale_2: Tensor | RowNorm | None

    @classmethod
    def make(cls, c: TowerConfig, make: Make, ops: OpSet) -> Block:
        inner, width = c.intermediate * (1 + c.gated), c.heads * c.head_dim

        def norm() -> RowNorm:
            return RowNorm(c.norm, c.norm_eps, c.hidden, make, ops)

        def scale() -> Tensor | RowNorm | None:
            if c.sandwich:
                return norm()
            if c.layer_scale:
                return make(c.hidden)
            return None

        normed, kinds = width, []
        if c.qk_norm == "head":
            normed = c.head_dim
        if c.qk_norm != "none":
            kinds = ["rms", "rms"]
        if kinds and c.value_norm:
            kinds.append("plain")
        return cls(
            norm_1=norm(),
            qkv=Beside.make(3, c.hidden, 3 * width, c.qkv_bias, make, c.clamped),
            heads_norms=tuple(RowNorm(kind, c.qk_eps, normed, make, ops) for kind in kinds),
            out=Linear.make(width, c.hidden, c.out_bias, make, c.clamped),
            scale_1=scale(),
            norm_2=norm(),
            up=Beside.make(1 + c.gated, c.hidden, inner, c.mlp_bias, make, c.clamped),
            down=Linear.make(c.intermediate, c.hidden, c.mlp_bias, make, c.clamped),
            scale_2=scale(),
        )

    def slots(self, prefix: str, c: TowerConfig) -> dict[str, Slot]:
        qkv: tuple[str, ...] = "q", "k", "v"
        if c.fused:
            qkv = ("qkv",)
        up: tuple[str, ...] = ("up",)
        if c.gated:
            up = "gate", "up"
        slots = self.norm_1.slots(f"{prefix}.norm_1") | self.norm_2.slots(f"{prefix}.norm_2")
        for linear, names in ((self.qkv, qkv), (self.out, ("out",)), (self.up, up), (self.down, ("down",))):
            slots |= linear.slots(*(f"{prefix}.{name}" for name in names))
        for letter, norm in zip("qkv", self.heads_norms):
            slots |= norm.slots(f"{prefix}.{letter}_norm")
        if c.rotation == "axial":
            turned = {f"{prefix}.{name}.weight" for name in ("q", "k", "q_norm", "k_norm")} & set(slots)
            slots |= {name: slots[name]._replace(quarters=c.head_dim) for name in turned}
        for name, scale in ((f"{prefix}.scale_1", self.scale_1), (f"{prefix}.scale_2", self.scale_2)):
            if isinstance(scale, RowNorm):
                slots |= scale.slots(name)
            elif scale is not None:
                slots[name] = Slot(scale)
        return slots

    def multiplied(self) -> list[Tensor]:
        return [linear.weight for linear in (*self.qkv.parts, self.out, *self.up.parts, self.down)]

    def run(self, x: Tensor, segments: Segments, how: Shared, turns: Turns | None) -> None:
        """Run this block over `x` [rows, hidden] in place."""
        ops, c, heads = how.ops, how.config, how.config.heads
        rows = self.qkv(self.norm_1(x), ops)
        for part, norm in zip(rows.chunk(3, dim=1), self.heads_norms):
            wide = part.unflatten(1, (-1, norm.width))  # each head, or all of them
            wide.copy_(norm(wide.flatten(0, 1)).view(wide.shape))
        qkv = rows.unflatten(1, (3 * heads, -1))  # [rows, 3 * heads, head_dim]
        if turns is not None:
            how.rotate(qkv[:, : 2 * heads], *turns)
        q, k, v = qkv.split(heads, dim=1)
        mixed = ops.attention_segments(q, k, v, segments, c.attention_scale or c.head_dim**-0.5)
        _add(x, mixed.flatten(1), self.out, self.scale_1, ops)
        inner = how.activation(self.up(self.norm_2(x), ops))
        _add(x, inner, self.down, self.scale_2, ops)


def _add(x: Tensor, rows: Tensor, linear: Linear, scale: Tensor | RowNorm | None, ops: OpSet) -> None:
    """x += linear(rows), multiplied by `scale` or normalised by it, in place."""
    if isinstance(scale, RowNorm):
        x.add_(scale(linear(rows, ops)))
    elif isinstance(scale, Tensor):
        x.addcmul_(linear(rows, ops), scale)
    elif linear.bounds is not None:
        x.add_(linear(rows, ops))
    else:
        ops.linear_add(x, rows, linear.weight, linear.bias)
