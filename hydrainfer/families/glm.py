"""GLM-4: rotated by pairs of neighbours, half of each head; norms around attention and MLP since GLM-4-0414."""

from __future__ import annotations

from hydrainfer.checkpoint import TEXT, Decoder, Served, text_only

_GLM = Decoder("glm", out_bias=False, partial=True, paired=True, fused=("gate_up_proj",))
GLM4 = _GLM._replace(model_type="glm4", norms="around")
NORMS = (  # to what Gemma calls them
    (r"\.post_attention_layernorm\.", ".pre_feedforward_layernorm."),
    (r"\.post_self_attn_layernorm\.", ".post_attention_layernorm."),
    (r"\.post_mlp_layernorm\.", ".post_feedforward_layernorm."),
)
FAMILIES = {
    "GlmForCausalLM": text_only(_GLM, dtype="bfloat16"),
    "Glm4ForCausalLM": text_only(GLM4, names=TEXT._replace(text=NORMS), dtype="bfloat16"),
}
SERVED = (
    Served(
        ("GlmForCausalLM", "Glm4ForCausalLM"),
        "GLM-4-9B, GLM-4-0414, GLM-Z1",
        "half of each head rotated, by neighbours",
    ),
)
