"""Gemma 2: Gemma 3 without norms of heads, with a window in every other layer, and with caps of attention scores and of
logits."""

from __future__ import annotations

from hydrainfer.checkpoint import Served, text_only
from hydrainfer.checkpoint.files import POSITIVE, maybe
from hydrainfer.families.gemma3 import GEMMA

_GEMMA2 = GEMMA._replace(
    model_type="gemma2",
    qk_norm="none",
    ropes=False,
    attention_cap="attn_logit_softcapping",
    logit_cap="final_logit_softcapping",
    refused=("use_bidirectional_attention",),
)
_CAPS = dict.fromkeys((_GEMMA2.attention_cap, _GEMMA2.logit_cap), maybe(POSITIVE))
FAMILIES = {
    "Gemma2ForCausalLM": text_only(_GEMMA2, dtype="bfloat16")._replace(fields=_CAPS, overflows=True, n_template=10)
}
SERVED = (
    Served(("Gemma2ForCausalLM",), "Gemma 2", "windows in every other layer, caps of attention scores and logits"),
)
