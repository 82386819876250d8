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


def canonical(name: str) -> str:
    """`model.layers.0.mlp.up_proj.weight` → `text.layers.0.mlp.up_proj.weight`; unknown names stay."""
    name, n = _BODY.subn("text.", name)
    for pattern, ours in _RENAMES if n else ():
        name = pattern.sub(ours, name)
    return name


LAYERS = Layers(canonical)
