"""Pictures and videos of towers that take as many patches as fit a number of tokens, as Gemma 4's: sizes as in
`Gemma4ImageProcessorPil`, frames as in `Gemma4VideoProcessor`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from hydrainfer.checkpoint import BUDGETS, BudgetSettings, BudgetVideoSettings, ModelConfig
from hydrainfer.processor.pictures.adapter import (
    FPS,
    FRAME_OPTIONS,
    ImageAdapter,
    MediaItem,
    VideoAdapter,
    VideoShape,
    given_options,
    n_sampled,
    wrong_option,
)
from hydrainfer.processor.pictures.media import Picture, ResizeTarget
from hydrainfer.processor.pictures.pixels import Pixels


class BudgetOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A request's `mm_processor_kwargs`, checked. `max_soft_tokens`: of a picture, and of a frame."""

    max_soft_tokens: int | None = None
    num_frames: int | None = None
    fps: float | None = None

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> BudgetOptions:
        """The checked options of a request. Raises `InvalidRequest` naming the wrong option, and the known ones."""
        values = given_options(given, ("max_soft_tokens", *FRAME_OPTIONS))
        budget = values.get("max_soft_tokens")
        if budget is not None and (type(budget) is not int or budget not in BUDGETS):
            raise wrong_option(f"max_soft_tokens must be one of {', '.join(map(str, BUDGETS))}")
        return cls(**values)


class BudgetImages:
    """An `ImageAdapter` that keeps a picture's aspect ratio: both sides are rounded down to multiples of a token's
    side. `whole`: all tokens of a picture see each other."""

    def __init__(self, settings: BudgetSettings, *, whole: bool = False) -> None:
        self.settings = settings
        self.parameters = b"budget|" + msgspec.json.encode(settings)
        self._whole = whole

    def configured(self, options: Mapping[str, Any]) -> ImageAdapter:
        budget = BudgetOptions.read(options).max_soft_tokens
        if budget is None:
            return self
        return BudgetImages(msgspec.structs.replace(self.settings, budget=budget), whole=self._whole)

    def fit(self, width: int, height: int) -> MediaItem:
        h, w = _target(width, height, self.settings)
        return MediaItem(h * w, (1, h, w), whole=self._whole)

    def pixels(self, picture: Picture) -> Pixels:
        """The resized picture, uint8 [1, height, width, 3]."""
        return picture.resized(self.resized(*picture.size))[None]

    def resized(self, width: int, height: int) -> ResizeTarget:
        return _resized(width, height, self.settings)


class BudgetVideos:
    """A `VideoAdapter` that makes a picture of each frame, with its time as text before it."""

    def __init__(self, settings: BudgetVideoSettings, *, whole: bool = False) -> None:
        self.settings = settings
        content = msgspec.structs.replace(settings.frames, budget=0)  # it decides only the size
        self.parameters = b"budget video|" + msgspec.json.encode(content)
        self.options = msgspec.json.encode(settings)
        self._whole = whole

    def configured(self, options: Mapping[str, Any]) -> VideoAdapter:
        given, s = BudgetOptions.read(options), self.settings
        if given.max_soft_tokens is not None:
            frames = msgspec.structs.replace(s.frames, budget=given.max_soft_tokens)
            s = msgspec.structs.replace(s, frames=frames)
        if given.num_frames is not None or given.fps is not None:
            s = msgspec.structs.replace(s, num_frames=given.num_frames, fps=given.fps)
        return BudgetVideos(s, whole=self._whole)

    def sample(self, video: VideoShape, max_frames: int) -> list[int]:
        total, n = video.n_frames, n_sampled(video, self.settings.num_frames, self.settings.fps, max_frames)
        return [i * total // n for i in range(n)]

    def items(self, video: VideoShape, indices: Sequence[int]) -> list[MediaItem]:
        s = self.settings
        h, w = _target(video.width, video.height, s.frames)
        seconds = [int(i / (video.fps or FPS)) for i in indices]
        texts = [f"{t // 60:02d}:{t % 60:02d} {s.start}" for t in seconds]
        before = [texts[0], *(f" {text}" for text in texts[1:])]
        return [MediaItem(h * w, (1, h, w), before=text, after=s.end, whole=self._whole) for text in before]

    def resized(self, video: VideoShape, n_frames: int) -> ResizeTarget:  # noqa: ARG002  # each frame has its budget
        return _resized(video.width, video.height, self.settings.frames)

    def pixels(self, video: VideoShape, frames: np.ndarray) -> list[Pixels]:  # noqa: ARG002
        return list(frames[:, None])


def budget_images(model: ModelConfig) -> BudgetImages:
    """The adapter of a Gemma 4 checkpoint."""
    return BudgetImages(model.vision.pixels, whole=bool(model.sees_whole))


def budget_videos(model: ModelConfig, start: str, end: str) -> BudgetVideos:
    """The video adapter of a Gemma 4 checkpoint. `start` and `end` are the texts around each frame."""
    settings = msgspec.structs.replace(model.vision.videos, start=start, end=end)
    return BudgetVideos(settings, whole=bool(model.sees_whole))


def _target(width: int, height: int, s: BudgetSettings) -> tuple[int, int]:
    """(rows, columns) in tokens: the most that keep the aspect ratio, rounded down. Of a picture so narrow that no row
    or column fits, one is taken, and its ratio of sides in the other direction."""
    grow = math.sqrt(s.budget * s.factor**2 / (height * width))
    rows, columns = (math.floor(grow * n / s.factor) for n in (height, width))
    if rows == 0:
        return 1, min(width // height, s.budget)
    if columns == 0:
        return min(height // width, s.budget), 1
    return rows, columns


def _resized(width: int, height: int, s: BudgetSettings) -> ResizeTarget:
    h, w = _target(width, height, s)
    return ResizeTarget(w * s.factor, h * s.factor, s.resample, s.backend)
