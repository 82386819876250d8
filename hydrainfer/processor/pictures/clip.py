"""Pictures for LLaVA-1.5: CLIP's resize and centre crop to one fixed size, on PIL, as `CLIPImageProcessorPil` does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from hydrainfer.core import CheckpointError
from hydrainfer.processor.pictures.adapter import ImageAdapter, MediaItem, without_options
from hydrainfer.processor.pictures.media import Picture, Target
from hydrainfer.processor.pictures.pixels import Pixels
from hydrainfer.processor.pictures.resample import Box

_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


class ClipSettings(msgspec.Struct, frozen=True, kw_only=True):
    """preprocessor_config.json, resolved. Sizes in pixels; `resize` is the short edge, or (height, width); `pad` first
    makes the picture square, filled with the mean colour. `scale`, `mean`, `std` are applied on the device; here they
    are part of the picture's key."""

    resize: int | tuple[int, int] | None = 224
    crop: tuple[int, int] | None = (224, 224)
    resample: int = Image.Resampling.BICUBIC
    pad: bool = False
    scale: float = 1 / 255
    mean: tuple[float, ...] = _CLIP_MEAN
    std: tuple[float, ...] = _CLIP_STD

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> ClipSettings:
        """Read preprocessor_config.json, old and new spellings. Raises `ValueError`, `TypeError` or `KeyError`."""
        size, crop = config.get("size", 224), config.get("crop_size", 224)
        if isinstance(size, Mapping):
            size = size["shortest_edge"] if size.get("shortest_edge") else (size["height"], size["width"])
        crop = (crop["height"], crop["width"]) if isinstance(crop, Mapping) else (crop, crop)
        kind = str(config.get("image_processor_type"))
        rescale, normalise = config.get("do_rescale", True), config.get("do_normalize", True)
        return msgspec.convert(
            {
                "resize": size if config.get("do_resize", True) else None,
                "crop": crop if config.get("do_center_crop", True) else None,
                "resample": int(config.get("resample", Image.Resampling.BICUBIC)),
                "pad": bool(config.get("do_pad", False)) and kind.startswith("Llava"),
                "scale": config.get("rescale_factor", 1 / 255) if rescale else 1.0,
                "mean": config.get("image_mean", _CLIP_MEAN) if normalise else (0.0,) * 3,
                "std": config.get("image_std", _CLIP_STD) if normalise else (1.0,) * 3,
            },
            cls,
        )


class ClipImages:
    """An `ImageAdapter` whose pictures all become `height x width` and `n_tokens` placeholders."""

    def __init__(self, settings: ClipSettings, n_tokens: int) -> None:
        self.settings = settings
        self.parameters = b"clip|" + msgspec.json.encode(settings)
        self._fit = MediaItem(n_tokens)

    def configured(self, options: Mapping[str, Any]) -> ImageAdapter:
        return without_options(options, self)

    def fit(self, width: int, height: int) -> MediaItem:  # noqa: ARG002  # one size for all
        return self._fit

    def resized(self, width: int, height: int) -> Target:
        if self.settings.resize is not None and not self.settings.pad:
            height, width = _target(width, height, self.settings.resize)
        return Target(width, height, self.settings.resample)

    def pixels(self, picture: Picture) -> Pixels:
        """uint8 [height, width, 3]."""
        settings = self.settings
        if settings.pad:
            square = _square(picture.image, tuple(int(m * 255) for m in settings.mean))
            picture = picture._replace(image=square, full=None)
        width, height = picture.size
        if settings.resize is not None:
            height, width = _target(width, height, settings.resize)
        crop = settings.crop or (height, width)
        array = picture.resized(width, height, settings.resample, _middle(width, height, crop))
        return _surrounded(array, crop)


def llava_images(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> ClipImages:
    """The adapter of a LLaVA-1.5 checkpoint: `config` is config.json with defaults filled in. Raises `CheckpointError`
    if the picture size that preprocessing makes is not the one the vision tower takes."""
    vision = config["vision_config"]
    check_tower(vision)
    try:
        settings = ClipSettings.read(preprocessor)
    except (ValueError, TypeError, KeyError) as e:
        raise CheckpointError(f"preprocessor_config.json cannot be used: {type(e).__name__}: {e}") from None
    side, patch = vision["image_size"], vision["patch_size"]
    made = settings.crop or (settings.resize if isinstance(settings.resize, tuple) else None)
    if made != (side, side):
        raise CheckpointError(
            f"preprocessor_config.json makes pictures of {made or 'varying'} pixels, "
            f"but the vision tower takes ({side}, {side})"
        )
    class_token = 0 if config.get("vision_feature_select_strategy", "default") == "default" else 1
    return ClipImages(settings, (side // patch) ** 2 + class_token)


def check_tower(vision: Mapping[str, Any]) -> None:
    """Check that the vision tower is CLIP's and sees at least one patch. Raises `CheckpointError`."""
    if vision.get("model_type") != "clip_vision_model":
        raise CheckpointError(
            f"LLaVA with a {vision.get('model_type')} vision tower is not supported; supported: clip_vision_model"
        )
    side, patch = vision["image_size"], vision["patch_size"]
    if patch > side:
        raise CheckpointError(f"config.json: vision_config.patch_size is {patch}, more than image_size, {side}")


def _target(width: int, height: int, resize: int | tuple[int, int]) -> tuple[int, int]:
    """(height, width) after resizing: given, or with the short edge given and the long one truncated."""
    if isinstance(resize, tuple):
        return resize
    long = int(resize * max(width, height) / min(width, height))
    return (long, resize) if width <= height else (resize, long)


def _middle(width: int, height: int, crop: tuple[int, int]) -> Box:
    """The box that a centre crop to (height, width) leaves of a picture."""
    top, left = max(0, height - crop[0]) // 2, max(0, width - crop[1]) // 2
    return left, top, min(width, left + crop[1]), min(height, top + crop[0])


def _surrounded(array: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """An array [h, w, 3] in the middle of a black one of (height, width)."""
    missing = [want - have for want, have in zip(size, array.shape[:2], strict=True)]
    return np.pad(array, [*((-(-n // 2), n // 2) for n in missing), (0, 0)]) if any(missing) else array


def _square(image: Image.Image, colour: tuple[int, ...]) -> Image.Image:
    if image.width == image.height:
        return image
    side = max(image.size)
    square = Image.new("RGB", (side, side), colour)
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square
