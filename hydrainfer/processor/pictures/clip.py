"""Pictures for LLaVA-1.5 and Gemma 3: resize and centre crop to one fixed size, like `CLIPImageProcessor`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from hydrainfer.checkpoint import ClipSettings, ModelConfig, PixelBackend
from hydrainfer.processor.pictures.adapter import ImageAdapter, MediaItem, without_options
from hydrainfer.processor.pictures.media import Picture, ResizeTarget
from hydrainfer.processor.pictures.pixels import Pixels
from hydrainfer.processor.pictures.resample import Box


class ClipImages:
    """An `ImageAdapter` that makes all pictures the same size and gives each `n_tokens` placeholders."""

    def __init__(self, settings: ClipSettings, n_tokens: int, *, whole: bool = False) -> None:
        self.settings = settings
        self.parameters = b"clip|" + msgspec.json.encode(settings)
        self._fit = MediaItem(n_tokens, whole=whole)

    def configured(self, options: Mapping[str, Any]) -> ImageAdapter:
        return without_options(options, self)

    def fit(self, width: int, height: int) -> MediaItem:  # noqa: ARG002  # one size for all
        return self._fit

    def resized(self, width: int, height: int) -> ResizeTarget:
        if self.settings.resize is not None and not self.settings.pad:
            height, width = _target(width, height, self.settings.resize)
        return ResizeTarget(width, height, self.settings.resample, self.settings.backend)

    def pixels(self, picture: Picture) -> Pixels:
        """The resized and cropped picture, uint8 [height, width, 3]."""
        settings = self.settings
        if settings.pad:
            square = squared(picture.image, tuple(int(m * 255) for m in settings.mean))
            picture = picture._replace(image=square, full=None)
        width, height = picture.size
        if settings.resize is not None:
            height, width = _target(width, height, settings.resize)
        crop = settings.crop or (height, width)
        target = ResizeTarget(width, height, settings.resample, settings.backend)
        array = picture.resized(target, _middle(width, height, crop))
        return _surrounded(array, crop, settings.backend)


def llava_images(model: ModelConfig) -> ClipImages:
    """The adapter of a LLaVA-1.5 checkpoint, and of any other whose pictures have one size."""
    return ClipImages(model.vision.pixels, model.vision.tokens)


def gemma_images(model: ModelConfig) -> ClipImages:
    """The adapter of a Gemma 3 checkpoint."""
    return ClipImages(model.vision.pixels, model.vision.tokens, whole=True)


def _target(width: int, height: int, resize: int | tuple[int, int]) -> tuple[int, int]:
    """(height, width) after resizing: `resize` itself or, if it is the length of the short edge, with the long edge in
    proportion, truncated."""
    if isinstance(resize, tuple):
        return resize
    long = int(resize * max(width, height) / min(width, height))
    return (long, resize) if width <= height else (resize, long)


def _middle(width: int, height: int, crop: tuple[int, int]) -> Box:
    """The box that a centre crop to (height, width) keeps."""
    top, left = max(0, height - crop[0]) // 2, max(0, width - crop[1]) // 2
    return left, top, min(width, left + crop[1]), min(height, top + crop[0])


def _surrounded(array: np.ndarray, size: tuple[int, int], backend: PixelBackend) -> np.ndarray:
    """An array [h, w, 3], padded on all sides with black to (height, width). An odd pixel is at the top or left or, as
    torchvision has it, at the bottom or right."""
    if array.shape[:2] == size:
        return array
    more = [want - have for want, have in zip(size, array.shape[:2], strict=True)]
    before = [n // 2 if backend == "torchvision" else -(-n // 2) for n in more]
    return np.pad(array, [(b, n - b) for b, n in zip((*before, 0), (*more, 0), strict=True)])


def squared(image: Image.Image, colour: tuple[int, ...]) -> Image.Image:
    """The picture in the middle of a square of this colour."""
    if image.width == image.height:
        return image
    side = max(image.size)
    square = Image.new("RGB", (side, side), colour)
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square
