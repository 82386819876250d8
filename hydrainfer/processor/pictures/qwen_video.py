"""Videos for Qwen2-VL, Qwen2.5-VL and Qwen3-VL: which frames, how large, and at which times, as in their processors.

    frames of a file -> sampled -> resized -> pairs (temporal patches), each a grid of tokens of its own

Qwen2-VL numbers the pairs, Qwen2.5-VL gives each its position in time, and both encode several pairs together.
Qwen3-VL's prompt has the time of each pair as text before the pair. Frames that the caller has sampled are all used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import msgspec
import numpy as np

from hydrainfer.checkpoint import ModelConfig, PixelBounds, QwenVideoSettings
from hydrainfer.processor.pictures.adapter import FPS, MediaItem, VideoShape
from hydrainfer.processor.pictures.media import ResizeTarget
from hydrainfer.processor.pictures.pixels import Pixels
from hydrainfer.processor.pictures.qwen import KNOWN, QwenOptions, resize_in_time, smart_resize

_JOINED_TOKENS = 1024  # maximum tokens of pairs that are encoded together; a single pair may have more


class QwenVideos:
    """The `VideoAdapter` of the three families."""

    def __init__(self, settings: QwenVideoSettings, limit: int | None = None) -> None:
        """`limit` is the highest number of pixels that a request may ask for."""
        self.settings = settings
        self._limit = limit or settings.frames.bounds.most
        content = msgspec.structs.replace(settings.frames, bounds=PixelBounds(0, 0))  # they decide only the size
        self.parameters = b"qwen video|" + msgspec.json.encode(content)
        self.options = msgspec.json.encode(settings)

    @property
    def known(self) -> Sequence[str]:
        """The options that a request may have."""
        return KNOWN

    def configured(self, options: Mapping[str, Any]) -> Self:
        if not options:
            return self
        given, s = QwenOptions.read(options, self.known), self.settings
        if s.frames.in_time:  # its bounds are for a whole video, min_pixels and max_pixels for a picture
            given = msgspec.structs.replace(given, min_pixels=None, max_pixels=None)
        frames, changed = s.frames, {}
        if given.size or given.min_pixels or given.max_pixels:
            frames = msgspec.structs.replace(frames, bounds=given.bounds(frames.bounds, self._limit, frames.factor))
        if given.fps:
            changed = {"fps": float(given.fps), "num_frames": None}
        if given.num_frames:
            changed = {"num_frames": given.num_frames}
        settings = msgspec.structs.replace(s, frames=frames, max_frames=given.max_frames or s.max_frames, **changed)
        return type(self)(settings, self._limit)

    def sample(self, video: VideoShape, max_frames: int) -> list[int]:
        s, total, rate = self.settings, video.n_frames, video.fps or FPS
        most = min(s.max_frames, max_frames)
        pair = s.frames.temporal
        if s.times == "told":
            n = s.num_frames or max(int(total / rate * s.fps), s.min_frames)
            return np.linspace(0, total - 1, max(1, min(n, most, total))).round().astype(int).tolist()
        if s.num_frames:
            wanted = float(min(round(s.num_frames / pair) * pair, most, total))
        else:
            wanted = min(max(total / rate * s.fps, s.min_frames), math.floor(min(most, total) / pair) * pair, total)
        n = math.floor(wanted / pair) * pair
        if n < 1:
            return [0]
        step = total / n
        return (
            np.minimum((np.arange(math.ceil(total / step)) * step).astype(np.float32), total - 1).astype(int).tolist()
        )

    def items(self, video: VideoShape, indices: Sequence[int]) -> list[MediaItem]:
        s, pair = self.settings, self.settings.frames.temporal
        h, w = self._target(video, len(indices))
        n_pairs = -(-len(indices) // pair)
        if s.times == "told":
            return [MediaItem(h * w, (1, h, w), before=b, after=a) for b, a in self._around(video, indices)]
        at = self._positions(video, len(indices), n_pairs)
        group = self._group(h * w)
        return [
            MediaItem(len(at[i : i + group]) * h * w, (len(at[i : i + group]), h, w), tuple(at[i : i + group]), i > 0)
            for i in range(0, n_pairs, group)
        ]

    def resized(self, video: VideoShape, n_frames: int) -> ResizeTarget:
        s = self.settings.frames
        h, w = self._target(video, n_frames)
        return ResizeTarget(w * s.factor, h * s.factor, s.resample, s.backend)

    def pixels(self, video: VideoShape, frames: np.ndarray) -> list[Pixels]:
        pair = self.settings.frames.temporal
        h, w = self._target(video, len(frames))
        n_pairs = -(-len(frames) // pair)
        group = 1 if self.settings.times == "told" else self._group(h * w)
        found = []
        for i in range(0, n_pairs, group):
            n = min(group, n_pairs - i) * pair
            some = frames[i * pair : i * pair + n]
            out = np.empty((n, *some.shape[1:]), np.uint8)  # [frames, height, width, rgb]
            out[: len(some)] = some
            out[len(some) :] = out[len(some) - 1]  # an odd last frame is repeated to make a pair
            found.append(out)
        return found

    def _group(self, n_tokens: int) -> int:
        return max(1, _JOINED_TOKENS // n_tokens)

    def _around(self, video: VideoShape, indices: Sequence[int]) -> list[tuple[str, str]]:
        """The texts before and after each pair: the time of its middle stands before it."""
        s, pair = self.settings, self.settings.frames.temporal
        at = [i / (video.fps or FPS) for i in indices]
        at += [at[-1]] * (-len(at) % pair)
        middles = [(at[i] + at[i + pair - 1]) / 2 for i in range(0, len(at), pair)]
        return [(f"<{t:.1f} seconds>{s.start}", s.end) for t in middles]

    def _positions(self, video: VideoShape, n_frames: int, n_pairs: int) -> list[int]:
        """The position in time of each pair, computed in float32 and truncated as in transformers."""
        s = self.settings
        if s.times == "counted":
            return list(range(n_pairs))
        rate = video.fps or FPS
        sampled = rate if video.sampled else n_frames / video.n_frames * rate
        interval = np.float32(s.tokens_per_second) * np.float32(s.frames.temporal / sampled)
        return (np.arange(n_pairs).astype(np.float32) * interval).astype(int).tolist()

    def _target(self, video: VideoShape, n_frames: int) -> tuple[int, int]:
        """(rows, columns) of a frame in tokens."""
        s, bounds, factor = self.settings, self.settings.frames.bounds, self.settings.frames.factor
        pair = s.frames.temporal
        if not s.frames.in_time:
            if s.shared:
                total = int(s.max_tokens * factor * factor * 0.9)
                most = max(min(bounds.most, total * pair // n_frames), int(bounds.least * 1.05))
                bounds = PixelBounds(bounds.least, most)
            return smart_resize(video.height, video.width, factor, bounds)
        n = max(n_frames, pair)
        if s.shared:
            each = max(min(s.max_tokens * factor * factor, bounds.most // n), int(bounds.least * 1.05))
            bounds = PixelBounds(bounds.least, each * n)
        return resize_in_time(n, video.height, video.width, msgspec.structs.replace(s.frames, bounds=bounds))


def qwen_videos(model: ModelConfig, start: str, end: str) -> QwenVideos:
    """The adapter of a checkpoint of one of the three families. `start` and `end` are the texts around each frame
    pair."""
    return QwenVideos(msgspec.structs.replace(model.vision.videos, start=start, end=end))
