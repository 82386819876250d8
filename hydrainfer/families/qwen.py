"""The text models of Qwen: 2, 2-MoE, 3, 3-MoE, Next and 3.5."""

from __future__ import annotations

from hydrainfer.checkpoint import Decoder, Served, experts, text_only
from hydrainfer.checkpoint.recurrence import gated_delta

_NEXT = Decoder("qwen3_next", qk_norm="head", partial=True, gated=True, centred=True, recurrence=gated_delta, mtp=1)
QWEN3_5 = _NEXT._replace(model_type="qwen3_5_text", sections=(11, 11, 10), interleaved=True)
QWEN3_5_MOE = QWEN3_5._replace(model_type="qwen3_5_moe_text", experts=experts.qwen2)
FAMILIES = {
    "Qwen2ForCausalLM": text_only(Decoder("qwen2", qkv_bias=True, out_bias=False, sliding="named")),
    "Qwen3ForCausalLM": text_only(Decoder("qwen3", qk_norm="head", sliding="named")),
    "Qwen2MoeForCausalLM": text_only(
        Decoder("qwen2_moe", qkv_bias="qkv_bias", out_bias=False, sliding="named", experts=experts.qwen2)
    ),
    "Qwen3MoeForCausalLM": text_only(Decoder("qwen3_moe", qk_norm="head", sliding="all", experts=experts.qwen3)),
    "Qwen3NextForCausalLM": text_only(_NEXT._replace(experts=experts.qwen2), dtype="bfloat16"),
    "Qwen3_5ForCausalLM": text_only(QWEN3_5, dtype="bfloat16"),
    "Qwen3_5MoeForCausalLM": text_only(QWEN3_5_MOE, dtype="bfloat16"),
}
SERVED = (
    Served(("Qwen2ForCausalLM",), "Qwen2, Qwen2.5", "Qwen2"),
    Served(("Qwen3ForCausalLM",), "Qwen3 (dense)", "Qwen3"),
    Served(("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"), "Qwen1.5-MoE, Qwen3-30B-A3B and others", "with experts"),
    Served(
        ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
        "Qwen3-Next (experts); the text models of Qwen3.5 to 3.8, with experts and without",
        "the gated delta rule in 3 of 4 layers, gated attention",
    ),
)
