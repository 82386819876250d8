"""Text-only checkpoints, which hold a decoder alone."""

from __future__ import annotations

import re

from hydrainfer.models.layers import Layers

_BODY = re.compile(r"^model\.(?=embed_tokens\.|layers\.|norm\.)")
_RENAMES = (  # names of Mixtral, GPT-OSS and MiMo → the common ones
    (re.compile(r"\.block_sparse_moe\."), ".mlp."),
    (re.compile(r"(?<=\.)w1(?=\.weight$)"), "gate_proj"),
    (re.compile(r"(?<=\.)w2(?=\.weight$)"), "down_proj"),
    (re.compile(r"(?<=\.)w3(?=\.weight$)"), "up_proj"),
    (re.compile(r"\.mlp\.router\."), ".mlp.gate."),
    (re.compile(r"\.attention_sink_bias$"), ".sinks"),
)
_MIMO_MTP = "model.mtp.layers.0."
_MTP_RENAMES = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "final_layernorm": "norm",
}


def canonical(name: str) -> str:
    """`model.layers.0.mlp.up_proj.weight` → `text.layers.0.mlp.up_proj.weight`; unknown names stay."""
    if name.startswith(_MIMO_MTP):
        return _of_mtp(name.removeprefix(_MIMO_MTP))
    name, n = _BODY.subn("text.", name)
    for pattern, ours in _RENAMES if n else ():
        name = pattern.sub(ours, name)
    return name


def _of_mtp(name: str) -> str:
    """A tensor of MiMo's first MTP layer → its name in Qwen3-Next."""
    part, _, leaf = name.partition(".")
    if part in _MTP_RENAMES:
        return f"mtp.{_MTP_RENAMES[part]}.{leaf}"
    name = name.replace("pre_mlp_layernorm.", "post_attention_layernorm.").replace("attention_sink_bias", "sinks")
    return f"mtp.layers.0.{name}"


LAYERS = Layers(canonical)
