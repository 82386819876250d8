"""The table of chosen operators, and what the products of matrices on a CPU are asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from hydrainfer.ops.weights import Decode, PlainLayer, Shortlist


class Products(Protocol):
    """Matrix products on a CPU, each in the fastest way that was measured. `native_rows`: the most rows that our
    kernels for few rows multiply."""

    @property
    def native_rows(self) -> int: ...

    def linear(self, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor: ...

    def linear_add(self, out: Tensor, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor: ...

    def decoder_rows(self, n_elements: int) -> int:
        """The most decodes that a whole decoder in one call is used for, by the elements of a layer's weights."""

    def slower(self, rows: int) -> float:
        """How many times longer the product of so many rows takes than that of one."""

    def prepare(self, weight: Any) -> None:
        """Measure the ways for weights of this shape, if that is not known."""

    def packs(self, weight: Any) -> bool:
        """Whether a weight that is multiplied with many rows should be packed for oneDNN."""

    def compiles(self, x: Tensor, weight: Any) -> bool:
        """Whether this product makes oneDNN compile code for the number of rows."""

    def describe(self) -> list[str]:
        """The ways by number of rows, for people."""


@dataclass(frozen=True, slots=True)
class OpSet:
    """The chosen functions, each with its reference's signature, and the names of the variants behind them."""

    linear: Callable
    linear_add: Callable
    rms_norm: Callable
    rms_norm_wide: Callable
    silu_and_mul: Callable
    gelu_tanh_and_mul: Callable
    clamped_swiglu: Callable
    quick_gelu: Callable
    rope: Callable
    rope_write_kv: Callable
    norm_rope: Callable
    norm_rope_write_kv: Callable
    prepare: Callable
    attention: Callable
    attention_segments: Callable
    short_conv: Callable
    grid_conv: Callable
    gated_delta: Callable
    experts: Callable
    chosen: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()
    products: Products | None = None
    int8: bool = False
    """Whether `linear` and `linear_add` also take an `Int8Weight`, so that a decoder's weights can be int8."""
    decoder: Callable[[Sequence[PlainLayer], int, float, float], Decode] | None = None
    """`Kernels.decoder`, for batches of only a few decodes; None where it is not faster."""
    decoder_rows: Callable[[int], int] = lambda _: 0
    """The most decodes that `decoder` is used for, given the number of elements of a layer's weights."""
    likeliest: Callable[[Tensor, Tensor, Shortlist], Tensor] | None = None
    """`Kernels.likeliest`, for up to `likeliest_rows` rows; None where it is not faster."""
    likeliest_rows: int = 0
    replays_segments: Callable[[int], bool] = lambda _: False
    """Whether a CUDA graph of `attention_segments` can be replayed with other segment lengths than the captured ones,
    given the size of a head."""

    @property
    def captures(self) -> bool:
        """Whether attention can be part of a CUDA graph, because it is planned beforehand."""
        return ("attention", "flashinfer") in self.chosen

    @property
    def captures_experts(self) -> bool:
        """Whether experts can be part of a CUDA graph, because they do not wait for the device."""
        return ("experts", "torch-grouped") in self.chosen

    @property
    def captures_scans(self) -> bool:
        """Whether models with recurrent layers can be part of a CUDA graph, whose padding rows leave nothing
        (`ScanBatch.captured`, `AttentionBatch.skips`)."""
        ops = "short_conv", "gated_delta", "rope_write_kv", "norm_rope_write_kv"
        return {(op, "native-cuda") for op in ops} <= {*self.chosen}

    @property
    def captures_grids(self) -> bool:
        """Whether a CUDA graph of `grid_conv` can be replayed with other grids than the captured ones, for kernels of
        3 x 3."""
        return ("grid_conv", "native-cuda") in self.chosen

    def describe(self) -> list[tuple[str, str]]:
        """(operator, variant) for the table printed at start; "decoder" where layers are computed in one call."""
        return [*self.chosen, *([] if self.decoder is None else [("decoder", "native-cpu")])]
