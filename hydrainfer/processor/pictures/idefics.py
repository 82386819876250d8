"""Pictures for Idefics3 and SmolVLM: resized up to three times, each time rounded, and cut into square tiles.

picture -> longest edge -> multiples of a tile -> tiles row by row, then the whole in one tile

Videos for SmolVLM2: every frame is one tile with its time before it, as in `SmolVLMVideoProcessor`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from hydrainfer.checkpoint import IdeficsSettings, ModelConfig, SmolVideoSettings
from hydrainfer.processor.pictures.adapter import (
    ImageAdapter,
    InnerText,
    MediaItem,
    VideoAdapter,
    VideoShape,
    without_options,
)
from hydrainfer.processor.pictures.media import Picture, ResizeTarget
from hydrainfer.processor.pictures.pixels import Pixels
from hydrainfer.processor.pictures.qwen import QwenOptions

_OPTIONS = ("num_frames", "fps")
_FPS = 24.0  # assumed for a file without a frame rate
_SKIPPED_S = 1  # of a long video, at its start and at its end
_ONES = (
    *("", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_LONGEST = 4096  # pixels that no side exceeds after the first resize
_AROUND, _WHOLE = "<fake_token_around_image>", "<global-img>"


class IdeficsImages:
    """An `ImageAdapter`. A picture that fits one tile is one; a larger one is its tiles and the whole, with a text
    before each. `n_tokens`: the rows of a tile. `videos`: the model takes videos, too, which have options."""

    def __init__(self, settings: IdeficsSettings, n_tokens: int, *, videos: bool = False) -> None:
        self.settings, self._n_tokens, self._videos = settings, n_tokens, videos
        self.parameters = b"idefics|" + msgspec.json.encode(settings)

    def configured(self, options: Mapping[str, Any]) -> ImageAdapter:
        if not self._videos:
            return without_options(options, self)
        QwenOptions.read(options, _OPTIONS)
        return self

    def fit(self, width: int, height: int) -> MediaItem:
        rows, columns = self._tiles(width, height)
        n = self._n_tokens
        if rows * columns == 1:
            return MediaItem(n, before=f"{_AROUND}{_WHOLE}", after=_AROUND)
        tiles = [(row, column) for row in range(1, rows + 1) for column in range(1, columns + 1)]
        before, *others = (f"{_AROUND}<row_{row}_col_{column}>" for row, column in tiles)
        inner = [
            InnerText(f"\n{text}" if column == 1 else text, (i * n,), 2 + (column == 1))
            for i, (text, (_, column)) in enumerate(zip(others, tiles[1:]), 1)
        ]
        inner.append(InnerText(f"\n\n{_AROUND}{_WHOLE}", (len(tiles) * n,), 3))
        return MediaItem(n * (len(tiles) + 1), before=before, after=_AROUND, inner=tuple(inner))

    def pixels(self, picture: Picture) -> Pixels:
        """uint8 [tiles, side, side, 3]: the tiles row by row and, if there are several, the whole picture."""
        s, side = self.settings, self.settings.tile
        if s.edge is not None:
            picture = self._resized(picture, *_within(*picture.size, s.edge))
        rows, columns = self._tiles(*picture.size) if s.edge is None else _grid(*picture.size, side)
        if not s.split:
            return self._array(picture, side, side)[None]
        whole = self._resized(picture, columns * side, rows * side)
        tiles = np.asarray(whole.image).reshape(rows, side, columns, side, 3).swapaxes(1, 2)
        found = np.empty((rows * columns + (rows * columns > 1), side, side, 3), np.uint8)
        found[: rows * columns] = tiles.reshape(-1, side, side, 3)
        if rows * columns > 1:
            found[-1] = self._array(whole, side, side)
        return found

    def _resized(self, picture: Picture, width: int, height: int) -> Picture:
        return picture._replace(image=Image.fromarray(self._array(picture, width, height)), full=None)

    def _array(self, picture: Picture, width: int, height: int) -> np.ndarray:
        return picture.resized(ResizeTarget(width, height, self.settings.resample, self.settings.backend))

    def _tiles(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of the tiles of a picture; (1, 1) if it is one tile."""
        s = self.settings
        if not s.split:
            return 1, 1
        if s.edge is not None:
            width, height = _within(width, height, s.edge)
        return _grid(width, height, s.tile)


