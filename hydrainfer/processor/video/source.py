"""What a backend is given to decode frames, and what a backend is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from hydrainfer.processor.video.file import FrameTable, Stopwatch


class VideoFacts(NamedTuple):
    """The facts of a video. `fps`: frames per second, the average if the rate varies. `width`, `height`: of upright
    frames, in pixels."""

    n_frames: int
    fps: float
    width: int
    height: int
    duration_s: float


class VideoSource(NamedTuple):
    """A checked video file. `kind`, `codec`: FFmpeg's names of container and decoder. `turns`: number of
    counter-clockwise quarter turns that make a stored frame upright; `mirrored`: it is then exchanged left to right."""

    data: bytes
    kind: str
    codec: str
    table: FrameTable
    facts: VideoFacts
    turns: int
    mirrored: bool
    max_pixels: int
    param: str


class FrameSize(NamedTuple):
    """The size in which frames are kept. `resized` gives a frame ([height, width, 3] uint8) this size. It may be called
    from several threads at once."""

    width: int
    height: int
    resized: Callable[[np.ndarray], np.ndarray]


Keep = Callable[[int, np.ndarray], None]
"""Takes the number of a frame among those asked for, and the frame, [height, width, 3] uint8."""


class FrameDecoder(Protocol):
    """A backend that decodes frames of a checked file."""

    def read(self, source: VideoSource, indices: Sequence[int], keep: Keep, watch: Stopwatch) -> None:
        """Call `keep(i, frame)` for frame `indices[i]`, in any order. `indices` ascend. May be called from several
        threads at once. A frame does not depend on which others are asked for. Raises `MediaError` or
        `DeadlineExceeded`."""
