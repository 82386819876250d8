"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: the names of their tensors. The towers are in `qwen_tower`."""

from __future__ import annotations

import re

from hydrainfer.models.layers import Layers
from hydrainfer.models.qwen_tower import QwenVision

_RENAMES = (  # published and present names → ours
    (re.compile(r"^(?:model\.)?visual\."), "vision."),
    (re.compile(r"^(?:model\.)?(?:language_model\.)?lm_head\."), "lm_head."),
    (re.compile(r"^(?:model\.language_model\.|language_model\.model\.|model\.)"), "text."),
)
_VISION_RENAMES = (  # names that one family spells differently
    (re.compile(r"\.linear_fc([12])\."), r".fc\1."),
    (re.compile(r"^(vision\.merger)\.mlp\.0\."), r"\1.fc1."),
    (re.compile(r"^(vision\.merger)\.mlp\.2\."), r"\1.fc2."),
    (re.compile(r"^(vision\.merger)\.ln_q\."), r"\1.norm."),
)


def canonical(name: str) -> str:
    """`visual.merger.mlp.0.bias` → `vision.merger.fc1.bias`; unknown names stay."""
    for pattern, ours in _RENAMES:
        renamed, n = pattern.subn(ours, name, count=1)
        if n:
            for inner, spelling in _VISION_RENAMES if ours == "vision." else ():
                renamed = inner.sub(spelling, renamed, count=1)
            return renamed
    return name


LAYERS = Layers(canonical, QwenVision, pass_size=QwenVision.pass_size)
