"""The families that b12 compares, and what its processes run: media workers import it by name."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from hydrainfer.checkpoint import ClipSettings
from hydrainfer.processor import (
    ClipImages,
    Encodable,
    ImageAdapter,
    ImagePart,
    MediaItem,
    MediaLimits,
    Seal,
    prepare_image,
)

PHOTOS = ("astronaut.png", "coffee.png", "rocket.jpg", "retina.jpg")
LARGE_BYTES = 12_800_000 * 3  # what the largest adapter's array may take
CLIP: dict[str, Any] = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}
SEAL = Seal(b"w" * 32, "float32")


class Family(NamedTuple):
    """`theirs` makes the reference's callable (pictures to float arrays); `normalised`: our array as it should be."""

    ours: Callable[[], ImageAdapter]
    theirs: Callable[[], Callable[..., Any]]
    normalised: Callable[[np.ndarray], np.ndarray]


def _clip_theirs() -> Callable[..., Any]:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    return CLIPImageProcessorPil(**CLIP)


def _clip_normalised(pixels: np.ndarray) -> np.ndarray:
    settings = ClipSettings.read(CLIP)
    mean, std = (np.array(v, np.float32) for v in (settings.mean, settings.std))
    return (pixels * np.float32(settings.scale) - mean) / std


def _clip_ours() -> ImageAdapter:
    return ClipImages(ClipSettings.read(CLIP).by("pillow"), 576)


FAMILIES = {"clip-336": Family(_clip_ours, _clip_theirs, _clip_normalised)}


def photographs(size: tuple[int, int]) -> list[bytes]:
    import skimage

    found = []
    for name in PHOTOS:
        with Image.open(Path(skimage.__file__).parent / "data" / name) as image:
            out = io.BytesIO()
            image.convert("RGB").resize(size, Image.Resampling.LANCZOS).save(out, "JPEG", quality=90)
            found.append(out.getvalue())
    return found


# ---- what the processes run


def prepare_normalised(
    part: ImagePart, family: str, adapter: ImageAdapter, limits: MediaLimits
) -> tuple[Encodable, ...]:
    """float32, as bytes: workers send nothing else."""
    normalised = FAMILIES[family].normalised
    made = prepare_image(part, adapter, limits, SEAL)
    return tuple(Encodable(e.item, e.key, normalised(e.pixels).view(np.uint8)) for e in made)


def large_array(part: ImagePart) -> tuple[Encodable, ...]:  # noqa: ARG001
    return (Encodable(MediaItem(1), b"", np.ones(LARGE_BYTES, np.uint8)),)


_processor: Callable[..., Any] | None = None


def reference(family: str, data: bytes | None) -> None:
    """One picture by the reference; None only gets ready."""
    global _processor
    _processor = _processor or FAMILIES[family].theirs()
    if data is not None:
        _processor(images=Image.open(io.BytesIO(data)), return_tensors="np")