class IdeficsVideos:
    """A `VideoAdapter` that makes a picture of one tile of each frame. `n_tokens`: the rows of a tile."""

    def __init__(self, settings: SmolVideoSettings, n_tokens: int) -> None:
        self.settings, self._n_tokens = settings, n_tokens
        content = msgspec.structs.replace(settings.frames, edge=None)  # it decides only the pixels
        self.parameters = b"idefics video|" + msgspec.json.encode(content)
        self.options = msgspec.json.encode(settings)

    def configured(self, options: Mapping[str, Any]) -> VideoAdapter:
        given = QwenOptions.read(options, _OPTIONS)
        changed = {name: getattr(given, name) for name in _OPTIONS if getattr(given, name) is not None}
        return IdeficsVideos(msgspec.structs.replace(self.settings, **changed), self._n_tokens)

    def sample(self, video: VideoShape, max_frames: int) -> list[int]:
        s, rate, last = self.settings, video.fps or _FPS, video.n_frames - 1
        duration = video.n_frames / rate
        n = max(1, min(round(s.fps * duration), s.num_frames, max_frames))
        first, end = 0, last
        if duration - 2 * _SKIPPED_S > s.num_frames * s.fps:  # frames times a rate, as in the reference
            first, end = int(_SKIPPED_S * rate), min(int(video.n_frames - _SKIPPED_S * rate), last)
        if first >= end:
            first, end = 0, last
        return np.unique(np.linspace(first, end, n, dtype=int)).tolist()

    def items(self, video: VideoShape, indices: Sequence[int]) -> list[MediaItem]:
        rate = video.fps or _FPS
        duration = timedelta(seconds=int(video.n_frames / rate))
        intro = f" {_words(len(indices))} frames from a {duration} [H:MM:SS] video.\n"
        found = []
        for i, index in enumerate(indices):
            minute, second = divmod(index / rate, 60)
            text = f"\nFrame from {int(minute):02d}:{int(second):02d}:{_AROUND}{_WHOLE}"
            found.append(MediaItem(self._n_tokens, before=text if i else intro + text, after=_AROUND))
        return found

    def resized(self, video: VideoShape, n_frames: int) -> ResizeTarget:  # noqa: ARG002  # as for any number
        s = self.settings.frames
        assert s.edge is not None
        via = _within(video.width, video.height, min(s.edge, _LONGEST))
        return ResizeTarget(s.tile, s.tile, s.resample, s.backend, via)

    def pixels(self, video: VideoShape, frames: np.ndarray) -> list[Pixels]:  # noqa: ARG002
        return list(frames[:, None])


def _words(n: int) -> str:
    """A number from 1 to 999,999 in English words, as the package num2words writes it."""
    if n < len(_ONES):
        return _ONES[n]
    if n < 100:
        return "-".join(filter(None, (_TENS[n // 10], _ONES[n % 10])))
    size, name = (100, "hundred") if n < 1000 else (1000, "thousand")
    words, rest = f"{_words(n // size)} {name}", n % size
    if rest == 0:
        return words
    if rest < 100:
        return f"{words} and {_words(rest)}"
    return f"{words}, {_words(rest)}"


def _within(width: int, height: int, edge: int) -> tuple[int, int]:
    """(width, height) with the longest edge resized to `edge`, the other one in proportion, rounded down and then up to
    an even number, and both at most `_LONGEST`."""
    aspect = width / height
    if width >= height:
        width, height = edge, int(edge / aspect)
        height += height % 2
    else:
        width, height = int(edge * aspect), edge
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    aspect = width / height
    if width >= height and width > _LONGEST:
        width, height = _LONGEST, int(_LONGEST / aspect)
    elif height > width and height > _LONGEST:
        width, height = int(_LONGEST * aspect), _LONGEST
    return max(width, 1), max(height, 1)


def _grid(width: int, height: int, side: int) -> tuple[int, int]:
    """Rows and columns of tiles that hold a picture of this size: the longer edge decides, the other one follows in
    proportion."""
    aspect = width / height
    if width >= height:
        columns = math.ceil(width / side)
        return math.ceil(int(columns * side / aspect) / side), columns
    rows = math.ceil(height / side)
    return rows, math.ceil(int(rows * side * aspect) / side)


def idefics_images(model: ModelConfig) -> IdeficsImages:
    """The adapter of an Idefics3 or SmolVLM checkpoint."""
    return IdeficsImages(model.vision.pixels, model.vision.square_tokens, videos=model.vision.videos is not None)


def idefics_videos(model: ModelConfig) -> IdeficsVideos:
    """The video adapter of a SmolVLM2 checkpoint."""
    return IdeficsVideos(model.vision.videos, model.vision.square_tokens)
