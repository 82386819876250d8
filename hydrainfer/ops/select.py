"""The choice of each operator's variant, made once, by the device, the dtype and the head size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hydrainfer.config.schema import Quantization
from hydrainfer.ops import delta_chunks, reference, torch_variants
from hydrainfer.ops.build import load_kernels
from hydrainfer.ops.cpu.int8 import Int8Products
from hydrainfer.ops.cpu.measured import faster_than_float32, products
from hydrainfer.ops.cpu.measured_attention import fastest_in_segments
from hydrainfer.ops.cpu.native import Kernels
from hydrainfer.ops.cpu.products import WAYS, pack, packed_linear, ways
from hydrainfer.ops.cuda.flashinfer import FlashInfer, find_flashinfer
from hydrainfer.ops.cuda.flashinfer_modules import PagedAttention
from hydrainfer.ops.cuda.kernels import CudaKernels, cuda_kernels
from hydrainfer.ops.memory import rows_in_steps, with_more_rows
from hydrainfer.ops.table import OpSet, Products
from hydrainfer.ops.weights import ExpertWeights, Int8Weight


class Need(NamedTuple):
    """The conditions that a variant must support. `native`: the compiled kernels, if they are wanted and built.
    `products`: matrix products chosen by measurement, on a CPU; `segments`: the variant of `attention_segments` chosen
    likewise. `flash`, `grouped`: torch's FlashAttention and its grouped matrix products support the device."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    native: Kernels | None
    products: Products | None = None
    segments: str | None = None
    cuda: CudaKernels | None = None
    flashinfer: FlashInfer | None = None
    flash: bool = False
    grouped: bool = False


class Variant(NamedTuple):
    """One implementation. `make` gives the function to call; it is asked only if `supports` says yes."""

    name: str
    supports: Callable[[Need], bool]
    make: Callable[[Need], Callable]


_SHORTLISTED = {torch.float32: 8, torch.bfloat16: 2}
"""Rows up to which a shortlist is faster than the head (measured on Zen 5). For more, int8 arithmetic is the limit."""


