"""Weights in the forms that operators take besides tensors: 8 bits, experts, whole layers, and a head's shortlist."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hydrainfer.ops.batch import KV, AttentionBatch
from hydrainfer.ops.memory import weights

_PIECE_BYTES = 4 << 20  # of the widened head, made at a time
_ROUNDING = 2.0**-24  # the relative rounding error of float32


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A weight [out, in]: `values` [out, in] int8 times `scales` [out] float32. The largest value of a row is 127 or
    -127."""

    values: Tensor
    scales: Tensor

    @classmethod
    def empty(cls, shape: tuple[int, int], device: torch.device) -> Int8Weight:
        return cls(
            weights(shape, torch.int8, device),
            torch.empty(shape[0], dtype=torch.float32, device=device),
        )

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def numel(self) -> int:
        return self.values.numel()

    def __getitem__(self, rows: slice | Tensor) -> Int8Weight:
        return Int8Weight(self.values[rows], self.scales[rows])

    def split(self, sizes: Sequence[int]) -> list[Int8Weight]:
        return [Int8Weight(*parts) for parts in zip(self.values.split(sizes), self.scales.split(sizes))]

    def take(self, rows: Tensor) -> None:
        """Fill from a wide weight [out, in], rounded to the nearest step."""
        wide = rows.float()
        self.scales.copy_(wide.abs().amax(1) / 127)
        self.values.copy_((wide / self.scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round_())

    def wide(self, dtype: torch.dtype) -> Tensor:
        """The weight [out, in] in `dtype`."""
        return (self.values.float() * self.scales[:, None]).to(dtype)


class ExpertWeights(NamedTuple):
    """`n` gated MLPs. The rows of expert i start at `i * 2 * width` in `gate_up` and at `i * hidden` in `down`. Biases:
    [n, rows per expert]. `limit`, `alpha`: parameters of GPT-OSS's gate; without a limit the gate is SiLU, or GELU by
    tanh if `gelu`."""

    n: int
    gate_up: Tensor | Int8Weight
    down: Tensor | Int8Weight
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    limit: float = 0.0
    alpha: float = 1.0
    gelu: bool = False

    def gated(self, wide: Tensor, ops: Any) -> Tensor:
        """The gated activations of rows [rows, 2 * width], by `ops`."""
        if self.limit:
            return ops.clamped_swiglu(wide, self.limit, self.alpha)
        return ops.gelu_tanh_and_mul(wide) if self.gelu else ops.silu_and_mul(wide)

    def of(self, i: int) -> tuple[Tensor | Int8Weight, Tensor | Int8Weight]:
        """The matrices of expert `i`: [2 * width, hidden] and [hidden, width]."""
        wide, narrow = (weight.shape[0] // self.n for weight in (self.gate_up, self.down))
        return self.gate_up[i * wide : (i + 1) * wide], self.down[i * narrow : (i + 1) * narrow]


class PlainLayer(NamedTuple):
    """A decoder layer that adds `out(attention(qkv(norm(x))))` to x, then `down(silu(gate) * up)` of
    `gate_up(norm(x))`. Norms are RMS norms. `q_norm` and `k_norm`, unless None, apply to each head before RoPE. `sinks`
    float32 [heads], as in `attention`. Each matrix is followed by its bias or None."""

    input_norm: Tensor
    mlp_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    sinks: Tensor | None
    qkv: Tensor | Int8Weight
    qkv_bias: Tensor | None
    out: Tensor | Int8Weight
    out_bias: Tensor | None
    gate_up: Tensor | Int8Weight
    gate_up_bias: Tensor | None
    down: Tensor | Int8Weight
    down_bias: Tensor | None


class Decode(Protocol):
    """A function that runs rows through consecutive layers. All rows are decodes of `batch`."""

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, caches: Sequence[KV], batch: AttentionBatch) -> None:
        """`x` [rows, hidden], contiguous, is overwritten. `cos`, `sin`: see `rope`. `caches`: one per layer."""


class Shortlist:
    """An int8 copy of a head, with error bounds. `narrow`: the head [vocab, hidden] in 8 bits. `errors` float32
    [vocab]: a logit by `narrow` differs from the head's logit by at most this, times the norm of the hidden row."""

    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        self.narrow = Int8Weight.empty(shape, device)
        self.errors = torch.empty(shape[0], dtype=torch.float32, device=device)

    @property
    def nbytes(self) -> int:
        return self.narrow.nbytes + self.errors.nbytes

    def take(self, head: Tensor) -> None:
        """Fill from this head. The error bound covers the 8 bits (by Cauchy-Schwarz), and the rounding in the sums of
        both products and of the logit itself."""
        rounded = 4 * (head.shape[1] + 4) * _ROUNDING + torch.finfo(head.dtype).eps / 2
        step = max(1, _PIECE_BYTES // (4 * head.shape[1]))
        for first in range(0, head.shape[0], step):
            part = slice(first, first + step)
            wide, narrow = head[part].float(), self.narrow[part]
            narrow.take(wide)
            off = (wide - narrow.wide(torch.float32)).norm(dim=1)
            self.errors[part] = 1.01 * (off + rounded * wide.norm(dim=1))
