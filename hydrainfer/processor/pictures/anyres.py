"""Pictures for LLaVA-NeXT and LLaVA-OneVision: the whole picture and its tiles, with the same result as
`LlavaNextImageProcessor` and `LlavaOnevisionImageProcessor`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from hydrainfer.checkpoint import ClipSettings, ModelConfig
from hydrainfer.families.llava import AnyresConfig, best_pinpoint, shrunk
from hydrainfer.processor.pictures.adapter import (
    FRAME_OPTIONS,
    ImageAdapter,
    MediaItem,
    given_options,
    without_options,
)
from hydrainfer.processor.pictures.clip import squared
from hydrainfer.processor.pictures.media import Picture, ResizeTarget
from hydrainfer.processor.pictures.pixels import Pixels


class AnyresSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The resolved preprocessor_config.json. `tile`: side of the tower's square; `pinpoints`: each (height, width) that
    a picture may be resized to, multiples of `tile`; `patch`: side of a patch. All in pixels. `clip`: how squares are
    resized and, on the device, rescaled and normalised. `most` and `alone`: see `AnyresConfig`. `whole`: the picture is
    one of several in its prompt, so it is only made square, with a border in the mean colour."""

    tile: int
    patch: int
    pinpoints: tuple[tuple[int, int], ...]
    clip: ClipSettings
    most: int = 0
    alone: bool = False
    whole: bool = False


class _Canvas(NamedTuple):
    """The canvas that a picture is placed on, and the picture's size there, both (height, width) in pixels."""

    canvas: tuple[int, int]
    size: tuple[int, int]


class AnyresImages:
    """An `ImageAdapter`. A picture's grid is (rows of tiles; rows, columns of patches without padding)."""

    def __init__(self, settings: AnyresSettings, known: Sequence[str] = ()) -> None:
        """`known`: the options of a request, which are those of its videos."""
        self.settings, self._known = settings, known
        self.parameters = b"anyres|" + msgspec.json.encode(settings)
        self._side = settings.tile // settings.patch  # patches

    def configured(self, options: Mapping[str, Any]) -> ImageAdapter:
        if not self._known:
            return without_options(options, self)
        given_options(options, self._known)
        return self

    def among(self, n_pictures: int) -> ImageAdapter:
        """`Counting.among`."""
        if n_pictures == 1 or not self.settings.alone:
            return self
        return AnyresImages(msgspec.structs.replace(self.settings, whole=True), self._known)

    def fit(self, width: int, height: int) -> MediaItem:
        """One token per patch of the whole picture, then for each row of patches of the tiles, without padding, one
        token per patch and a newline. Of one of several pictures, patches and one newline."""
        s = self.settings
        if s.whole:
            return MediaItem(self._side**2 + 1)
        canvas = self._place(width, height).canvas
        rows, columns = (n // s.tile * self._side for n in canvas)
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        high, wide = shrunk(rows, columns, s.most * self._side**2)
        return MediaItem(self._side**2 + high * (wide + 1), (canvas[0] // s.tile, rows, columns))

    def pixels(self, picture: Picture) -> Pixels:
        """uint8 [1 + tiles, tile, tile, 3]: the whole picture, resized to a square, then the tiles row by row."""
        s, image = self.settings, picture.image
        if s.whole:
            square = squared(image, tuple(int(m * 255) for m in s.clip.mean))
            return picture._replace(image=square, full=None).resized(self._target(s.tile, s.tile))[None]
        (high, wide), (height, width) = self._place(image.width, image.height)
        canvas = np.zeros((high, wide, 3), dtype=np.uint8)
        top, left = (high - height) // 2, (wide - width) // 2
        canvas[top : top + height, left : left + width] = picture.resized(self._target(width, height))
        squares = np.empty((1 + high // s.tile * (wide // s.tile), s.tile, s.tile, 3), dtype=np.uint8)
        squares[0] = picture.resized(self._target(s.tile, s.tile))
        tiles = canvas.reshape(high // s.tile, s.tile, wide // s.tile, s.tile, 3)
        squares[1:] = tiles.swapaxes(1, 2).reshape(-1, s.tile, s.tile, 3)
        return squares

    def _target(self, width: int, height: int) -> ResizeTarget:
        return ResizeTarget(width, height, self.settings.clip.resample, self.settings.clip.backend)

    def _place(self, width: int, height: int) -> _Canvas:
        """The canvas for a picture of this size."""
        high, wide = best = best_pinpoint(width, height, self.settings.pinpoints)
        across, down = wide / width, high / height
        if across < down:
            return _Canvas(best, (min(math.ceil(height * across), high), wide))
        return _Canvas(best, (high, min(math.ceil(width * down), wide)))


def anyres_images(model: ModelConfig) -> AnyresImages:
    """The adapter of a checkpoint of LLaVA-NeXT or LLaVA-OneVision."""
    c: AnyresConfig = model.vision
    tower = c.tower
    return AnyresImages(
        AnyresSettings(
            tile=tower.image_size,
            patch=tower.patch,
            pinpoints=c.pinpoints,
            clip=tower.pixels,
            most=c.most,
            alone=c.alone,
        ),
        FRAME_OPTIONS if c.videos is not None else (),
    )
