"""The choice of each operator's variant, made once, by the device, the dtype and the head size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hydrainfer.ops import native, reference, torch_variants
from hydrainfer.ops.build import load_kernels


class Need(NamedTuple):
    """The conditions that a variant must support. `native`: compiled kernels are wanted and built."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    native: native.Kernels | None


class Variant(NamedTuple):
    """One implementation. `make` gives the function to call; it is asked only if `supports` says yes."""

    name: str
    supports: Callable[[Need], bool]
    make: Callable[[Need], Callable]


@dataclass(frozen=True, slots=True)
class OpSet:
    """The chosen functions, each with its reference's signature, and the names of the variants behind them."""

    linear: Callable
    linear_add: Callable
    rms_norm: Callable
    silu_and_mul: Callable
    quick_gelu: Callable
    rope: Callable
    write_kv: Callable
    attention: Callable
    attention_segments: Callable
    chosen: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()

    def describe(self) -> list[tuple[str, str]]:
        """(operator, variant) for the table printed at start."""
        return list(self.chosen)


OPERATORS = (
    "linear", "linear_add", "rms_norm", "silu_and_mul", "quick_gelu", "rope", "write_kv", "attention",
    "attention_segments",
)  # fmt: skip


def _always(_: Need) -> bool:
    return True


def _cpu(need: Need) -> bool:
    return need.device.type == "cpu"


def _native(need: Need) -> bool:
    return need.native is not None and need.native.supports(need.dtype, need.head_dim)


def _torch(fn: Callable) -> Callable[[Need], Callable]:
    return lambda _: fn


def _kernel(name: str) -> Callable[[Need], Callable]:
    return lambda need: getattr(need.native, name)


def variants(op: str) -> list[Variant]:
    """Every known variant of an operator, best first; the last one is the reference and always applies."""
    faster: dict[str, list[Variant]] = {
        "linear": [Variant("torch-cpu", _cpu, _torch(torch_variants.linear_cpu))],
        "linear_add": [Variant("torch-cpu", _cpu, _torch(torch_variants.linear_add_cpu))],
        "rms_norm": [Variant("torch-fused", _always, _torch(torch_variants.rms_norm_torch))],
        "attention": [Variant("torch-sdpa", _always, _torch(torch_variants.attention_sdpa))],
        "attention_segments": [Variant("torch-sdpa", _always, _torch(torch_variants.attention_segments_sdpa))],
    }
    found = [Variant("native-cpu", _native, _kernel(op))] if hasattr(native.Kernels, op) else []
    return [*found, *faster.get(op, ()), Variant("reference", _always, _torch(getattr(reference, op)))]


def select_ops(
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    *,
    use_native: bool = True,
    only: str | None = None,
) -> OpSet:
    """The best supported variant of every operator. `only="reference"` (or another variant's name) restricts the
    choice where that variant exists; `use_native=False` compiles nothing."""
    device = torch.device(device)
    kernels, notes = load_kernels(device) if use_native else (None, ())
    need = Need(device, dtype, head_dim, kernels)
    chosen = {}
    for op in OPERATORS:
        usable = [v for v in variants(op) if v.supports(need)]
        chosen[op] = next((v for v in usable if v.name == only), usable[0] if only is None else usable[-1])
    return OpSet(
        **{op: v.make(need) for op, v in chosen.items()},
        chosen=tuple((op, v.name) for op, v in chosen.items()),
        notes=notes,
    )
