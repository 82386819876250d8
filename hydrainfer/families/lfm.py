"""LFM2 and LFM3: short convolutions, windows and full attention in one decoder. LFM3-VL: a tower for pictures and
frames of any size, with layers of convolution and attention."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydrainfer.checkpoint import (
    ACTIVATIONS,
    Decoder,
    Fit,
    Names,
    Served,
    TowerConfig,
    VisionShape,
    experts,
    require,
    text_only,
)
from hydrainfer.checkpoint.recurrence import lfm2_names, short_convolutions
from hydrainfer.families.qwen_vl import QWEN_VL, frame_pixels, frame_theta


@dataclass(frozen=True, kw_only=True)
class Lfm3VisionConfig(TowerConfig):
    """The vision tower of LFM3-VL. The layers in `attending` have attention with `kv_heads`, the others a convolution
    over squares of `kernel` patches. `projector`: the projector's inner width."""

    kv_heads: int
    attending: tuple[int, ...]
    kernel: int
    projector: int
    projector_bias: bool

    def shape(self, width: int, fit: Fit) -> VisionShape:
        """The tower as numbers for the planner. Patches of two frames (a still picture counts as two) attend to each
        other in some layers; in the others they see only their square. A merged square of patches becomes a token."""
        hidden, n_merged, n_attend = self.hidden, self.merge**2, len(self.attending)
        attention = 2 * hidden**2 * (1 + self.kv_heads / self.heads)
        return VisionShape(
            layers=self.layers,
            hidden=hidden,
            row_weights=3 * self.temporal * self.patch**2 * hidden
            + self.layers * 3 * hidden * self.intermediate
            + int(n_attend * attention + (self.layers - n_attend) * 4 * hidden**2),
            token_weights=n_merged * hidden * self.projector + self.projector * width,
            rows_per_token=float(n_merged),
            picture_tokens=fit(10_000, 10_000),
            window_rows=self.kernel**2,
            full_layers=n_attend,
        )


def lfm3_vl(hf: Any, path: Path) -> Lfm3VisionConfig:
    """The checked vision tower of an `Lfm3VlConfig`. Raises `CheckpointError`."""
    v = hf.vision_config
    heads, kv_heads, types = v.num_attention_heads, v.num_key_value_heads, list(v.layer_types)
    require(v.in_channels == 3, path, f"in_channels {v.in_channels} is not supported; supported: 3")
    require(v.hidden_size % (4 * heads) == 0, path, f"{heads} vision heads over {v.hidden_size} columns")
    require(kv_heads > 0 and heads % kv_heads == 0, path, f"{heads} vision heads over {kv_heads} KV heads")
    fits = len(types) == v.num_hidden_layers
    require(fits, path, f"layer_types of the vision tower names {len(types)} of {v.num_hidden_layers} layers")
    unknown = " and ".join(sorted(set(types) - {"conv", "full_attention"}))
    require(not unknown, path, f"vision layer {unknown} is not supported; supported: conv, full_attention")
    odd = v.conv_kernel_size % 2 == 1
    require(odd, path, f"conv_kernel_size {v.conv_kernel_size} is not supported; supported: odd numbers")
    act, known = hf.projector_hidden_act, ", ".join(ACTIVATIONS)
    require(act in ACTIVATIONS, path, f"projector_hidden_act {act!r} is not supported; supported: {known}")
    pixels, videos = frame_pixels(v, "told", path)
    return Lfm3VisionConfig(
        hidden=v.hidden_size,
        intermediate=v.intermediate_size,
        layers=v.num_hidden_layers,
        heads=heads,
        activation=act,
        theta=frame_theta(v, path),
        pixels=pixels,
        videos=videos,
        patch=pixels.patch,
        temporal=pixels.temporal,
        merge=pixels.merge,
        rotation="halves",
        features=(v.num_hidden_layers,),
        kv_heads=kv_heads,
        attending=tuple(i for i, kind in enumerate(types) if kind == "full_attention"),
        kernel=v.conv_kernel_size,
        norm_eps=v.norm_eps,
        projector=hf.projector_hidden_size,
        projector_bias=bool(hf.projector_bias),
    )


