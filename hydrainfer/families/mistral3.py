"""Mistral 3, Pixtral and LightOnOCR: Pixtral's tower, which takes pictures of any size, over Mistral's, Ministral 3's
or Qwen3's text models. All but Pixtral merge squares of patches by a matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydrainfer.checkpoint import (
    ACTIVATIONS,
    Activation,
    Family,
    Matrix,
    Merge,
    Names,
    Norm,
    PixtralSettings,
    Served,
    Steps,
    TowerConfig,
    find_json,
    preprocessing,
    require,
    square_side,
)
from hydrainfer.families.mistral import FIELDS

_EPS = 1e-5
_MARKS = ("[IMG_BREAK]", "[IMG_END]")


def mistral3(hf: Any, path: Path) -> TowerConfig:
    """The checked vision tower of a `Mistral3Config`. Raises `CheckpointError`."""
    features = _features(hf, path)
    require(len(features) == 1, path, f"vision_feature_layer {hf.vision_feature_layer} must be one layer")
    return _tower(hf, hf.spatial_merge_size, features, (*_merger(hf), *_projector(hf, path)), path, marks=_MARKS)


def pixtral(hf: Any, path: Path) -> TowerConfig:
    """The checked vision tower of a `LlavaConfig` with Pixtral's tower. Raises `CheckpointError`."""
    strategy = hf.vision_feature_select_strategy
    require(
        strategy == "full",
        path,
        f"vision_feature_select_strategy {strategy!r} leaves out the class row, which Pixtral does not have; use full",
    )
    return _tower(hf, 1, _features(hf, path), _projector(hf, path), path, marks=_MARKS)


def lighton(hf: Any, path: Path) -> TowerConfig:
    """The checked vision tower of a `LightOnOcrConfig`, whose pictures are resized to multiples of the `patch_size` of
    their preprocessing. Raises `CheckpointError`."""
    width, v = hf.text_config.hidden_size, hf.vision_config
    factor = square_side(preprocessing(path) or {"patch_size": v.patch_size}, "patch_size", 16)
    require(
        factor % v.patch_size == 0,
        path,
        f"preprocessor_config.json: patch_size is {factor}, no multiple of the vision tower's {v.patch_size}",
    )
    steps: Steps = (
        *_merger(hf),
        Matrix("projector.linear_1", width, bias=False),
        Activation("gelu"),
        Matrix("projector.linear_2", width, bias=False),
    )
    return _tower(hf, hf.spatial_merge_size, (v.num_hidden_layers,), steps, path, factor=factor)


def _features(hf: Any, path: Path) -> tuple[int, ...]:
    """The hidden states that are used, see `TowerConfig`."""
    wanted, n = hf.vision_feature_layer, hf.vision_config.num_hidden_layers
    chosen = tuple(wanted) if isinstance(wanted, list | tuple) else (wanted,)
    inside = bool(chosen) and all(isinstance(i, int) and -n - 1 <= i <= n for i in chosen)
    require(inside, path, f"vision_feature_layer {wanted} is out of range; the vision tower has {n} layers")
    return tuple(i if i >= 0 else n + 1 + i for i in chosen)


def _merger(hf: Any) -> Steps:
    return (
        Norm("projector.norm", hf.text_config.rms_norm_eps, "rms"),
        Merge("unfolded"),
        Matrix("projector.patch_merger.merging_layer", hf.vision_config.hidden_size, bias=False),
    )


def _projector(hf: Any, path: Path) -> Steps:
    act, width, bias = hf.projector_hidden_act, hf.text_config.hidden_size, bool(hf.multimodal_projector_bias)
    known = ", ".join(ACTIVATIONS)
    require(act in ACTIVATIONS, path, f"projector_hidden_act {act!r} is not supported; supported: {known}")
    return Matrix("projector.linear_1", width, bias), Activation(act), Matrix("projector.linear_2", width, bias)


