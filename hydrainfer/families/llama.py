"""Llama 2 and 3, and what has its layers."""

from __future__ import annotations

from hydrainfer.checkpoint import Decoder, Served, text_only

FAMILIES = {"LlamaForCausalLM": text_only(Decoder("llama", mlp_bias=None, mtp=0))}
SERVED = (Served(("LlamaForCausalLM",), "Llama 2, Llama 3", "Llama"),)
