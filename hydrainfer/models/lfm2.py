"""LFM2: short convolutions and, in some layers, attention; the names of their tensors."""

from __future__ import annotations

import re

from hydrainfer.models.layers import Layers

_RENAMES = (  # theirs → what Llama calls it
    (re.compile(r"^model\.embedding_norm\."), "text.norm."),
    (re.compile(r"^model\.(?=embed_tokens\.|layers\.)"), "text."),
    (re.compile(r"\.operator_norm\."), ".input_layernorm."),
    (re.compile(r"\.ffn_norm\."), ".post_attention_layernorm."),
    (re.compile(r"\.feed_forward\.w1\."), ".mlp.gate_proj."),
    (re.compile(r"\.feed_forward\.w3\."), ".mlp.up_proj."),
    (re.compile(r"\.feed_forward\.w2\."), ".mlp.down_proj."),
    (re.compile(r"\.self_attn\.out_proj\."), ".self_attn.o_proj."),
    (re.compile(r"\.self_attn\.([qk])_layernorm\."), r".self_attn.\1_norm."),
)


def canonical(name: str) -> str:
    """`model.layers.0.feed_forward.w1.weight` → `text.layers.0.mlp.gate_proj.weight`; unknown names stay."""
    for pattern, ours in _RENAMES:
        name = pattern.sub(ours, name, count=1)
    return name


LAYERS = Layers(canonical)
