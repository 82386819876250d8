"""Gemma 4: layers with a window and full ones have heads of different widths. Small models (E2B, E4B) have per-layer
embeddings, and their last layers read the keys and values of earlier ones. In large ones the values of full layers are
their keys, and 26B-A4B has experts beside each MLP."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydrainfer.checkpoint import TEXT, Decoder, Experts, Served, require, text_only
from hydrainfer.checkpoint.files import SIZE, maybe, whole


def _global(hf: Any, path: Path) -> Any:  # noqa: ARG001
    """The configuration, whose fields outside `per_layer_config` are those of layers with a window."""
    hf.allow_global_per_layer_attribute_access = True
    return hf


def _own(hf: Any, path: Path) -> Mapping[str, Any]:
    """The fields of `TextConfig` that only Gemma 4 has. Raises `CheckpointError`."""
    require(hf.use_bidirectional_attention != "all", path, "use_bidirectional_attention 'all' is not supported")
    full = next(i for i, kind in enumerate(hf.layer_types) if kind == "full_attention")
    wide = hf.per_layer_config[full]
    heads, kv_heads = hf.num_attention_heads, wide.num_key_value_heads
    require(heads % kv_heads == 0, path, f"{heads} heads over {kv_heads} KV heads in layers with full attention")
    shared = hf.num_kv_shared_layers
    return {
        "kv_heads": kv_heads,
        "head_dim": wide.head_dim,
        "value_dim": wide.head_dim,
        "local_head_dim": hf.head_dim,
        "attention_scale": 1.0,
        "reads": _reads(hf, path) if shared else (),
        "shared_intermediate": 2 * hf.intermediate_size if hf.use_double_wide_mlp else 0,
        "keys_as_values": bool(hf.attention_k_eq_v),
        "value_norm": True,
        "per_layer": hf.hidden_size_per_layer_input or 0,
        "per_layer_vocab": hf.vocab_size_per_layer_input,
        "pad": hf.pad_token_id or 0,
        "scaled_layers": True,
    }


def _reads(hf: Any, path: Path) -> tuple[int, ...]:
    """For each layer, the one whose keys and values it attends to: the last `num_kv_shared_layers` read those of the
    last layer of their kind before them."""
    n, shared, kinds = hf.num_hidden_layers, hf.num_kv_shared_layers, list(hf.layer_types)
    require(shared < n, path, f"num_kv_shared_layers {shared} of {n} layers")
    first = n - shared
    producers = {kind: max((i for i in range(first) if kinds[i] == kind), default=-1) for kind in set(kinds)}
    missing = " and ".join(sorted(kind for kind, at in producers.items() if at < 0))
    require(not missing, path, f"num_kv_shared_layers {shared}: no layer before them has {missing}")
    return tuple(i if i < first else producers[kinds[i]] for i in range(n))


def _experts(hf: Any, path: Path) -> Experts | None:
    if not hf.enable_moe_block:
        return None
    count, chosen, width = hf.num_experts, hf.top_k_experts, hf.moe_intermediate_size
    given = None not in (count, chosen, width)
    require(given and 0 < chosen <= count, path, f"top_k_experts {chosen} of {count} experts of width {width}")
    layers = (True,) * hf.num_hidden_layers
    return Experts(layers, count, chosen, width, router="scaled", gelu=True, stored="stacked")


DECODER = Decoder(
    "gemma4_text",
    qk_norm="head",
    sliding="named",
    ropes=True,
    norms="around",
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    embed_scale="root",
    logit_cap="final_logit_softcapping",
    stretched=False,
    experts=_experts,
    named=_global,
    own=_own,
)
_EXPERTS = (
    (r"\.router\.proj\.", ".mlp.gate."),
    (r"\.router\.", ".mlp.gate."),
    (r"(\.layers\.\d+)\.experts\.", r"\1.mlp.experts."),
)
FIELDS = {
    "num_kv_shared_layers": whole(0, 1024),
    "hidden_size_per_layer_input": maybe(whole(0, 2**16)),
    "vocab_size_per_layer_input": SIZE,
    "global_head_dim": maybe(SIZE),
    "num_global_key_value_heads": maybe(SIZE),
    "top_k_experts": maybe(SIZE),
}
FAMILIES = {
    "Gemma4ForCausalLM": text_only(DECODER, names=TEXT._replace(text=_EXPERTS), dtype="bfloat16")._replace(
        fields=FIELDS, overflows=True
    ),
}
SERVED = (
    Served(("Gemma4ForCausalLM",), "Gemma 4 (text alone)", "windows in most layers, per-layer embeddings, experts"),
)
