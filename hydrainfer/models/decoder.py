"""Text-only checkpoints: a decoder by itself."""

from __future__ import annotations

import re

from hydrainfer.models.layers import Layers

_BODY = re.compile(r"^model\.(?=embed_tokens\.|layers\.|norm\.)")


def canonical(name: str) -> str:
    """`model.layers.0.mlp.up_proj.weight` → `text.layers.0.mlp.up_proj.weight`; unknown names stay."""
    return _BODY.sub("text.", name)


LAYERS = Layers(canonical)
