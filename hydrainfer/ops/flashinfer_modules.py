"""The compiled modules of FlashInfer (pinned: 0.7.2.post1) that attention needs, in FlashInfer's own terms.

FlashInfer compiles a module for each dtype, head size and kind of mask, in about two minutes of a core, when it is first
used. Whoever builds them beforehand asks here which ones there are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import torch

Kind = Literal["plain", "sinks", "ranges", "cuda-cores"]
"""`plain`: causal, chunks and decodes; `sinks`: the same with attention sinks; `ranges`: pictures whose tokens see each
other; `cuda-cores`: decodes alone, by the kernel that uses no tensor cores."""


class Module(NamedTuple):
    """One module. `windowed`: tokens see only a window; this is part of a module unless its kind is `ranges`."""

    kind: Kind
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    windowed: bool


def modules_for(wanted: Iterable[Module]) -> list[Any]:
    """FlashInfer's `JitSpec`s of these modules, each once. `spec.build()` compiles one, also without a GPU if
    `FLASHINFER_CUDA_ARCH_LIST` names the architecture ("9.0"); `spec.get_library_path()` is the result."""
    specs = {spec.name: spec for module in dict.fromkeys(wanted) for spec in _specs(module)}
    return list(specs.values())


def sink_module(module: Module) -> tuple[list[Any], dict[str, Any]]:
    """`jit_args` and `jit_kwargs` of a wrapper with attention sinks. FlashInfer's own wrapper for sinks names its module
    without the head size, so that one cache folder could not hold two sizes."""
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


def _specs(module: Module) -> list[Any]:
    from flashinfer.jit.attention import modules

    kind, dtype, head_dim, value_dim, windowed = module
    shape = (dtype, dtype, dtype, torch.int32, head_dim, value_dim)
    if kind == "sinks":
        args, options = sink_module(module)
        return [modules.gen_customize_batch_prefill_module("fa2", *args, **options)]
    if kind == "ranges":
        return [modules.gen_batch_prefill_bidirectional_ranges_module(*shape)]
    if kind == "cuda-cores":
        return [modules.gen_batch_decode_module(*shape, 0, windowed, False)]
    plain = ("fa2", *shape, 0, windowed, False, False)  # no positions, no cap of logits, no sums in fp16
    found = [modules._gen_batch_prefill_primary_module(*plain)]
    if head_dim != value_dim:  # keys and values then differ in strides, too
        found.append(modules._gen_batch_prefill_independent_paged_module(*plain))
    return found
