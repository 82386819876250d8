"""InternVL 3 and 3.5, as transformers has them (repositories whose names end with -hf): pictures in tiles, the whole
picture last, over the text models of Qwen and gpt-oss."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from hydrainfer.checkpoint import (
    ACTIVATIONS,
    Activation,
    Family,
    Matrix,
    Merge,
    Names,
    Norm,
    Served,
    SquareVideoSettings,
    Steps,
    TileSettings,
    TowerConfig,
    VideoMark,
    preprocessing,
    require,
)
from hydrainfer.checkpoint.files import SIDE, SIZE, instance, number, or_list, whole
from hydrainfer.families.gpt_oss import FAMILIES as GPT_OSS
from hydrainfer.families.llava import NAMES

_NORMS: dict[str, Literal["layer", "rms"]] = {"layer_norm": "layer", "rms_norm": "rms"}
_PROJECTOR_EPS = 1e-5
_N_FRAMES = 8  # of a video, as in the examples of the model cards


def internvl(hf: Any, path: Path) -> TowerConfig:
    """The checked vision tower of an `InternVLConfig`. Raises `CheckpointError`."""
    v, n = hf.vision_config, hf.vision_config.num_hidden_layers
    require(v.model_type == "internvl_vision", path, f"vision model {v.model_type!r} is not supported")
    require(v.num_channels == 3, path, f"num_channels {v.num_channels} is not supported; supported: 3")
    known = ", ".join(ACTIVATIONS)
    for field, act in (("vision hidden_act", v.hidden_act), ("projector_hidden_act", hf.projector_hidden_act)):
        require(act in ACTIVATIONS, path, f"{field} {act!r} is not supported; supported: {known}")
    require(v.norm_type in _NORMS, path, f"norm_type {v.norm_type!r} is not supported; supported: {', '.join(_NORMS)}")
    heads, layer = v.num_attention_heads, hf.vision_feature_layer
    require(v.hidden_size % heads == 0, path, f"hidden_size {v.hidden_size} over {heads} heads of the vision tower")
    square = len({*v.image_size}) == len({*v.patch_size}) == 1
    require(square, path, f"image_size {[*v.image_size]} and patch_size {[*v.patch_size]} must be squares")
    image_size, patch = v.image_size[0], v.patch_size[0]
    side, merge = image_size // patch, round(1 / hf.downsample_ratio)
    require(
        merge * hf.downsample_ratio == 1 and side >= merge and side % merge == 0,
        path,
        f"downsample_ratio {hf.downsample_ratio} does not divide {side} x {side} patches evenly",
    )
    require(
        hf.image_seq_length == (side // merge) ** 2,
        path,
        f"image_seq_length is {hf.image_seq_length}, but a tile has {(side // merge) ** 2} tokens",
    )
    strategy = hf.vision_feature_select_strategy
    require(strategy == "default", path, f"vision_feature_select_strategy {strategy!r} is not supported; use default")
    inside = isinstance(layer, int) and -n - 1 <= layer <= n
    require(inside, path, f"vision_feature_layer {layer} is out of range; the vision tower has {n} layers")
    pixels = TileSettings.read(preprocessing(path) or {}, image_size)
    clips = preprocessing(path, "video") or {}
    width = hf.text_config.hidden_size
    last: Steps = (Norm("vision.post_norm", v.layer_norm_eps),) if layer == -1 and not v.use_mean_pooling else ()
    return TowerConfig(
        hidden=v.hidden_size,
        intermediate=v.intermediate_size,
        layers=n,
        heads=heads,
        norm_eps=v.layer_norm_eps,
        activation=v.hidden_act,
        pixels=pixels,
        videos=SquareVideoSettings.read(clips, image_size, pixels, _N_FRAMES, shifted=True),
        patch=patch,
        image_size=image_size,
        squares=pixels.squares,
        merge=merge,
        patch_bias=True,
        positions="learned" if v.use_absolute_position_embeddings else "none",
        class_row=True,
        batched=True,
        norm=_NORMS[v.norm_type],
        qk_norm="row" if v.use_qk_norm else "none",
        layer_scale=True,
        qkv_bias=bool(v.attention_bias),
        features=(layer if layer >= 0 else n + 1 + layer,),
        steps=(
            *last,
            Merge("beside"),
            Norm("projector.layer_norm", _PROJECTOR_EPS),
            Matrix("projector.linear_1", width),
            Activation(hf.projector_hidden_act),
            Matrix("projector.linear_2", width),
        ),
    )


_NAMES = Names(
    rooms=NAMES.rooms,
    text=GPT_OSS["GptOssForCausalLM"].names.text,  # Qwen's tensors have no such names
    vision=(
        (r"\.embeddings\.cls_token$", ".class_row"),
        (r"\.embeddings\.position_embeddings$", ".positions"),
        (r"\.embeddings\.patch_embeddings\.projection\.", ".patch."),
        (r"^vision\.layernorm\.", "vision.post_norm."),
        (r"\.encoder\.layer\.", ".blocks."),
        (r"\.layernorm_before\.", ".norm_1."),
        (r"\.layernorm_after\.", ".norm_2."),
        (r"\.attention\.([qkv])_proj\.", r".\1."),
        (r"\.attention\.([qk])_norm\.", r".\1_norm."),
        (r"\.attention\.projection_layer\.", ".out."),
        (r"\.lambda_([12])$", r".scale_\1"),
        (r"\.mlp\.fc1\.", ".up."),
        (r"\.mlp\.fc2\.", ".down."),
    ),
)
_BOOLS = ("use_qk_norm", "use_mean_pooling", "use_absolute_position_embeddings", "attention_bias")
FAMILIES = {
    "InternVLForConditionalGeneration": Family(
        "internvl",
        _NAMES,
        tower="hydrainfer.models.vit:SquareVision",
        vision=internvl,
        pictures="hydrainfer.processor.pictures.tiles:internvl_images",
        videos="hydrainfer.processor.pictures.square_video:internvl_videos",
        framed_videos=True,
        video_mark=VideoMark("<video>", "<video>", before="Frame1: "),
        dtype="bfloat16",
        fields={
            **dict.fromkeys(("image_size", "patch_size"), or_list(SIDE, least=1)),
            **dict.fromkeys(_BOOLS, instance(bool, "true or false")),
            "downsample_ratio": number(1e-3, 1),
            "image_seq_length": SIZE,
            "vision_feature_layer": whole(-1025, 1024),
        },
        overflows=True,
        n_template=12,
        n_around=2,
    )
}
SERVED = (
    Served(
        ("InternVLForConditionalGeneration",),
        "InternVL3, InternVL3.5 (repositories with -hf)",
        "Qwen2, Qwen3, Qwen3-MoE, gpt-oss",
        "InternViT over tiles and the whole picture, pixel shuffle, projector",
        "256 per tile, by ratio up to 12 tiles and the whole picture",
        "pictures, videos",
    ),
)
