"""SmolVLM, SmolVLM2 and Idefics3: a SigLIP tower over a picture's tiles and the whole, squares of patches side by side
in a row, one matrix. SmolVLM2 takes videos, whose frames are pictures of one tile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydrainfer.checkpoint import (
    ACTIVATIONS,
    Family,
    IdeficsSettings,
    Matrix,
    Merge,
    Norm,
    Served,
    SmolVideoSettings,
    TowerConfig,
    VideoMark,
    find_json,
    preprocessing,
    require,
)
from hydrainfer.checkpoint.files import whole
from hydrainfer.families.llava import NAMES

_TILES = 6
"""The most rows, and columns, of tiles that the published tokenizers have names for."""
_PROCESSOR = "SmolVLMProcessor"
"""The only processor of this family that takes videos."""


def tower(hf: Any, path: Path) -> TowerConfig:
    """The checked vision tower of an `Idefics3Config` or `SmolVLMConfig`. Raises `CheckpointError`."""
    v, act, known = hf.vision_config, hf.vision_config.hidden_act, ", ".join(ACTIVATIONS)
    side, patch, scale = v.image_size, v.patch_size, hf.scale_factor
    require(act in ACTIVATIONS, path, f"vision hidden_act {act!r} is not supported; supported: {known}")
    require(v.num_channels == 3, path, f"num_channels {v.num_channels} is not supported; supported: 3")
    whole = isinstance(side, int) and isinstance(patch, int)
    require(whole, path, f"image_size {side!r} and patch_size {patch!r} of the vision tower must be whole numbers")
    fits = v.hidden_size % v.num_attention_heads == 0
    require(fits, path, f"hidden_size {v.hidden_size} over {v.num_attention_heads} heads of the vision tower")
    fits = side // patch > 0 and side // patch % scale == 0
    require(
        fits, path, f"scale_factor {scale} does not divide the vision tower's {side // patch} x {side // patch} patches"
    )
    pixels = IdeficsSettings.read(preprocessing(path) or {"max_image_size": {"longest_edge": side}})
    require(
        pixels.tile == side,
        path,
        f"preprocessor_config.json makes tiles of {pixels.tile} pixels (max_image_size.longest_edge), but the vision "
        f"tower takes {side}",
    )
    at_side = _TILES if pixels.edge is None else -(-min(pixels.edge, 4096) // side)
    require(
        not pixels.split or at_side <= _TILES,
        path,
        f"size.longest_edge {pixels.edge} makes {at_side} tiles of {side} pixels at a side; supported: {_TILES}",
    )
    return TowerConfig(
        hidden=v.hidden_size,
        intermediate=v.intermediate_size,
        layers=v.num_hidden_layers,
        heads=v.num_attention_heads,
        norm_eps=v.layer_norm_eps,
        activation=act,
        pixels=pixels,
        videos=_videos(hf, path, pixels),
        patch=patch,
        image_size=side,
        squares=at_side**2 + 1 if pixels.split else 1,
        merge=scale,
        patch_bias=True,
        positions="learned",
        features=(v.num_hidden_layers,),
        steps=(
            Norm("vision.post_norm", v.layer_norm_eps),
            Merge("beside"),
            Matrix("projector.proj", hf.text_config.hidden_size, bias=False),
        ),
        marks=("<fake_token_around_image>", "<global-img>"),
    )


def _videos(hf: Any, path: Path, pixels: IdeficsSettings) -> SmolVideoSettings | None:
    """The preprocessing of videos; None if the checkpoint's processor takes none. As in transformers, the first file
    that names a processor decides, else the model's type. Raises `CheckpointError`."""
    files = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
    named = ((find_json(path / file) or {}).get("processor_class") for file in files)
    if hf.model_type != "smolvlm" or next(filter(None, named), _PROCESSOR) != _PROCESSOR:
        return None
    usual = {"max_image_size": {"longest_edge": pixels.tile}}
    return SmolVideoSettings.read(preprocessing(path, "video") or usual, pixels)


_NAMES = NAMES._replace(
    rooms=(
        (r"(?:model\.)?vision_model\.", "vision."),
        (r"(?:model\.)?connector\.modality_projection\.", "projector."),
        (r"(?:model\.)?text_model\.", "text."),
    ),
)
_SMOLVLM = Family(
    "smolvlm",
    _NAMES,
    tower="hydrainfer.models.vit:SquareVision",
    vision=tower,
    pictures="hydrainfer.processor.pictures.idefics:idefics_images",
    videos="hydrainfer.processor.pictures.idefics:idefics_videos",
    framed_videos=True,
    video_mark=VideoMark("<video>", "<global-img>", before="You are provided the following series of", after="\n\n"),
    dtype="bfloat16",
    fields={"scale_factor": whole(1, 64)},
    n_template=10,
    n_around=3,
)
FAMILIES = {
    "SmolVLMForConditionalGeneration": _SMOLVLM,
    "Idefics3ForConditionalGeneration": _SMOLVLM._replace(model_type="idefics3", videos=""),
}
_SEES = "SigLIP over the picture's tiles and the whole, pixel shuffle, one matrix"
_SHOWN = "by size: some for each tile, with a text before each"
SERVED = (
    Served(
        ("Idefics3ForConditionalGeneration",), "SmolVLM, Idefics3, granite-docling", "Llama", _SEES, _SHOWN, "pictures"
    ),
    Served(("SmolVLMForConditionalGeneration",), "SmolVLM2", "Llama", _SEES, _SHOWN, "pictures, videos"),
)
