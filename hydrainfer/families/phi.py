"""Phi-3 and Phi-4: fused matrices. With LongRoPE the original context is served, with its short factors: the long ones
hold for whole sequences, so a sequence that outgrew the short ones would have to be computed anew."""

from __future__ import annotations

from hydrainfer.checkpoint import Decoder, Served, text_only

_PHI = Decoder(
    "phi3",
    qkv_bias=False,
    out_bias=False,
    sliding="all",
    partial=True,
    fused=("qkv_proj", "gate_up_proj"),
)
FAMILIES = {"Phi3ForCausalLM": text_only(_PHI, dtype="bfloat16")}
SERVED = (
    Served(
        ("Phi3ForCausalLM",),
        "Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
        "Llama with fused matrices; with LongRoPE, contexts up to the original 4,096 tokens",
    ),
)
