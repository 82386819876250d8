"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: vision towers for pictures and frames of any size.

LFM3-VL's tower takes the same pixels; see `lfm`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

from hydrainfer.checkpoint import (
    ACTIVATIONS,
    Activation,
    Decoder,
    Family,
    FrameTimes,
    Matrix,
    Merge,
    Names,
    Norm,
    QwenSettings,
    QwenVideoSettings,
    Served,
    Steps,
    TowerConfig,
    experts,
    preprocessing,
    require,
)
from hydrainfer.families.qwen import QWEN3_5, QWEN3_5_MOE

_EPS = 1e-6
_TIMES: dict[str, FrameTimes] = {"qwen2_vl": "counted", "qwen2_5_vl": "timed", "qwen3_vl": "told", "qwen3_5": "told"}


def qwen(hf: Any, path: Path) -> TowerConfig:
    """The checked vision tower of one of these families. Raises `CheckpointError`."""
    v, kind = hf.vision_config, hf.model_type.removesuffix("_moe")
    gated, qwen3 = kind == "qwen2_5_vl", kind in ("qwen3_vl", "qwen3_5")
    out = v.hidden_size if kind == "qwen2_vl" else v.out_hidden_size
    hidden = v.embed_dim if kind == "qwen2_vl" else v.hidden_size
    levels = tuple(v.deepstack_visual_indexes) if kind == "qwen3_vl" else ()
    full_layers = tuple(v.fullatt_block_indexes) if gated else ()
    _check(hf, hidden, out, {"fullatt_block_indexes": full_layers, "deepstack_visual_indexes": levels}, path)
    pixels, videos = frame_pixels(v, _TIMES[kind], path)
    window = v.window_size if gated else 0
    require(
        not gated or window >= pixels.factor,
        path,
        f"window_size {window} is smaller than a token's {pixels.factor} pixels",
    )
    kind_of_norm: Literal["layer", "rms"] = "rms" if gated else "layer"
    wide = hidden * pixels.merge**2

    def merger(prefix: str, late: bool) -> Steps:
        norm, merge = Norm(f"{prefix}.norm", _EPS, kind_of_norm), Merge("beside")
        first, second = Matrix(f"{prefix}.fc1", wide), Matrix(f"{prefix}.fc2", out)
        return (*((merge, norm) if late else (norm, merge)), first, Activation("gelu"), second)

    return TowerConfig(
        hidden=hidden,
        intermediate=int(hidden * v.mlp_ratio) if kind == "qwen2_vl" else v.intermediate_size,
        layers=v.depth,
        heads=v.num_heads,
        norm_eps=_EPS,
        activation=v.hidden_act,
        pixels=pixels,
        videos=videos,
        patch=pixels.patch,
        temporal=pixels.temporal,
        merge=pixels.merge,
        patch_bias=qwen3,
        positions="bilinear" if qwen3 else "none",
        grid=math.isqrt(v.num_position_embeddings) if qwen3 else 0,
        norm=kind_of_norm,
        gated=gated,
        fused=True,
        rotation="halves",
        theta=frame_theta(v, path),
        window=window // pixels.factor,
        full_layers=full_layers,
        features=(v.depth,),
        steps=merger("projector", late=False),
        levels=levels,
        level_steps=tuple(merger(f"projector.levels.{i}", late=True) for i in range(len(levels))),
    )


def _check(hf: Any, hidden: int, out: int, indexes: dict[str, tuple[int, ...]], path: Path) -> None:
    v, text = hf.vision_config, hf.text_config
    require(v.in_channels == 3, path, f"in_channels {v.in_channels} is not supported; supported: 3")
    supported = ("silu",) if hf.model_type == "qwen2_5_vl" else ACTIVATIONS
    require(
        v.hidden_act in supported,
        path,
        f"vision hidden_act {v.hidden_act!r} is not supported; supported: {', '.join(supported)}",
    )
    require(hidden % (4 * v.num_heads) == 0, path, f"{v.num_heads} vision heads over {hidden} columns")
    for field, layers in indexes.items():
        lacking = f"{field} {[*layers]} names layers that depth {v.depth} lacks"
        require(all(i < v.depth for i in layers), path, lacking)
    table = getattr(v, "num_position_embeddings", 0)
    require(math.isqrt(table) ** 2 == table, path, f"num_position_embeddings {table} is no square")
    require(out == text.hidden_size, path, f"the vision tower makes {out} columns, the text has {text.hidden_size}")
    require(
        len(indexes["deepstack_visual_indexes"]) < text.num_hidden_layers,
        path,
        "deepstack_visual_indexes has as many levels as the text has layers",
    )


def frame_theta(v: Any, path: Path) -> float:
    """The base of the rotary embedding of a tower's patches. Raises `CheckpointError`."""
    rope: Any = getattr(v, "rope_parameters", None) or {}  # older transformers have none
    kind, theta = rope.get("rope_type") or "axial", rope.get("rope_theta", 10000.0)
    known = kind in ("axial", "default")
    require(known, path, f"rope type {kind!r} of the vision tower is not supported; supported: axial")
    turns = isinstance(theta, int | float) and theta > 0
    require(turns, path, f"rope_theta {theta!r} of the vision tower is not supported; supported: a number over 0")
    return float(theta)


