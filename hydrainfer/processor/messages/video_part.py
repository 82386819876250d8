"""A video of a message: its source, and its frames by index."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from hydrainfer.core import InvalidRequest, MediaError
from hydrainfer.processor.pictures import VideoShape, read_data_url
from hydrainfer.processor.video import FrameSize, Video, VideoBackend, VideoLimits, open_video


class VideoReading(NamedTuple):
    """The settings for reading video files. `n_decoders` threads decode a part of the frames each; `resampler` is that
    of `MediaLimits`."""

    limits: VideoLimits = VideoLimits()
    n_decoders: int = 1
    backend: VideoBackend = "auto"
    resampler: str = ""


class Frames(Protocol):
    """The frames of a checked video."""

    shape: VideoShape

    def read(self, indices: Sequence[int], size: FrameSize) -> np.ndarray:
        """The resized frames as uint8 [n, height, width, 3]. Raises `MediaError` or `DeadlineExceeded`."""


class VideoPart(msgspec.Struct, frozen=True):
    """A video of a message. `source`: a URL, the file's bytes or, from Python callers only, a path or the frames
    themselves, uint8 [n, height, width, 3], with `fps` frames per second. URLs and `param` are as in `ImagePart`."""

    source: str | bytes | Path | np.ndarray
    param: str
    fps: float = 2.0

    def read(self, reading: VideoReading) -> VideoPart:
        """The same part with the file's bytes in place of a URL or path. Raises `InvalidRequest` or
        `RequestTooLarge`."""
        source = self.source
        if isinstance(source, str):
            source = read_data_url(source, "video", "video/mp4", reading.limits.max_bytes, self.param)
        elif isinstance(source, Path):
            try:
                source = source.read_bytes()
            except OSError as e:
                raise InvalidRequest(f"cannot read the video: {e}", param=self.param) from None
        return VideoPart(source, self.param, self.fps)

    def open(self, reading: VideoReading) -> Frames:
        """The checked video. Raises `MediaError`, `InvalidRequest`, `RequestTooLarge` or `DeadlineExceeded`."""
        source = self.read(reading).source
        if isinstance(source, np.ndarray):
            return _Given(source, self.fps, reading.limits, self.param)
        assert isinstance(source, bytes)
        return _File(open_video(source, reading.limits, backend=reading.backend, param=self.param), reading.n_decoders)


class _File:
    def __init__(self, video: Video, n_decoders: int) -> None:
        facts = video.facts
        self.shape = VideoShape(facts.n_frames, facts.fps, facts.width, facts.height)
        self._video = video
        self._n_decoders = n_decoders

    def read(self, indices: Sequence[int], size: FrameSize) -> np.ndarray:
        return self._video.read(indices, size, n_decoders=self._n_decoders)


class _Given:
    def __init__(self, frames: np.ndarray, fps: float, limits: VideoLimits, param: str) -> None:
        if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3 or not frames.size:
            raise InvalidRequest("frames of a video must be uint8 [frames, height, width, 3]", param=param)
        n, height, width, _ = frames.shape
        if n > limits.max_frames or width * height > limits.max_frame_pixels:
            raise MediaError(
                f"a video of {n} frames of {width} x {height}: at most {limits.max_frames} frames of "
                f"{limits.max_frame_pixels} pixels are allowed",
                param=param,
            )
        self.shape = VideoShape(n, fps, width, height, sampled=True)
        self._frames = frames

    def read(self, indices: Sequence[int], size: FrameSize) -> np.ndarray:
        return np.stack([size.resized(self._frames[i]) for i in indices])
