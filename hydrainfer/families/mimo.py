"""MiMo-V2-Flash: windows with heads and sinks of their own, values narrower than keys, experts in groups, and layers
for multi-token prediction."""

from __future__ import annotations

from hydrainfer.checkpoint import TEXT, Decoder, Served, experts, text_only

_MIMO = Decoder(
    "mimo_v2_flash",
    out_bias=False,
    sliding="named",
    ropes=True,
    partial=True,
    value_dim="v_head_dim",
    value_scale="attention_value_scale",
    local_kv=2,
    mtp=1,
    mtp_slides=True,
    sinks="windows",
    experts=experts.mimo,
)
_MTP = r"model\.mtp\.layers\.0\."
_NAMES = TEXT._replace(
    rooms=(
        *TEXT.rooms,
        (rf"{_MTP}enorm\.", "mtp.pre_fc_norm_embedding."),
        (rf"{_MTP}hnorm\.", "mtp.pre_fc_norm_hidden."),
        (rf"{_MTP}eh_proj\.", "mtp.fc."),
        (rf"{_MTP}final_layernorm\.", "mtp.norm."),
        (_MTP, "mtp.layers.0."),
    ),
    text=((r"\.attention_sink_bias$", ".sinks"),),
    mtp=((r"pre_mlp_layernorm\.", "post_attention_layernorm."), (r"\.attention_sink_bias$", ".sinks")),
)
FAMILIES = {"MiMoV2FlashForCausalLM": text_only(_MIMO, names=_NAMES, dtype="bfloat16")}
SERVED = (Served(("MiMoV2FlashForCausalLM",), "MiMo-V2-Flash", "experts, windows with sinks in 39 of 48 layers"),)
