"""The compiled modules of FlashInfer (pinned: 0.7.2.post1) that attention needs, in FlashInfer's own terms.

FlashInfer compiles a module for each dtype, head size and kind of mask when it is first used, in about two minutes of a
core. `modules_for` names them for whoever builds them beforehand.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import torch

Kind = Literal["plain", "sinks", "ranges", "cuda-cores"]
"""`plain`: causal, chunks and decodes; `sinks`: the same with attention sinks; `ranges`: pictures whose tokens see each
other; `cuda-cores`: decodes alone, by the kernel that uses no tensor cores."""

_DTYPES = (torch.bfloat16, torch.float16)
_HEADS = ((64, 64), (128, 128), (192, 128), (256, 256))
"""(width of keys, width of values) that FlashInfer's kernels are known to take."""


class Module(NamedTuple):
    """One module. `windowed`: tokens see only a window; always False for `ranges`, which takes the window as a
    number. `capped`: scores have a cap."""

    kind: Kind
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    windowed: bool
    capped: bool = False


class PagedAttention(NamedTuple):
    """The attention of the layers of one paged cache. `head_dim`: the width of queries and keys; `window`: how many
    tokens a token sees, itself included, 0 for all; `whole`: the tokens of a picture see each other; `cap`: the cap of
    scores, or 0."""

    cache: str
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    block_tokens: int = 16
    window: int = 0
    sinks: bool = False
    whole: bool = False
    cap: float = 0.0

    def refusal(self) -> str:
        """The reason why FlashInfer cannot compute this attention; empty if it can."""
        if self.dtype not in _DTYPES:
            return f"FlashInfer computes no {str(self.dtype).removeprefix('torch.')}"
        if (self.head_dim, self.value_dim) not in _HEADS:
            return f"FlashInfer has no heads of {self.head_dim} and {self.value_dim}"
        if self.cap and (self.sinks or self.whole):
            return "FlashInfer caps no scores beside sinks or pictures that are seen whole"
        return ""

    def module(self, kind: Kind | None = None) -> Module:
        """The module of this kind; by default the one that computes chunks and decodes."""
        kind = kind or ("sinks" if self.sinks else "plain")
        windowed = self.window > 0 and kind != "ranges"
        return Module(kind, self.dtype, self.head_dim, self.value_dim, windowed, self.cap > 0)

    def modules(self) -> list[Module]:
        """The modules that requests over this cache need. (That of `cuda-cores` is extra.)"""
        return [self.module(), *([self.module("ranges")] if self.whole and not self.sinks else [])]


def modules_for(wanted: Iterable[Module]) -> list[Any]:
    """FlashInfer's `JitSpec`s of these modules, each once. `spec.build()` compiles one, also without a GPU if
    `FLASHINFER_CUDA_ARCH_LIST` names the architecture ("9.0"); `spec.get_library_path()` is the result."""
    specs = {spec.name: spec for module in dict.fromkeys(wanted) for spec in _specs(module)}
    return list(specs.values())


def sink_module(module: Module) -> tuple[list[Any], dict[str, Any]]:
    """`jit_args` and `jit_kwargs` of a wrapper with attention sinks. FlashInfer's own wrapper for sinks leaves the head
    size out of its module's name, so that one cache folder could not hold two sizes."""
    from flashinfer.jit.attention.variants import attention_sink_decl

    kind = str(module.dtype).removeprefix("torch.")
    name = f"hydrainfer_sinks_{kind}_qk{module.head_dim}_vo{module.value_dim}_window{module.windowed:d}"
    dtypes = [module.dtype] * 3 + [torch.int32]
    tensors_and_scalars = [["sink"], ["float"], ["sm_scale"], ["double"]]
    variant = ["AttentionSink", attention_sink_decl["fa2"]]
    strides = "equal" if module.head_dim == module.value_dim else "independent"
    return (
        [name, *dtypes, module.head_dim, module.value_dim, *tensors_and_scalars, *variant],
        {"use_sliding_window": module.windowed, "paged_kv_stride_mode": strides},
    )


def make_wrapper(module: Module, workspace: torch.Tensor, **arrays: Any) -> Any:
    """FlashInfer's wrapper for a module, which it compiles or loads: at once, or when it first plans. `arrays`: those
    of a wrapper in a CUDA graph."""
    import flashinfer

    if module.kind == "cuda-cores":
        arrays.pop("qo_indptr_buf", None)
        renamed = {f"{name}fer" if name.endswith("_buf") else name: array for name, array in arrays.items()}
        return flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2", **renamed)
    if module.kind == "ranges":
        return flashinfer.BatchPrefillWithCausalBidirectionalRangesWrapper(
            workspace,
            "NHD",
            q_data_type=module.dtype,
            kv_data_type=module.dtype,
            head_dim_qk=module.head_dim,
            head_dim_vo=module.value_dim,
            **arrays,
        )
    if module.kind == "sinks":
        args, options = sink_module(module)
        arrays |= {"jit_args": args, "jit_kwargs": options}
    return flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2", **arrays)


def _specs(module: Module) -> list[Any]:
    from flashinfer.jit.attention import modules

    kind, dtype, head_dim, value_dim, windowed, capped = module
    shape = (dtype, dtype, dtype, torch.int32, head_dim, value_dim)
    if kind == "sinks":
        args, options = sink_module(module)
        return [modules.gen_customize_batch_prefill_module("fa2", *args, **options)]
    if kind == "ranges":
        return [modules.gen_batch_prefill_bidirectional_ranges_module(*shape)]
    if kind == "cuda-cores":
        return [modules.gen_batch_decode_module(*shape, 0, windowed, capped)]
    plain = ("fa2", *shape, 0, windowed, capped, False)  # no positions, no sums in fp16
    found = [modules._gen_batch_prefill_primary_module(*plain)]
    if head_dim != value_dim:  # keys and values then differ in strides, too
        found.append(modules._gen_batch_prefill_independent_paged_module(*plain))
    return found
