"""LFM3 and LFM3-VL: short convolutions, windows and full attention in one decoder; the names of their tensors."""

from __future__ import annotations

import re

from hydrainfer.models import lfm2
from hydrainfer.models.layers import Layers
from hydrainfer.models.lfm3_tower import Lfm3Vision

_ROOMS = (  # prefix in the checkpoint → ours; the language model's becomes the prefix that LFM2 uses
    (re.compile(r"^(?:model\.)?vision_tower\."), "vision."),
    (re.compile(r"^(?:model\.)?multi_modal_projector\."), "projector."),
    (re.compile(r"^(?:model\.language_model\.|language_model\.model\.)"), "model."),
    (re.compile(r"^language_model\.lm_head\."), "lm_head."),
)
_VISION_RENAMES: tuple[tuple[str, str], ...] = (  # published → what transformers calls it
    (".patchifier.", ".patch_embed."),
    (".q_layernorm.", ".q_norm."),
    (".k_layernorm.", ".k_norm."),
)
_TEXT_RENAMES = (  # LFM2's names and LFM3's own → what Gemma calls it; in this order
    (".post_attention_layernorm.", ".pre_feedforward_layernorm."),
    (".post_operator_norm.", ".post_attention_layernorm."),
    (".post_ffn_norm.", ".post_feedforward_layernorm."),
    (".self_attn.gate_proj.", ".self_attn.g_proj."),
)


def canonical(name: str) -> str:
    """`model.layers.0.ffn_norm.weight` → `text.layers.0.pre_feedforward_layernorm.weight`; unknown names stay."""
    for pattern, ours in _ROOMS:
        name = pattern.sub(ours, name, count=1)
    renames = _VISION_RENAMES
    if not name.startswith(("vision.", "projector.")):
        name, renames = lfm2.canonical(name), _TEXT_RENAMES
    for theirs, ours in renames:
        name = name.replace(theirs, ours)
    return name


LAYERS = Layers(canonical, Lfm3Vision, pass_size=Lfm3Vision.pass_size)
TEXT_LAYERS = Layers(canonical)
