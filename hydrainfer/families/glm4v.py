"""GLM-4.1V, 4.5V, 4.6V and GLM-OCR: a vision tower for pictures and frames of any size, beside GLM-4 or a decoder with
experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydrainfer.checkpoint import (
    GLM_BOUNDS,
    Activation,
    Decoder,
    Family,
    Gate,
    GlmVideoSettings,
    Matrix,
    Merge,
    Names,
    Norm,
    QwenSettings,
    Served,
    TowerConfig,
    experts,
    preprocessing,
    require,
)
from hydrainfer.checkpoint.files import TOKEN, maybe, whole
from hydrainfer.families.glm import GLM4, NORMS
from hydrainfer.families.qwen_vl import frame_theta

_EPS = 1e-5  # of the merger's norm
_TEXTS = {"glm4v": "glm4v_text", "glm46v": "glm4v_text", "glm4v_moe": "glm4v_moe_text", "glm_ocr": "glm_ocr_text"}


def glm(hf: Any, path: Path) -> TowerConfig:
    """The checked vision tower of one of these families. Raises `CheckpointError`."""
    v, ocr, text = hf.vision_config, hf.model_type == "glm_ocr", hf.text_config
    hidden, out, biased = v.hidden_size, v.out_hidden_size, bool(v.attention_bias)
    require(v.in_channels == 3, path, f"in_channels {v.in_channels} is not supported; supported: 3")
    require(v.hidden_act == "silu", path, f"vision hidden_act {v.hidden_act!r} is not supported; supported: silu")
    require(hidden % (4 * v.num_heads) == 0, path, f"{v.num_heads} vision heads over {hidden} columns")
    require(out == text.hidden_size, path, f"the vision tower makes {out} columns, the text has {text.hidden_size}")
    known = _TEXTS[hf.model_type]
    require(text.model_type == known, path, f"text model {text.model_type!r} is not supported; supported: {known}")
    pixels, videos = _pixels(hf, path)
    steps = (
        Norm("projector.last_norm", v.rms_norm_eps, "rms"),
        Merge("unfolded"),
        Matrix("projector.downsample", out, kernel=True),
        Matrix("projector.proj", out, bias=False),
        Norm("projector.norm", _EPS),
        Activation("gelu"),
        Gate("projector.gate", "projector.up", 3 * out if ocr else v.intermediate_size, "silu"),
        Matrix("projector.down", out, bias=False),
    )
    return TowerConfig(
        hidden=hidden,
        intermediate=v.intermediate_size if ocr else out,
        layers=v.depth,
        heads=v.num_heads,
        norm_eps=v.rms_norm_eps,
        activation="silu",
        pixels=pixels,
        videos=videos,
        patch=pixels.patch,
        temporal=pixels.temporal,
        merge=pixels.merge,
        patch_bias=True,
        patch_norm=not ocr,
        positions="none" if ocr else "bicubic",
        grid=0 if ocr else v.image_size // v.patch_size,
        norm="rms",
        qkv_bias=biased,
        out_bias=biased and ocr,
        mlp_bias=biased and ocr,
        qk_norm="head" if ocr else "none",
        qk_eps=v.rms_norm_eps,
        gated=True,
        fused=True,
        rotation="halves",
        theta=frame_theta(v, path),
        features=(v.depth,),
        steps=steps,
    )


def _pixels(hf: Any, path: Path) -> tuple[QwenSettings, GlmVideoSettings]:
    """The preprocessing of pictures and videos. If no file gives it, the patch sizes are those of the tower. Raises
    `CheckpointError`."""
    v = hf.vision_config
    wanted = v.patch_size, v.spatial_merge_size, v.temporal_patch_size
    given = preprocessing(path)
    if given is None:
        given = dict(zip(("patch_size", "merge_size", "temporal_patch_size"), wanted))
    pixels = QwenSettings.read(given, GLM_BOUNDS, in_time=True)
    made = pixels.patch, pixels.merge, pixels.temporal
    require(
        made == wanted,
        path,
        f"preprocessor_config.json has patch, merge and temporal patch sizes {made}, the vision tower {wanted}",
    )
    clips = preprocessing(path, "video") or given
    usual = "Glm46VProcessor" if hf.model_type == "glm46v" else ""
    return pixels, GlmVideoSettings.read_glm({"processor_class": usual} | clips, pixels)


_NAMES = Names(
    rooms=(
        (r"model\.visual\.(?=merger\.|downsample\.|post_layernorm\.)", "projector."),
        (r"model\.visual\.", "vision."),
        (r"model\.language_model\.", "text."),
    ),
    text=(*NORMS,),
    vision=(
        (r"\.patch_embed\.proj\.", ".patch."),
        (r"\.post_conv_layernorm\.", ".patch_norm."),
        (r"\.embeddings\.position_embedding\.weight$", ".positions"),
        (r"\.norm([12])\.", r".norm_\1."),
        (r"\.attn\.qkv\.", ".qkv."),
        (r"\.attn\.proj\.", ".out."),
        (r"\.attn\.([qk])_norm\.", r".\1_norm."),
        (r"\.mlp\.(gate|up|down)_proj\.", r".\1."),
    ),
    projector=(
        (r"\.post_layernorm\.", ".last_norm."),
        (r"\.merger\.post_projection_norm\.", ".norm."),
        (r"\.merger\.(gate|up|down)_proj\.", r".\1."),
        (r"\.merger\.", "."),
    ),
)
_TEXT = GLM4._replace(model_type="glm4v_text", qkv_bias=True, sections=(8, 12, 12))
_MOE = Decoder("glm4v_moe_text", out_bias=False, partial=True, sections=(8, 12, 12), experts=experts.glm4v)
_ENDS = tuple(f"{kind}_{end}_token_id" for kind in ("image", "video") for end in ("start", "end"))
GLM4V = Family(
    "glm4v",
    _NAMES,
    _TEXT,
    tower="hydrainfer.models.vit:FrameVision",
    vision=glm,
    pictures="hydrainfer.processor.pictures.qwen:qwen_images",
    videos="hydrainfer.processor.pictures.glm_video:glm_videos",
    around=_ENDS,
    framed_videos=True,
    dtype="bfloat16",
    fields=dict.fromkeys(_ENDS, maybe(TOKEN)),
    n_template=7,  # [gMASK], <sop>, and the marks of two turns
    n_around=2,
)
FAMILIES = {
    "Glm4vForConditionalGeneration": GLM4V,
    "Glm46VForConditionalGeneration": GLM4V._replace(model_type="glm46v"),
    "Glm4vMoeForConditionalGeneration": GLM4V._replace(
        model_type="glm4v_moe",
        decoder=_MOE,
        names=_NAMES._replace(text=((r"\.shared_experts\.", ".shared_expert."),)),
        fields={**GLM4V.fields, "n_shared_experts": maybe(whole(0, 1024)), "first_k_dense_replace": whole(0, 1024)},
    ),
    "GlmOcrForConditionalGeneration": GLM4V._replace(
        model_type="glm_ocr", decoder=_TEXT._replace(model_type="glm_ocr_text", qkv_bias=False)
    ),
}
_SEES, _PLACEHOLDERS = "pictures, videos", "by size: one per 28 x 28 pixels"
SERVED = (
    Served(
        ("Glm4vForConditionalGeneration", "Glm46VForConditionalGeneration"),
        "GLM-4.1V, GLM-4.6V-Flash",
        "GLM-4, M-RoPE of a half of each head",
        "own ViT, 2D rotary, bicubic positions, 2 x 2 convolution",
        _PLACEHOLDERS,
        _SEES,
    ),
    Served(
        ("Glm4vMoeForConditionalGeneration",),
        "GLM-4.5V, GLM-4.6V",
        "experts, one of them for all tokens; M-RoPE of a half of each head",
        "GLM-4.1V's",
        _PLACEHOLDERS,
        _SEES,
    ),
    Served(
        ("GlmOcrForConditionalGeneration",),
        "GLM-OCR",
        "GLM-4, M-RoPE",
        "GLM-4.1V's without positions; norms of queries and keys",
        _PLACEHOLDERS,
        _SEES,
    ),
)