def frame_pixels(v: Any, times: FrameTimes, path: Path) -> tuple[QwenSettings, QwenVideoSettings]:
    """The preprocessing of pictures and videos. If no file gives it, the patch sizes are those of the tower. Raises
    `CheckpointError`."""
    wanted = v.patch_size, v.spatial_merge_size, v.temporal_patch_size
    given = preprocessing(path)
    if given is None:
        given = dict(zip(("patch_size", "merge_size", "temporal_patch_size"), wanted))
    pixels = QwenSettings.read(given)
    made = pixels.patch, pixels.merge, pixels.temporal
    require(
        made == wanted,
        path,
        f"preprocessor_config.json has patch, merge and temporal patch sizes {made}, the vision tower {wanted}",
    )
    clips = preprocessing(path, "video")
    rate = float(getattr(v, "tokens_per_second", 1.0))
    if clips is None:
        clips = given | {"image_mean": pixels.mean, "image_std": pixels.std}
    return pixels, QwenVideoSettings.read(clips, times, rate, pixels)


_NAMES = Names(  # published and present names
    rooms=(
        (r"(?:model\.)?visual\.", "vision."),
        (r"(?:model\.)?(?:language_model\.)?lm_head\.", "lm_head."),
        (r"(?:model\.language_model\.|language_model\.model\.|model\.)", "text."),
    ),
    vision=(
        (r"\.linear_fc([12])\.", r".fc\1."),
        (r"^vision\.merger\.mlp\.0\.", "vision.merger.fc1."),
        (r"^vision\.merger\.mlp\.2\.", "vision.merger.fc2."),
        (r"^vision\.merger\.ln_q\.", "vision.merger.norm."),
        (r"^vision\.merger\.", "projector."),
        (r"^vision\.deepstack_merger_list\.", "projector.levels."),
        (r"\.patch_embed\.proj\.", ".patch."),
        (r"\.pos_embed\.weight$", ".positions"),
        (r"\.norm([12])\.", r".norm_\1."),
        (r"\.attn\.qkv\.", ".qkv."),
        (r"\.attn\.proj\.", ".out."),
        (r"\.mlp\.(gate|up|down)_proj\.", r".\1."),
        (r"\.mlp\.fc1\.", ".up."),
        (r"\.mlp\.fc2\.", ".down."),
    ),
)
_QWEN2 = Decoder("qwen2_vl_text", qkv_bias=True, out_bias=False, sliding="refused", sections=(16, 24, 24))
_QWEN3 = Decoder("qwen3_vl_text", qk_norm="head", sliding="refused", sections=(24, 20, 20), interleaved=True)
QWEN_VL = Family(
    "qwen2_vl",
    _NAMES,
    _QWEN2,
    tower="hydrainfer.models.vit:FrameVision",
    vision=qwen,
    pictures="hydrainfer.processor.pictures.qwen:qwen_images",
    videos="hydrainfer.processor.pictures.qwen_video:qwen_videos",
    around=("vision_start_token_id", "vision_end_token_id"),
    dtype="bfloat16",
    n_template=20,  # "You are a helpful assistant." and the marks of three turns
    n_around=2,
)
_LATER = QWEN_VL._replace(n_template=12)
FAMILIES = {
    "Qwen2VLForConditionalGeneration": QWEN_VL,
    "Qwen2_5_VLForConditionalGeneration": QWEN_VL._replace(
        model_type="qwen2_5_vl", decoder=_QWEN2._replace(model_type="qwen2_5_vl_text")
    ),
    "Qwen3VLForConditionalGeneration": _LATER._replace(model_type="qwen3_vl", decoder=_QWEN3),
    "Qwen3VLMoeForConditionalGeneration": _LATER._replace(
        model_type="qwen3_vl_moe",
        decoder=_QWEN3._replace(model_type="qwen3_vl_moe_text", experts=experts.qwen3_vl),
    ),
    "Qwen3_5ForConditionalGeneration": _LATER._replace(model_type="qwen3_5", decoder=QWEN3_5),
    "Qwen3_5MoeForConditionalGeneration": _LATER._replace(model_type="qwen3_5_moe", decoder=QWEN3_5_MOE),
}
_SEES = "pictures, videos"
SERVED = (
    Served(
        ("Qwen2VLForConditionalGeneration",),
        "Qwen2-VL",
        "Qwen2, M-RoPE",
        "own ViT, 2D rotary, 2 x 2 merger",
        "by size: one per 28 x 28 pixels",
        _SEES,
    ),
    Served(
        ("Qwen2_5_VLForConditionalGeneration",),
        "Qwen2.5-VL, MiMo-VL-7B",
        "Qwen2, M-RoPE, videos at their time",
        "own ViT, windows but for some layers, gated MLP",
        "by size: one per 28 x 28 pixels",
        _SEES,
    ),
    Served(
        ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
        "Qwen3-VL, dense and with experts",
        "Qwen3, interleaved M-RoPE",
        "own ViT, learned grid, DeepStack",
        "by size: one per 32 x 32 pixels",
        _SEES,
    ),
    Served(
        ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
        "Qwen3.5, 3.6 and 3.8, dense and with experts",
        "the gated delta rule in 3 of 4 layers, gated attention, interleaved M-RoPE of a part of each head",
        "Qwen3-VL's without DeepStack",
        "by size: one per 32 x 32 pixels",
        _SEES,
    ),
)
