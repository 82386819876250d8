"""Mistral 7B, Mixtral and Ministral 3."""

from __future__ import annotations

from typing import Any

from hydrainfer.checkpoint import TEXT, Decoder, Served, experts, text_only
from hydrainfer.checkpoint.files import maybe, number


def _growth(hf: Any) -> tuple[float, int] | None:
    """By how much queries grow with their position, as in Llama 4."""
    given = hf.rope_parameters
    beta, original = given.get("llama_4_scaling_beta"), given.get("original_max_position_embeddings")
    return (float(beta), int(original)) if beta and original else None


_MISTRAL = Decoder("mistral", qkv_bias=False, out_bias=False, sliding="all")
_MINISTRAL = _MISTRAL._replace(model_type="ministral3", growth=_growth)
_EXPERTS = (
    (r"\.block_sparse_moe\.", ".mlp."),
    (r"(?<=\.)w1(?=\.weight$)", "gate_proj"),
    (r"(?<=\.)w2(?=\.weight$)", "down_proj"),
    (r"(?<=\.)w3(?=\.weight$)", "up_proj"),
)
FIELDS = {"llama_4_scaling_beta": maybe(number(0, 100))}
FAMILIES = {
    "MistralForCausalLM": text_only(_MISTRAL),
    "Ministral3ForCausalLM": text_only(_MINISTRAL, dtype="bfloat16")._replace(fields=FIELDS),
    "MixtralForCausalLM": text_only(
        _MISTRAL._replace(model_type="mixtral", experts=experts.mixtral), names=TEXT._replace(text=_EXPERTS)
    ),
}
SERVED = (
    Served(("MistralForCausalLM",), "Mistral 7B", "Mistral, with or without sliding window"),
    Served(("Ministral3ForCausalLM",), "Ministral 3 (text alone)", "Mistral with YaRN, and queries that grow"),
    Served(("MixtralForCausalLM",), "Mixtral", "Mistral with experts"),
)
