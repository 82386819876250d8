"""Granite 3 and the dense text models of Granite 4: Llama with multipliers."""

from __future__ import annotations

from hydrainfer.checkpoint import Decoder, Served, text_only
from hydrainfer.checkpoint.files import POSITIVE

_MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
FIELDS = dict.fromkeys(_MULTIPLIERS, POSITIVE)
FAMILIES = {
    "GraniteForCausalLM": text_only(Decoder("granite", mlp_bias=None, multipliers=True), dtype="bfloat16")._replace(
        fields=FIELDS
    )
}
SERVED = (
    Served(
        ("GraniteForCausalLM",), "Granite 3, Granite 4 (dense)", "Llama with multipliers of embeddings and residuals"
    ),
)
