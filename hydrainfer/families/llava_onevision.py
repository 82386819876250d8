"""LLaVA-OneVision: LLaVA-NeXT's tiles over SigLIP, shrunk if they are many, and only for the picture of a prompt that
has no other. A frame of a video is one square, with a quarter of the rows."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydrainfer.checkpoint import Family, Served, SquareVideoSettings, preprocessing, require
from hydrainfer.checkpoint.files import TOKEN, instance, maybe
from hydrainfer.families.llava import NAMES, SIGLIP, AnyresConfig, anyres

_N_FRAMES = 32  # of a video, the most that the models were trained with
_SIDES = range(384, 2305, 384)
_DEFAULTS = {
    "size": 384,
    "do_center_crop": False,
    "image_grid_pinpoints": [[height, width] for height in _SIDES for width in _SIDES],
}


def llava_onevision(hf: Any, path: Path) -> AnyresConfig:
    """The checked vision tower of a `LlavaOnevisionConfig`. Raises `CheckpointError`."""
    ratio = hf.vision_aspect_ratio
    limit = re.fullmatch(r"anyres_max_([1-9]\d{0,3})", ratio)
    require(limit is not None, path, f"vision_aspect_ratio {ratio!r} is not supported; supported: anyres_max_9")
    config = anyres(hf, SIGLIP, _DEFAULTS, {}, path)
    tower, clips = config.tower, preprocessing(path, "video") or {}
    videos = SquareVideoSettings.read(clips, tower.image_size, tower.pixels, _N_FRAMES)
    return replace(config, most=int(limit[1]) if limit else 0, alone=True, videos=videos)


FAMILIES = {
    "LlavaOnevisionForConditionalGeneration": Family(
        "llava_onevision",
        NAMES,
        tower="hydrainfer.models.anyres:AnyresVision",
        vision=llava_onevision,
        pictures="hydrainfer.processor.pictures.anyres:anyres_images",
        videos="hydrainfer.processor.pictures.square_video:onevision_videos",
        fields={"vision_aspect_ratio": instance(str, "a string"), "video_token_index": maybe(TOKEN)},
        overflows=True,
        n_template=20,
    )
}
SERVED = (
    Served(
        ("LlavaOnevisionForConditionalGeneration",),
        "LLaVA-OneVision",
        "Qwen2",
        "SigLIP over the picture and its tiles, projector, newline",
        "by size and shape; 730 each where a prompt has several pictures",
        "pictures, videos",
    ),
)
