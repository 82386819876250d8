"""Videos for GLM-4.1V to 4.6V and GLM-OCR. In the prompt each frame pair is a picture with its second behind it.

GLM-4.1V and 4.5V take a number of frames per second, and write whole seconds. GLM-4.6V and GLM-OCR decide by the
video's length, and write tenths. As in `Glm4vVideoProcessor` and `Glm46VVideoProcessor`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from hydrainfer.checkpoint import GlmVideoSettings, ModelConfig
from hydrainfer.processor.pictures.adapter import FPS, VideoShape
from hydrainfer.processor.pictures.qwen_video import QwenVideos

_RATES = ((30, 3.0), (300, 1.0), (math.inf, 0.5))
"""For videos of up to so many seconds, the frame pairs per second that GLM-4.6V takes."""
_MOST, _LONGEST_S = 640, 2400
"""The most frames that GLM-4.6V takes, and the seconds of a video that count for their number."""


class GlmVideos(QwenVideos):
    """The `VideoAdapter` of the GLM families."""

    settings: GlmVideoSettings

    @property
    def known(self) -> Sequence[str]:
        bounds = "min_pixels", "max_pixels", "size", "max_frames"
        return (*bounds, "fps") if self.settings.sampler == "glm4v" else bounds

    def sample(self, video: VideoShape, max_frames: int) -> list[int]:
        """The frames, of which the last is repeated if their number is odd."""
        s = self.settings
        frames = self._by_rate(video) if s.sampler == "glm4v" else self._by_length(video)
        found, most = list(dict.fromkeys(frames)), min(s.max_frames, max_frames)
        if len(found) > most:
            found = [found[i] for i in np.linspace(0, len(found) - 1, most).round().astype(int)]
        return found + found[-1:] * (len(found) % 2 and len(found) < max_frames)

    def _by_rate(self, video: VideoShape) -> list[int]:
        s, rate, last = self.settings, video.fps or FPS, video.n_frames - 1
        duration = video.n_frames / rate
        if duration <= s.max_duration:
            at = np.arange(max(math.floor(duration * s.fps), 1)) * rate / s.fps
        elif s.max_duration * s.fps >= video.n_frames:
            return list(range(video.n_frames))
        else:
            at = np.linspace(0, duration, int(s.max_duration * s.fps)) * rate
        return np.minimum(np.ceil(at).astype(int), last).tolist()

    def _by_length(self, video: VideoShape) -> list[int]:
        rate, total = video.fps or FPS, video.n_frames
        duration, pair = total / rate, self.settings.frames.temporal
        counted = min(duration, _LONGEST_S)
        each = next(rate for longest, rate in _RATES if counted <= longest) * pair
        n = max(1, min(int(counted * each), _MOST))
        if total < n:
            return np.linspace(0, total - 1, n, dtype=int).tolist()
        found, due = [], 0.0  # the first frame at or after each multiple of 1 / `each`
        for i in range(total):
            if i * (1 / rate) >= due:
                due += 1 / each
                found.append(i)
                if due >= int(duration):
                    break
        if len(found) == n:
            return found
        end = found[-1] if len(found) < n else total - 1
        return np.linspace(0, end, n, dtype=int).tolist()

    def _around(self, video: VideoShape, indices: Sequence[int]) -> list[tuple[str, str]]:
        s = self.settings
        seconds = [i / (video.fps or FPS) for i in indices[:: s.frames.temporal]]
        return [(s.start, s.end + (f"{int(t)}" if s.sampler == "glm4v" else f"{t:.1f} seconds")) for t in seconds]


def glm_videos(model: ModelConfig, start: str, end: str, *_: str) -> GlmVideos:
    """The adapter of a checkpoint of one of the GLM families. `start` and `end`: the texts around a picture."""
    return GlmVideos(msgspec.structs.replace(model.vision.videos, start=start, end=end))
