"""Pictures for Pixtral's tower: any size, and in most families a text after each row of placeholders and another at the
end. The results are those of `PixtralImageProcessorPil`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from hydrainfer.checkpoint import ModelConfig, PixtralSettings
from hydrainfer.core import MediaError
from hydrainfer.processor.pictures.adapter import ImageAdapter, InnerText, MediaItem, without_options
from hydrainfer.processor.pictures.media import Picture, ResizeTarget
from hydrainfer.processor.pictures.pixels import Pixels


class PixtralImages:
    """An `ImageAdapter` that keeps a picture's aspect ratio. A picture's grid is (1, rows, columns) of its tokens or,
    if it may have more patches than whole tokens, of its patches."""

    def __init__(self, settings: PixtralSettings, row_end: str = "", end: str = "") -> None:
        """`row_end`: the text after each row of placeholders but the last; `end`: the one after the last."""
        self.settings, self._row_end, self._end = settings, row_end, end
        self.parameters = b"pixtral|" + msgspec.json.encode(settings)

    def configured(self, options: Mapping[str, Any]) -> ImageAdapter:
        return without_options(options, self)

    def fit(self, width: int, height: int) -> MediaItem:
        s, target = self.settings, self.resized(width, height)
        rows, columns = target.height // s.side, target.width // s.side
        breaks = tuple(columns * row for row in range(1, rows)) if self._row_end else ()
        unit = s.patch if s.factor % s.side else s.side
        return MediaItem(
            rows * columns,
            (1, target.height // unit, target.width // unit),
            after=self._end,
            inner=(InnerText(self._row_end, breaks),) if breaks else (),
        )

    def resized(self, width: int, height: int) -> ResizeTarget:
        s = self.settings
        high, wide = height, width
        ratio = max(height / s.edge, width / s.edge)
        if ratio > 1:
            high, wide = math.floor(height / ratio), math.floor(width / ratio)
        high, wide = (-(-n // s.factor) * s.factor for n in (high, wide))
        if min(high, wide) < s.side:
            raise MediaError(
                f"the picture is {width} x {height}, which is resized to {wide} x {high}; this model takes no picture "
                f"with a side below {s.side} pixels then"
            )
        return ResizeTarget(wide, high, s.resample, s.backend)

    def pixels(self, picture: Picture) -> Pixels:
        """The resized picture, uint8 [1, height, width, 3]."""
        return picture.resized(self.resized(*picture.size))[None]


def pixtral_images(model: ModelConfig) -> PixtralImages:
    """The adapter of a checkpoint with Pixtral's tower."""
    return PixtralImages(model.vision.pixels, *model.vision.marks)
