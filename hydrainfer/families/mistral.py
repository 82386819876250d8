"""Mistral 7B and Mixtral."""

from __future__ import annotations

from hydrainfer.checkpoint import TEXT, Decoder, Served, experts, text_only

_MISTRAL = Decoder("mistral", qkv_bias=False, out_bias=False, sliding="all")
_EXPERTS = (
    (r"\.block_sparse_moe\.", ".mlp."),
    (r"(?<=\.)w1(?=\.weight$)", "gate_proj"),
    (r"(?<=\.)w2(?=\.weight$)", "down_proj"),
    (r"(?<=\.)w3(?=\.weight$)", "up_proj"),
)
FAMILIES = {
    "MistralForCausalLM": text_only(_MISTRAL),
    "MixtralForCausalLM": text_only(
        _MISTRAL._replace(model_type="mixtral", experts=experts.mixtral), names=TEXT._replace(text=_EXPERTS)
    ),
}
SERVED = (
    Served(("MistralForCausalLM",), "Mistral 7B", "Mistral, with or without sliding window"),
    Served(("MixtralForCausalLM",), "Mixtral", "Mistral with experts"),
)
