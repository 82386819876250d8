"""The places of a checkpoint's tensors: preallocated weights, fused ones filled slice by slice."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hydrainfer.ops import Int8Weight, OpSet, weights

Weight = Tensor | Int8Weight


class Slot(NamedTuple):
    """The place of one checkpoint tensor. `into` receives it; `shape` is the tensor's shape if that differs from
    `into`'s. `plus` is added to what was read. `pairs` (head, rotated): the tensor's rows are heads of so many rows, of
    which the first `rotated` are rotated by pairs of neighbours, here by pairs of a row of each half. `quarters`: the
    tensor's rows are heads of so many rows, each half of which is rotated by pairs of a row of each quarter; so the
    second and third quarters change places here.

    `how`: "": the tensor has `into`'s layout; "stacked", "transposed": it holds matrices [out, in] or [in, out] one
    after the other; "mxfp4", "mxfp4 scales": it is one of an MXFP4 weight's two tensors, of which the scales are read
    last."""

    into: Weight
    shape: tuple[int, ...] | None = None
    plus: float = 0.0
    pairs: tuple[int, int] | None = None
    quarters: int = 0
    how: Literal["", "stacked", "transposed", "mxfp4", "mxfp4 scales"] = ""

    @property
    def expected(self) -> tuple[int, ...]:
        return self.shape or tuple(self.into.shape)


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return weights(shape, dtype, device)


def matrix(ops: OpSet, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Weight:
    """An empty weight [out, in], int8 if `ops` is for int8 weights."""
    return Int8Weight.empty(shape, device) if ops.int8 else empty(shape, dtype, device)
