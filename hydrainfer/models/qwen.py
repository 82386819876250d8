"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: their configurations and tensor names; the towers are in `qwen_tower`."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import torch

from hydrainfer.config import preprocessing
from hydrainfer.models.config import (
    ACTIVATIONS,
    ModelConfig,
    TextConfig,
    pixel_scaling,
    require,
    text_config,
)
from hydrainfer.models.qwen_tower import QwenVision, QwenVisionConfig
from hydrainfer.ops import OpSet

ARCHITECTURES = {
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
}
_RENAMES = (  # published and present names → ours
    (re.compile(r"^(?:model\.)?visual\."), "vision."),
    (re.compile(r"^(?:model\.)?(?:language_model\.)?lm_head\."), "lm_head."),
    (re.compile(r"^(?:model\.language_model\.|language_model\.model\.|model\.)"), "text."),
)
_VISION_RENAMES = (  # what one family calls otherwise than the others
    (re.compile(r"\.linear_fc([12])\."), r".fc\1."),
    (re.compile(r"^(vision\.merger)\.mlp\.0\."), r"\1.fc1."),
    (re.compile(r"^(vision\.merger)\.mlp\.2\."), r"\1.fc2."),
    (re.compile(r"^(vision\.merger)\.ln_q\."), r"\1.norm."),
)
_SECTIONS = {"qwen2_vl": (16, 24, 24), "qwen2_5_vl": (16, 24, 24), "qwen3_vl": (24, 20, 20)}
_MIN_PIXELS, _MAX_PIXELS = 56 * 56, 28 * 28 * 1280  # where preprocessor_config.json is silent
_ASPECT = 200  # sides of a picture differ at most so many times


def canonical(name: str) -> str:
    """`visual.merger.mlp.0.bias` → `vision.merger.fc1.bias`; unknown names stay."""
    for pattern, ours in _RENAMES:
        renamed, n = pattern.subn(ours, name, count=1)
        if n:
            for inner, spelling in _VISION_RENAMES if ours == "vision." else ():
                renamed = inner.sub(spelling, renamed, count=1)
            return renamed
    return name


def read(hf: Any, path: Path) -> ModelConfig:
    """Check and describe a transformers configuration of one of the three. Raises `CheckpointError`."""
    kind = hf.model_type
    require(kind in ARCHITECTURES, path, f"model_type {kind!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    text = _text_config(hf, path)
    vision = _vision_config(hf, path)
    require(vision.out == text.hidden, path, f"the vision tower makes {vision.out} columns, the text has {text.hidden}")
    require(
        len(vision.levels) < text.layers, path, "deepstack_visual_indexes has as many levels as the text has layers"
    )
    dtype = hf.dtype or hf.text_config.dtype
    return ModelConfig(
        architecture=ARCHITECTURES[kind],
        text=text,
        vision=vision,
        media_tokens=(hf.image_token_id, hf.video_token_id),
        dtype=str(dtype).removeprefix("torch.") if dtype is not None else "bfloat16",
        deepstack=len(vision.levels),
    )


def _text_config(hf: Any, path: Path) -> TextConfig:
    """The decoder's configuration, with the sections of its multimodal rotary positions."""
    t = hf.text_config
    kinds = set(getattr(t, "layer_types", None) or ()) - {"full_attention"}
    require(not kinds, path, f"{' and '.join(sorted(kinds))} is not supported; supported: use_sliding_window false")
    text = text_config(t, path, tied=bool(hf.tie_word_embeddings or getattr(t, "tie_word_embeddings", False)))
    given = dict(getattr(t, "rope_parameters", None) or {})
    sections = tuple(given.get("mrope_section") or _SECTIONS[hf.model_type])
    require(
        len(sections) == 3 and 2 * sum(sections) == text.head_dim,
        path,
        f"mrope_section {list(sections)} does not sum to half of head_dim {text.head_dim}",
    )
    interleaved = hf.model_type == "qwen3_vl"
    return dataclasses.replace(text, rope=dataclasses.replace(text.rope, sections=sections, interleaved=interleaved))


def _vision_config(hf: Any, path: Path) -> QwenVisionConfig:
    v, kind = hf.vision_config, hf.model_type
    require(v.in_channels == 3, path, f"in_channels {v.in_channels} is not supported; supported: 3")
    gated, qwen3 = kind == "qwen2_5_vl", kind == "qwen3_vl"
    supported = ("silu",) if gated else ACTIVATIONS
    require(
        v.hidden_act in supported,
        path,
        f"vision hidden_act {v.hidden_act!r} is not supported; supported: {', '.join(supported)}",
    )
    hidden = v.embed_dim if kind == "qwen2_vl" else v.hidden_size
    require(hidden % (4 * v.num_heads) == 0, path, f"{v.num_heads} vision heads over {hidden} columns")
    for field in ("fullatt_block_indexes",) if gated else ("deepstack_visual_indexes",) if qwen3 else ():
        indexes = getattr(v, field)
        require(all(i < v.depth for i in indexes), path, f"{field} {indexes} names layers that depth {v.depth} lacks")
    given = preprocessing(path) or {}
    mean, std, rescale = pixel_scaling(given, path)
    side = v.patch_size * v.spatial_merge_size
    window = v.window_size if gated else 0
    require(not gated or window >= side, path, f"window_size {window} is smaller than a token's {side} pixels")
    return QwenVisionConfig(
        hidden=hidden,
        intermediate=int(hidden * v.mlp_ratio) if kind == "qwen2_vl" else v.intermediate_size,
        layers=v.depth,
        heads=v.num_heads,
        out=v.hidden_size if kind == "qwen2_vl" else v.out_hidden_size,
        activation=v.hidden_act,
        patch=v.patch_size,
        temporal=v.temporal_patch_size,
        merge=v.spatial_merge_size,
        theta=float((getattr(v, "rope_parameters", None) or {}).get("rope_theta") or 10000.0),
        tokens=_largest(given, side),
        mean=mean,
        std=std,
        rescale=rescale,
        gated=gated,
        window=window // side,
        full_layers=tuple(v.fullatt_block_indexes) if gated else (),
        grid=math.isqrt(v.num_position_embeddings) if qwen3 else 0,
        levels=tuple(v.deepstack_visual_indexes) if qwen3 else (),
        patch_bias=qwen3,
    )


def _largest(given: dict[str, Any], side: int) -> int:
    """Tokens of the largest picture: of `max_pixels`, or of a narrow one, whose short side is at least one token."""
    size = given.get("size")
    size = size if isinstance(size, dict) else {}
    least = given.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels") or _MIN_PIXELS
    most = given.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels") or _MAX_PIXELS
    narrow = (math.sqrt(least / _ASPECT) // side + 1) * (math.sqrt(max(least, most) * _ASPECT) // side + 1)
    return int(max(most // side**2, narrow, 1))


def vision(config: ModelConfig, ops: OpSet, dtype: torch.dtype, device: torch.device) -> QwenVision:
    return QwenVision(config.vision, ops, dtype, device)
