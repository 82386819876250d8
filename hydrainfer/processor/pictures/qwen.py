"""Pictures for Qwen's and GLM's towers. The grid depends on the picture's size, as in `Qwen2VLImageProcessor` and
`Glm4vImageProcessorPil`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from hydrainfer.checkpoint import MAX_ASPECT, ModelConfig, PixelBounds, QwenSettings
from hydrainfer.core import MediaError
from hydrainfer.processor.pictures.adapter import ImageAdapter, MediaItem, given_options, wrong_option
from hydrainfer.processor.pictures.media import Picture, ResizeTarget
from hydrainfer.processor.pictures.pixels import Pixels

KNOWN = ("min_pixels", "max_pixels", "size", "fps", "num_frames", "max_frames")


class QwenOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A request's `mm_processor_kwargs`, checked. `size`: the values that transformers calls shortest_edge and
    longest_edge; for these models both are numbers of pixels."""

    min_pixels: int | None = None
    max_pixels: int | None = None
    size: PixelBounds | None = None
    fps: float | None = None
    num_frames: int | None = None
    max_frames: int | None = None

    @classmethod
    def read(cls, given: Mapping[str, Any], known: Sequence[str] = KNOWN) -> QwenOptions:
        """The checked options of a request. Raises `InvalidRequest` naming the wrong option, and the known ones."""
        values = given_options(given, known)
        for name in ("min_pixels", "max_pixels", "max_frames"):
            if name in values and not _is_count(values[name]):
                raise wrong_option(f"{name} must be a whole number, at least 1")
        if "size" in values:
            if "min_pixels" in values or "max_pixels" in values:
                raise wrong_option("size and min_pixels or max_pixels exclude each other")
            values["size"] = _read_size(values["size"])
        return cls(**values)

    def bounds(self, default: PixelBounds, limit: int, factor: int) -> PixelBounds:
        """The bounds that result from `default` and these options. Raises `InvalidRequest` if the least exceeds the
        most, or if the most is below one token or above `limit`, the checkpoint's own."""
        least = self.size.least if self.size else self.min_pixels or default.least
        most = self.size.most if self.size else self.max_pixels or max(default.most, least)
        least = least if self.size or self.min_pixels else min(least, most)
        if not least <= most:
            raise wrong_option(f"the least pixels ({least}) are more than the most ({most})")
        if not factor**2 <= most <= limit:
            raise wrong_option(f"the most pixels of a picture must be between {factor**2} and {limit}, not {most}")
        return PixelBounds(least, most)


class QwenImages:
    """An `ImageAdapter` that keeps a picture's aspect ratio: both sides are rounded to multiples of a token's side."""

    def __init__(self, settings: QwenSettings, limit: int | None = None) -> None:
        """`limit` is the highest number of pixels that a request may ask for."""
        self.settings = settings
        self._limit = limit or settings.bounds.most
        self.parameters = b"qwen|" + msgspec.json.encode(settings)

    def configured(self, options: Mapping[str, Any]) -> ImageAdapter:
        if not options:
            return self
        bounds = QwenOptions.read(options).bounds(self.settings.bounds, self._limit, self.settings.factor)
        return QwenImages(msgspec.structs.replace(self.settings, bounds=bounds), self._limit)

    def fit(self, width: int, height: int) -> MediaItem:
        h, w = self._target(width, height)
        return MediaItem(h * w, (1, h, w))

    def pixels(self, picture: Picture) -> Pixels:
        """The resized picture, uint8 [1, height, width, 3]."""
        return picture.resized(self.resized(*picture.size))[None]

    def resized(self, width: int, height: int) -> ResizeTarget:
        (h, w), s = self._target(width, height), self.settings
        return ResizeTarget(w * s.factor, h * s.factor, s.resample, s.backend)

    def _target(self, width: int, height: int) -> tuple[int, int]:
        """(rows, columns) of a picture in tokens."""
        s = self.settings
        if not s.resize:
            if width % s.factor or height % s.factor:
                raise MediaError(f"this model takes pictures whose sides are multiples of {s.factor} pixels")
            return height // s.factor, width // s.factor
        if s.in_time:
            return resize_in_time(s.temporal, height, width, s)
        return smart_resize(height, width, s.factor, s.bounds)


def qwen_images(model: ModelConfig) -> QwenImages:
    """The adapter of a checkpoint whose vision tower takes pictures of any size."""
    return QwenImages(model.vision.pixels)


def smart_resize(height: int, width: int, factor: int, bounds: PixelBounds) -> tuple[int, int]:
    """(rows, columns) in squares of `factor` pixels: the size nearest to the picture's within the bounds, with nearly
    the same aspect ratio. Raises `MediaError` for too narrow a picture."""
    check_aspect(width, height)
    rows, columns = round(height / factor), round(width / factor)
    if rows * columns * factor**2 > bounds.most:
        shrink = math.sqrt(height * width / bounds.most)
        return max(1, math.floor(height / shrink / factor)), max(1, math.floor(width / shrink / factor))
    if rows * columns * factor**2 < bounds.least:
        grow = math.sqrt(bounds.least / (height * width))
        return math.ceil(height * grow / factor), math.ceil(width * grow / factor)
    return rows, columns


def resize_in_time(n_frames: int, height: int, width: int, s: QwenSettings) -> tuple[int, int]:
    """`smart_resize` with bounds on the pixels of all frames together. Frames smaller than a token are enlarged
    first."""
    factor, bounds, shown = s.factor, s.bounds, (width, height)
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    check_aspect(width, height, shown)
    rows, columns, depth = round(height / factor), round(width / factor), round(n_frames / s.temporal) * s.temporal
    if depth * rows * columns * factor**2 > bounds.most:
        shrink = math.sqrt(n_frames * height * width / bounds.most)
        return max(1, math.floor(height / shrink / factor)), max(1, math.floor(width / shrink / factor))
    if depth * rows * columns * factor**2 < bounds.least:
        grow = math.sqrt(bounds.least / (n_frames * height * width))
        return math.ceil(height * grow / factor), math.ceil(width * grow / factor)
    return rows, columns


def check_aspect(width: int, height: int, shown: tuple[int, int] | None = None) -> None:
    """Raise `MediaError` for too narrow a picture, whose own size is `shown` if it has been enlarged."""
    if max(height, width) / min(height, width) > MAX_ASPECT:
        own_width, own_height = shown or (width, height)
        raise MediaError(
            f"the picture is {own_width} x {own_height}: one side may be at most {MAX_ASPECT} times the other"
        )


def _read_size(size: object) -> PixelBounds:
    edges = ("shortest_edge", "longest_edge")
    if not isinstance(size, Mapping) or set(size) != set(edges) or not all(_is_count(size[e]) for e in edges):
        raise wrong_option("size must be an object of shortest_edge and longest_edge, both numbers of pixels")
    return PixelBounds(size["shortest_edge"], size["longest_edge"])


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
