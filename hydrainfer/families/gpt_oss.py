"""GPT-OSS: experts in MXFP4, attention sinks, and windows in every other layer."""

from __future__ import annotations

from hydrainfer.checkpoint import TEXT, Decoder, Served, experts, text_only

_GPT_OSS = Decoder(
    "gpt_oss", sliding="named", sinks="all", experts=experts.gpt_oss, quantized=("mxfp4",)
)  # `attention_bias` decides about biases
FAMILIES = {
    "GptOssForCausalLM": text_only(
        _GPT_OSS, names=TEXT._replace(text=((r"\.mlp\.router\.", ".mlp.gate."),)), dtype="bfloat16"
    ),
}
SERVED = (Served(("GptOssForCausalLM",), "GPT-OSS", "experts, sinks, windows in every other layer"),)
