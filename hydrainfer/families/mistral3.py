"""Mistral 3: Pixtral's tower, whose squares of patches are merged by a matrix, over Mistral's or Ministral 3's text
models."""

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
    TowerConfig,
    preprocessing,
    require,
)
from hydrainfer.families.llava import NAMES
from hydrainfer.families.mistral import FIELDS

_EPS = 1e-5


def mistral3(hf: Any, path: Path) -> TowerConfig:
    """The checked vision tower of a `Mistral3Config`. Raises `CheckpointError`."""
    v, known = hf.vision_config, ", ".join(ACTIVATIONS)
    require(v.model_type == "pixtral", path, f"vision model {v.model_type!r} is not supported; supported: pixtral")
    require(v.num_channels == 3, path, f"num_channels {v.num_channels} is not supported; supported: 3")
    for field, act in (("vision hidden_act", v.hidden_act), ("projector_hidden_act", hf.projector_hidden_act)):
        require(act in ACTIVATIONS, path, f"{field} {act!r} is not supported; supported: {known}")
    fits = v.hidden_size % (4 * v.num_attention_heads) == 0
    require(fits, path, f"{v.num_attention_heads} vision heads over {v.hidden_size} columns")
    require(
        isinstance(v.patch_size, int), path, f"patch_size {v.patch_size!r} of the vision tower must be a whole number"
    )
    layer, n, merge = hf.vision_feature_layer, v.num_hidden_layers, hf.spatial_merge_size
    inside = isinstance(layer, int) and -n - 1 <= layer <= n
    require(inside, path, f"vision_feature_layer {layer} must be one of the vision tower's {n} layers")
    rope = v.rope_parameters or {}
    require(rope.get("rope_type", "axial") == "axial", path, f"rope type {rope.get('rope_type')!r} is not supported")
    width, bias = hf.text_config.hidden_size, bool(hf.multimodal_projector_bias)
    return TowerConfig(
        hidden=v.hidden_size,
        intermediate=v.intermediate_size,
        layers=n,
        heads=v.num_attention_heads,
        norm_eps=_EPS,
        activation=v.hidden_act,
        pixels=PixtralSettings.read(
            preprocessing(path) or {"size": {"longest_edge": v.image_size}}, v.patch_size * merge
        ),
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
        features=(layer if layer >= 0 else n + 1 + layer,),
        steps=(
            Norm("projector.norm", hf.text_config.rms_norm_eps, "rms"),
            Merge("unfolded"),
            Matrix("projector.patch_merger.merging_layer", v.hidden_size, bias=False),
            Matrix("projector.linear_1", width, bias),
            Activation(hf.projector_hidden_act),
            Matrix("projector.linear_2", width, bias),
        ),
        marks=("[IMG_BREAK]", "[IMG_END]"),
    )


_NAMES = Names(
    rooms=NAMES.rooms,
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
FAMILIES = {
    "Mistral3ForConditionalGeneration": Family(
        "mistral3",
        _NAMES,
        tower="hydrainfer.models.vit:FrameVision",
        vision=mistral3,
        pictures="hydrainfer.processor.pictures.pixtral:pixtral_images",
        dtype="bfloat16",
        fields=FIELDS,
        n_template=8,
        n_around=1,
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
)
