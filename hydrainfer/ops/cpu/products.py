"""Matrix products on a CPU: the ways to compute one, each with the signatures of `reference.linear` and `linear_add`.

Which one is fastest depends on the processor, and factors are at stake; `measured.py` measures them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hydrainfer.ops import reference
from hydrainfer.ops.cpu.native import Kernels
from hydrainfer.ops.memory import give_back

_SLICE_BYTES = 32 << 20
"""Weights are widened to float32 in slices of this size."""

WAYS = ("native-many", "native-cpu", "onednn", "torch", "transposed", "widened")
"""All ways; of two that are equally fast the first is taken. "native-cpu" reads all rows again for every few columns,
which takes longer if they are wider than those that are measured, and too many for a cache."""

Linear = Callable[..., Tensor]


class Way(NamedTuple):
    """One way to multiply: `linear(x, weight, bias=None)` and `linear_add(out, x, weight, bias=None)`."""

    name: str
    linear: Linear
    linear_add: Linear


def ways(dtype: torch.dtype, kernels: Kernels | None) -> dict[str, Way]:
    """The ways available on this machine for `dtype`, by name. None of them keeps a second copy of a weight."""
    found = []
    if kernels is not None:
        found.append(Way("native-cpu", kernels.linear, kernels.linear_add))
        found.append(Way("native-many", kernels.linear_many, kernels.linear_many_add))
    if _onednn_has(dtype):
        found.append(_way("onednn", _onednn))
    if dtype == torch.float32:
        found.append(Way("torch", reference.linear, reference.linear_add))
        found.append(_way("transposed", _transposed))
    else:
        found.append(_way("torch", reference.linear))
        found.append(_way("widened", _widened))
    return {way.name: way for way in found}


def _way(name: str, linear: Linear) -> Way:
    return Way(name, linear, lambda out, x, weight, bias=None: out.add_(linear(x, weight, bias)))


def _onednn_has(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies this dtype here. Its bf16 and fp16 need a processor with wide vectors."""
    ops = torch.ops.mkldnn
    if not (torch.backends.mkldnn.is_available() and hasattr(ops, "_linear_pointwise")):
        return False
    if dtype == torch.bfloat16:
        return bool(ops._is_mkldnn_bf16_supported())
    return dtype == torch.float32 or bool(ops._is_mkldnn_fp16_supported())


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A product by oneDNN. For float32, torch would choose MKL, which is half as fast on an AMD processor with
    AVX-512."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def pack(weight: Tensor) -> None:
    """Reorder `weight` [out, in] into oneDNN's own layout, in place. A product with many rows then takes 7 % less time,
    for some numbers of rows 25 % less (measured on Zen 5). Afterwards only `packed_linear` takes the weight, and
    existing views of it are invalid, so nothing else may read it."""
    other = torch.ops.mkldnn._reorder_linear_weight(weight)
    torch.utils.swap_tensors(weight, other)
    give_back(other)


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`reference.linear` with a weight that `pack` has reordered."""
    return _onednn(x, weight, bias)


def _transposed(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """MKL multiplies `weight @ x.T` up to twice as fast as `x @ weight.T` for few rows (measured on Zen 3)."""
    out = torch.mm(weight, x.t()).t().contiguous()
    return out if bias is None else out.add_(bias)


def _widened(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A product with weights widened to float32 slice by slice. Without bf16 or fp16 instructions, a product of many
    rows in those dtypes takes three times as long."""
    linear = _onednn if _onednn_has(torch.float32) else reference.linear
    out, wide = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype), x.float()
    step = max(1, _SLICE_BYTES // (4 * weight.shape[1]))
    for first in range(0, weight.shape[0], step):
        part = slice(first, first + step)
        out[:, part] = linear(wide, weight[part].float(), None if bias is None else bias[part].float())
    return out
