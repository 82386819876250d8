"""Pictures for Mistral 3: any size, a text after each row of placeholders and another at the end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from hydrainfer.checkpoint import ModelConfig, PixtralSettings
from hydrainfer.processor.pictures.adapter import ImageAdapter, InnerText, MediaItem, without_options
from hydrainfer.processor.pictures.media import Picture, ResizeTarget
from hydrainfer.processor.pictures.pixels import Pixels

BREAK, END = "[IMG_BREAK]", "[IMG_END]"


class PixtralImages:
    """An `ImageAdapter` that keeps a picture's aspect ratio. A picture's grid is (1, rows, columns) of its tokens."""

    def __init__(self, settings: PixtralSettings) -> None:
        self.settings = settings
        self.parameters = b"pixtral|" + msgspec.json.encode(settings)

    def configured(self, options: Mapping[str, Any]) -> ImageAdapter:
        return without_options(options, self)

    def fit(self, width: int, height: int) -> MediaItem:
        rows, columns = self._target(width, height)
        breaks = tuple(columns * row for row in range(1, rows))
        inner = (InnerText(BREAK, breaks),) if breaks else ()
        return MediaItem(rows * columns, (1, rows, columns), after=END, inner=inner)

    def resized(self, width: int, height: int) -> ResizeTarget:
        (rows, columns), s = self._target(width, height), self.settings
        return ResizeTarget(columns * s.factor, rows * s.factor, s.resample, s.backend)

    def pixels(self, picture: Picture) -> Pixels:
        """The resized picture, uint8 [1, height, width, 3]."""
        return picture.resized(self.resized(*picture.size))[None]

    def _target(self, width: int, height: int) -> tuple[int, int]:
        """(rows, columns) of a picture in tokens."""
        s = self.settings
        ratio = max(height / s.edge, width / s.edge)
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        return max(1, -(-height // s.factor)), max(1, -(-width // s.factor))


def pixtral_images(model: ModelConfig) -> PixtralImages:
    """The adapter of a Mistral 3 checkpoint."""
    return PixtralImages(model.vision.pixels)