def pausing(ops: OpSet, pause: Callable[[], None]) -> OpSet:
    """The same operators, with a call of `pause` before each matrix product."""

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        pause()
        return ops.linear(x, weight, bias)

    def linear_add(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        pause()
        return ops.linear_add(out, x, weight, bias)

    return replace(ops, linear=linear, linear_add=linear_add)


def stepping(ops: OpSet) -> OpSet:
    """The same operators, except that rows for oneDNN are padded up to one of a few numbers, and the extra rows of the
    result are dropped. For each number of rows and shape of weight oneDNN compiles code, in about a millisecond, and
    keeps half a MiB of it (`machine.limit_compiled_products`). Prompts have any number of tokens, so without padding
    most products would be compiled first.
    """
    products = ops.products
    if products is None:
        return ops

    def missing(x: Tensor, weight: Tensor) -> int:
        more = rows_in_steps(x.shape[0]) - x.shape[0]
        return more if more and (_packed(weight) or products.compiles(x, weight)) else 0

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        more = missing(x, weight)
        return ops.linear(with_more_rows(x, more), weight, bias)[:-more] if more else ops.linear(x, weight, bias)

    def linear_add(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not missing(x, weight):
            return ops.linear_add(out, x, weight, bias)
        return out.add_(linear(x, weight, bias))

    return replace(ops, linear=linear, linear_add=linear_add)


def packing(ops: OpSet) -> OpSet:
    """The same operators, for weights that are multiplied with many rows at a time, such as a vision tower's. Where
    oneDNN is the fastest for many rows, a weight is packed when it is first used; from then on oneDNN computes all its
    products."""
    products = ops.products
    if products is None:
        return ops

    def packed(weight: Tensor) -> bool:
        if not _packed(weight) and products.packs(weight):
            pack(weight)
        return _packed(weight)

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return packed_linear(x, weight, bias) if packed(weight) else ops.linear(x, weight, bias)

    def linear_add(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if packed(weight):
            return out.add_(packed_linear(x, weight, bias))
        return ops.linear_add(out, x, weight, bias)

    return replace(ops, linear=linear, linear_add=linear_add)


def _packed(weight: Tensor | Int8Weight) -> bool:
    return isinstance(weight, Tensor) and weight.is_mkldnn


OPERATORS = (
    "linear", "linear_add", "rms_norm", "rms_norm_wide", "silu_and_mul", "gelu_tanh_and_mul", "clamped_swiglu",
    "quick_gelu", "rope", "rope_write_kv", "norm_rope", "norm_rope_write_kv", "prepare", "attention",
    "attention_segments",
    "short_conv", "grid_conv", "gated_delta", "experts",
)  # fmt: skip


def _always(_: Need) -> bool:
    return True


def _measured(need: Need) -> bool:
    return need.products is not None


def _native(need: Need) -> bool:
    return need.native is not None and need.native.supports(need.dtype, need.head_dim)


def _cuda(need: Need) -> bool:
    return need.cuda is not None and need.cuda.supports(need.dtype, need.head_dim)


def _flashinfer(need: Need) -> bool:
    return need.flashinfer is not None


def _flash(need: Need) -> bool:
    return need.flash and need.dtype in (torch.bfloat16, torch.float16)


def _grouped(need: Need) -> bool:
    return need.grouped and need.dtype == torch.bfloat16


def _native_segments(need: Need) -> bool:
    return _native(need) and need.segments != "torch-sdpa"


def _torch(fn: Callable) -> Callable[[Need], Callable]:
    return lambda _: fn


def _kernel(name: str) -> Callable[[Need], Callable]:
    return lambda need: getattr(need.native, name)


def _product(op: str, name: str) -> Variant:
    """One way to multiply on a CPU, as a variant of `linear` or `linear_add`."""

    def supports(need: Need) -> bool:
        kernels = need.native if _native(need) else None
        return need.device.type == "cpu" and name in ways(need.dtype, kernels)

    return Variant(name, supports, lambda need: getattr(ways(need.dtype, need.native)[name], op))


_chunked = partial(reference.gated_delta, rule=delta_chunks.delta_rule, norm=torch_variants.rms_norm_torch)


def _experts(need: Need) -> Callable:
    """The compiled kernel if it is the fastest way for the average number of rows per expert, else the reference."""
    assert need.native is not None
    together, most = need.native.experts, None if need.products is None else need.products.native_rows

    def experts(out: Tensor, x: Tensor, weights: Tensor, chosen: Tensor, e: ExpertWeights, ops: OpSet) -> Tensor:
        few = most is None or -(-chosen.numel() // e.n) <= most
        return (together if few else reference.experts)(out, x, weights, chosen, e, ops)

    return experts


def computes_sooner(dtype: torch.dtype, *, use_native: bool, threads: int | None) -> bool:
    """Whether the CPU's matrix products are faster in this dtype than in float32."""
    kernels = load_kernels(torch.device("cpu"))[0] if use_native else None
    return faster_than_float32(dtype, kernels, threads)


def variants(op: str) -> list[Variant]:
    """Every known variant of an operator, best first; the last one is the reference and always applies."""
    faster: dict[str, list[Variant]] = {
        "rms_norm": [Variant("torch-fused", _always, _torch(torch_variants.rms_norm_torch))],
        "prepare": [Variant("torch-sdpa", _always, _torch(torch_variants.prepare))],
        "attention": [Variant("torch-sdpa", _always, _torch(torch_variants.attention_sdpa))],
        "attention_segments": [
            Variant("torch-varlen", _flash, _torch(torch_variants.attention_segments_varlen)),
            Variant("torch-sdpa", _always, _torch(torch_variants.attention_segments_sdpa)),
        ],
        "gated_delta": [Variant("torch-chunks", _always, _torch(_chunked))],
    }
    if op in ("linear", "linear_add"):
        measured = Variant("measured", _measured, lambda need: getattr(need.products, op))
        return [
            measured,
            *(_product(op, way) for way in WAYS),
            Variant("reference", _always, _torch(getattr(reference, op))),
        ]
    if op == "experts":
        return [
            Variant("native-cpu", _native, _experts),
            Variant("torch-grouped", _grouped, _torch(torch_variants.experts_grouped)),
            Variant("reference", _always, _torch(reference.experts)),
        ]
    supports = _native_segments if op == "attention_segments" else _native
    found = [Variant("native-cpu", supports, _kernel(op))] if hasattr(Kernels, op) else []
    if hasattr(CudaKernels, op):
        found.append(Variant("native-cuda", _cuda, lambda need: getattr(need.cuda, op)))
    if op in ("prepare", "attention"):
        found.append(Variant("flashinfer", _flashinfer, lambda need: getattr(need.flashinfer, op)))
    return [*found, *faster.get(op, ()), Variant("reference", _always, _torch(getattr(reference, op)))]


def _replays_segments(attention: Variant) -> Callable[[int], bool]:
    """`OpSet.replays_segments` of the chosen variant."""
    return torch_variants.takes_varlen if attention.name == "torch-varlen" else lambda _: False


def select_ops(
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    *,
    use_native: bool = True,
    only: str | None = None,
    threads: int | None = None,
    quantization: Quantization = "none",
    attentions: Sequence[PagedAttention] | None = None,
) -> OpSet:
    """The best supported variant of every operator. `only="reference"` (or another variant's name) restricts the
    choice where that variant exists; `use_native=False` compiles nothing. On a CPU, matrix products are chosen for this
    number of threads (default: torch's). `quantization` "int8" works on a CPU only. `attentions`: those of the model's
    caches, which FlashInfer must compute correctly to be chosen on CUDA; by default plain ones, with and without a
    window."""
    device = torch.device(device)
    assert quantization == "none" or (device.type == "cpu" and only is None)
    if device.type == "cuda":  # cuDNN builds a plan for every new shape; a decode's changes every few tokens
        torch.backends.cuda.enable_cudnn_sdp(False)
    kernels, notes = load_kernels(device) if use_native else (None, ())
    need = Need(device, dtype, head_dim, kernels)
    if use_native and device.type == "cuda":
        cuda, no_cuda = cuda_kernels()
        if attentions is None:
            plain = PagedAttention("kv", dtype, 8, 8, head_dim, head_dim, head_dim**-0.5)
            attentions = [plain, plain._replace(window=64)]
        flashinfer, no_flashinfer = find_flashinfer(device, attentions)
        need = need._replace(
            cuda=cuda,
            flashinfer=flashinfer,
            flash=torch_variants.has_flash_attention(device),
            grouped=torch_variants.has_grouped_products(device),
        )
        notes = (*notes, *no_cuda, *no_flashinfer)
    if device.type == "cpu" and only is None:
        fit = kernels if _native(need) else None
        segments = fastest_in_segments(dtype, fit, threads) if fit else None
        wide = products(dtype, fit, threads)
        found = Int8Products(wide, dtype, fit, threads) if quantization == "int8" else wide
        need = need._replace(products=found, segments=segments)
    kernels, few = (need.native, need.products.native_rows) if _native(need) and need.products else (None, 0)
    shortlisted = min(few, _SHORTLISTED.get(dtype, 0)) if quantization == "none" else 0
    chosen = {}
    for op in OPERATORS:
        usable = [v for v in variants(op) if v.supports(need)]
        chosen[op] = next((v for v in usable if v.name == only), usable[0] if only is None else usable[-1])
    return OpSet(
        **{op: v.make(need) for op, v in chosen.items()},
        chosen=tuple((op, v.name) for op, v in chosen.items()),
        notes=notes,
        products=need.products,
        int8=quantization == "int8",
        decoder=kernels.decoder if kernels and few else None,
        decoder_rows=need.products.decoder_rows if kernels and few and need.products else lambda _: 0,
        likeliest=kernels.likeliest if kernels and shortlisted else None,
        likeliest_rows=shortlisted,
        replays_segments=_replays_segments(chosen["attention_segments"]),
    )
