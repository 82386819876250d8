"""Videos as single frames, each one square of the tower, for InternVL and LLaVA-OneVision: which frames, and how they
stand in a prompt, as in their processors. Frames that the caller has sampled are all used."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from hydrainfer.checkpoint import ModelConfig, SquareVideoSettings
from hydrainfer.families.llava import FRAME, LAST_FRAME, AnyresConfig
from hydrainfer.processor.pictures.adapter import (
    FRAME_OPTIONS,
    MediaItem,
    VideoAdapter,
    VideoShape,
    given_options,
    n_sampled,
)
from hydrainfer.processor.pictures.media import ResizeTarget
from hydrainfer.processor.pictures.pixels import Pixels
from hydrainfer.processor.pictures.tiles import TILE_OPTIONS


class SquareVideos:
    """The `VideoAdapter` of both families."""

    def __init__(
        self,
        settings: SquareVideoSettings,
        side: int,
        item: Callable[[int, int], MediaItem],
        known: Sequence[str] = FRAME_OPTIONS,
    ) -> None:
        """`side`: of the tower's square, in pixels. `item(i, n)`: frame `i` of `n` in a prompt. `known`: the options
        that a request may have, also those of its pictures."""
        self.settings = settings
        self.parameters = b"square video|" + msgspec.json.encode(settings.frames)
        self.options = msgspec.json.encode(settings)
        self._side, self._item, self._known = side, item, known

    def configured(self, options: Mapping[str, Any]) -> VideoAdapter:
        values = given_options(options, self._known)
        n, fps = (values.get(name) for name in FRAME_OPTIONS)
        if n is None and fps is None:
            return self
        settings = msgspec.structs.replace(self.settings, num_frames=n, fps=fps)
        return SquareVideos(settings, self._side, self._item, self._known)

    def sample(self, video: VideoShape, max_frames: int) -> list[int]:
        s, total = self.settings, video.n_frames
        n = n_sampled(video, s.num_frames, s.fps, max_frames)
        if s.shift == "none":
            return [i * total // n for i in range(n)]
        step = total / n
        first = step / 2 if s.shift == "half" else s.shift
        at = first + np.arange(math.ceil((total - first) / step)) * step
        found = at.astype(np.float32).astype(int)  # rounded and truncated as in transformers
        return found[found < total].tolist() or [total - 1]

    def items(self, video: VideoShape, indices: Sequence[int]) -> list[MediaItem]:  # noqa: ARG002
        return [self._item(i, len(indices)) for i in range(len(indices))]

    def resized(self, video: VideoShape, n_frames: int) -> ResizeTarget:  # noqa: ARG002  # one size for all
        frames = self.settings.frames
        return ResizeTarget(self._side, self._side, frames.resample, frames.backend)

    def pixels(self, video: VideoShape, frames: np.ndarray) -> list[Pixels]:  # noqa: ARG002
        return list(frames[:, None])


def onevision_videos(model: ModelConfig) -> SquareVideos:
    """The video adapter of a LLaVA-OneVision checkpoint."""
    c: AnyresConfig = model.vision
    assert c.videos is not None
    return SquareVideos(c.videos, c.tower.image_size, partial(_in_a_row, c.frame_side**2))


def internvl_videos(model: ModelConfig) -> SquareVideos:
    """The video adapter of an InternVL checkpoint."""
    tower = model.vision
    return SquareVideos(tower.videos, tower.image_size, partial(_numbered, tower.square_tokens), TILE_OPTIONS)


def _in_a_row(n_tokens: int, i: int, n: int) -> MediaItem:
    """A frame that follows the one before it at once. The last has a newline."""
    last = i == n - 1
    return MediaItem(n_tokens + last, LAST_FRAME if last else FRAME, joined=i > 0)


def _numbered(n_tokens: int, i: int, n: int) -> MediaItem:  # noqa: ARG001
    """A picture with the frame's number before it, in a line of its own. `Family.video_mark` has that of the first."""
    name = f"\nFrame{i + 1}: " if i else ""
    return MediaItem(n_tokens, before=f"{name}<img>", after="</img>")