_LFM2 = Decoder("lfm2", False, False, qk_norm="head", named=lfm2_names, recurrence=short_convolutions)
_LFM3 = _LFM2._replace(model_type="lfm3", sliding="named", ropes=True, norms="around", gate="use_attention_gate")
_LFM2_MOE = _LFM2._replace(model_type="lfm2_moe", experts=experts.lfm2)
_ROOM = r"(?:model\.language_model\.|language_model\.model\.|model\.)"
_LFM2_NAMES = Names(
    rooms=(
        (r"(?:model\.)?vision_tower\.", "vision."),
        (r"(?:model\.)?multi_modal_projector\.", "projector."),
        (r"language_model\.lm_head\.", "lm_head."),
        (rf"{_ROOM}embedding_norm\.", "text.norm."),
        (rf"{_ROOM}(?=embed_tokens\.|layers\.)", "text."),
    ),
    text=(  # to what Llama calls it
        (r"\.operator_norm\.", ".input_layernorm."),
        (r"\.ffn_norm\.", ".post_attention_layernorm."),
        (r"\.feed_forward\.w1\.", ".mlp.gate_proj."),
        (r"\.feed_forward\.w3\.", ".mlp.up_proj."),
        (r"\.feed_forward\.w2\.", ".mlp.down_proj."),
        (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
        (r"\.self_attn\.([qk])_layernorm\.", r".self_attn.\1_norm."),
    ),
    vision=((r"\.patchifier\.", ".patch_embed."), (r"\.([qk])_layernorm\.", r".\1_norm.")),
)
_MOE_NAMES = _LFM2_NAMES._replace(
    text=(
        *_LFM2_NAMES.text,
        (r"\.feed_forward\.expert_bias$", ".mlp.gate.e_score_correction_bias"),
        (r"\.feed_forward\.", ".mlp."),
        (r"(\.experts\.\d+)\.w1\.", r"\1.gate_proj."),
        (r"(\.experts\.\d+)\.w3\.", r"\1.up_proj."),
        (r"(\.experts\.\d+)\.w2\.", r"\1.down_proj."),
    )
)
_LFM3_NAMES = _LFM2_NAMES._replace(
    text=(  # to what Gemma calls it
        *_LFM2_NAMES.text,
        (r"\.post_attention_layernorm\.", ".pre_feedforward_layernorm."),
        (r"\.post_operator_norm\.", ".post_attention_layernorm."),
        (r"\.post_ffn_norm\.", ".post_feedforward_layernorm."),
        (r"\.self_attn\.gate_proj\.", ".self_attn.g_proj."),
    )
)
FAMILIES = {
    "Lfm2ForCausalLM": text_only(_LFM2, names=_LFM2_NAMES, dtype="bfloat16"),
    "Lfm2MoeForCausalLM": text_only(_LFM2_MOE, names=_MOE_NAMES, dtype="bfloat16"),
    "Lfm3ForCausalLM": text_only(_LFM3, names=_LFM3_NAMES, dtype="bfloat16"),
    "Lfm3VlForConditionalGeneration": QWEN_VL._replace(
        model_type="lfm3_vl",
        names=_LFM3_NAMES,
        decoder=_LFM3,
        tower="hydrainfer.models.lfm3_tower:Lfm3Vision",
        vision=lfm3_vl,
        n_template=12,
    ),
}
SERVED = (
    Served(("Lfm2ForCausalLM",), "LFM2", "short convolutions, attention in some layers"),
    Served(("Lfm2MoeForCausalLM",), "LFM2-8B-A1B, LFM2-24B-A2B", "LFM2 with experts"),
    Served(("Lfm3ForCausalLM",), "LFM3", "short convolutions in 13 of 24 layers, windows in 5, full attention in 6"),
    Served(
        ("Lfm3VlForConditionalGeneration",),
        "LFM3-VL",
        "LFM3",
        "own tower: gated 2D convolutions, attention in some layers",
        "by size: one per 32 x 32 pixels",
        "pictures, videos",
    ),
)