def _tower(
    hf: Any,
    merge: int,
    features: tuple[int, ...],
    steps: Steps,
    path: Path,
    marks: tuple[str, ...] = (),
    factor: int = 0,
) -> TowerConfig:
    v, known = hf.vision_config, ", ".join(ACTIVATIONS)
    require(v.model_type == "pixtral", path, f"vision model {v.model_type!r} is not supported; supported: pixtral")
    require(v.num_channels == 3, path, f"num_channels {v.num_channels} is not supported; supported: 3")
    act = v.hidden_act
    require(act in ACTIVATIONS, path, f"vision hidden_act {act!r} is not supported; supported: {known}")
    fits = v.hidden_size % (4 * v.num_attention_heads) == 0
    require(fits, path, f"{v.num_attention_heads} vision heads over {v.hidden_size} columns")
    rope = v.rope_parameters or {}
    kind = rope.get("rope_type", "axial")
    require(kind in ("axial", "default"), path, f"rope type {kind!r} of the vision tower is not supported")
    _check_processor(v.patch_size, merge, path)
    given = preprocessing(path) or {"size": {"longest_edge": v.image_size}}
    pixels = PixtralSettings.read(given, v.patch_size, merge, v.image_size, factor)
    return TowerConfig(
        hidden=v.hidden_size,
        intermediate=v.intermediate_size,
        layers=v.num_hidden_layers,
        heads=v.num_attention_heads,
        norm_eps=_EPS,
        activation=act,
        pixels=pixels,
        patch=v.patch_size,
        merge=merge,
        pre_norm=True,
        norm="rms",
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        gated=True,
        rotation="alternating",
        theta=float(rope.get("rope_theta", 10_000.0)),
        leftover=pixels.factor % pixels.side > 0,
        features=features,
        steps=steps,
        marks=marks,
    )


def _check_processor(patch: int, merge: int, path: Path) -> None:
    """Refuse a processor that would write another number of placeholders than the tower makes rows. Older files leave
    out `spatial_merge_size`."""
    given = find_json(path / "processor_config.json") or {}
    for name, wanted in (("patch_size", patch), ("spatial_merge_size", merge)):
        value = given.get(name)
        require(
            value in (None, wanted), path, f"processor_config.json: {name} is {value}, that of config.json {wanted}"
        )


_NAMES = Names(
    rooms=(
        (r"(?:model\.)?vision_(?:tower|encoder)\.", "vision."),
        (r"(?:model\.)?(?:multi_modal_projector|vision_projection)\.", "projector."),
        (r"(?:model\.)?(?:language_model\.)?lm_head\.", "lm_head."),
        (r"(?:model\.language_model\.model\.|language_model\.model\.|model\.language_model\.)", "text."),
    ),
    vision=(
        (r"\.patch_conv\.", ".patch."),
        (r"\.ln_pre\.", ".pre_norm."),
        (r"\.transformer\.layers\.", ".blocks."),
        (r"\.attention\.([qkv])_proj\.", r".\1."),
        (r"\.attention\.o_proj\.", ".out."),
        (r"\.attention_norm\.", ".norm_1."),
        (r"\.ffn_norm\.", ".norm_2."),
        (r"\.feed_forward\.(gate|up|down)_proj\.", r".\1."),
    ),
)
_MISTRAL3 = Family(
    "mistral3",
    _NAMES,
    tower="hydrainfer.models.vit:FrameVision",
    vision=mistral3,
    pictures="hydrainfer.processor.pictures.pixtral:pixtral_images",
    dtype="bfloat16",
    fields=FIELDS,
    n_template=8,
    n_around=1,
)
PIXTRAL = _MISTRAL3._replace(model_type="llava", vision=pixtral, fields={}, n_template=4)
"""The variant of LLaVA that has Pixtral's tower."""
FAMILIES = {
    "Mistral3ForConditionalGeneration": _MISTRAL3,
    "LightOnOcrForConditionalGeneration": _MISTRAL3._replace(
        model_type="lighton_ocr",
        vision=lighton,
        fields={},
        n_template=10,
        n_around=0,
    ),
}
SERVED = (
    Served(
        ("Mistral3ForConditionalGeneration",),
        "Mistral Small 3.1 and 3.2, Magistral, Ministral 3",
        "Mistral, Ministral 3",
        "Pixtral's ViT, 2 x 2 patches merged by a matrix, projector",
        "by size: one per 28 x 28 pixels, and a text after each row",
        "pictures",
    ),
    Served(
        ("LightOnOcrForConditionalGeneration",),
        "LightOnOCR",
        "Qwen3",
        "Pixtral's ViT, 2 x 2 patches merged by a matrix, projector",
        "by size: one per 28 x 28 pixels",
        "pictures",
    ),
)
