"""Videos from clients to RGB frames: the facts of a file, and exactly the frames asked for, within limits."""

from __future__ import annotations

import importlib.util
import math
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np

from hydrainfer.core import ConfigError, MediaError
from hydrainfer.processor.video.file import (
    Stopwatch,
    VideoLimits,
    check_bytes,
    check_whole,
    damaged,
    frames_of,
    header_duration_s,
    opened,
    read_table,
    sniff,
    too_long,
)
from hydrainfer.processor.video.source import FrameDecoder, FrameSize, VideoFacts, VideoSource

VideoBackend = Literal["auto", "pyav", "decord"]


class Video:
    """A checked video file. Holds the file's bytes and a table of its frames, but no decoded frames."""

    def __init__(self, source: VideoSource, limits: VideoLimits, decoder: FrameDecoder) -> None:
        self._source = source
        self._limits = limits
        self._decoder = decoder
        self.facts = source.facts

    def read(self, indices: Sequence[int], size: FrameSize | None = None, *, n_decoders: int = 1) -> np.ndarray:
        """The frames as [n, height, width, 3] uint8, upright, in the order of `indices`. `size`: each frame is resized
        as soon as it is decoded. `n_decoders` threads decode and resize a part of the frames each; the result does not
        depend on their number. Raises `MediaError` or `DeadlineExceeded`."""
        facts, limits, param = self.facts, self._limits, self._source.param
        assert all(0 <= i < facts.n_frames for i in indices), "no such frame"
        if len(indices) > limits.max_frames:
            raise MediaError(
                f"{len(indices)} frames of the video were asked for; at most {limits.max_frames} are allowed",
                param=param,
            )
        wanted, where = np.unique(np.asarray(indices, np.int64), return_inverse=True)
        size = size or FrameSize(facts.width, facts.height, lambda frame: frame)
        n_pixels = len(indices) * size.width * size.height
        if n_pixels > limits.max_total_pixels:
            raise MediaError(
                f"the video's frames take {n_pixels} pixels together in the size that the model sees; at most "
                f"{limits.max_total_pixels} are allowed: send a shorter one, or ask for fewer frames",
                param=param,
            )
        watch = Stopwatch(limits.decode_s)
        out = np.empty((len(wanted), size.height, size.width, 3), np.uint8)  # [frames, height, width, rgb]
        parts = [p for p in np.array_split(np.arange(len(wanted)), max(1, n_decoders)) if len(p)]
        if len(parts) < 2:
            self._read_part(wanted, out, size, watch)
        else:
            with ThreadPoolExecutor(len(parts), "hydra-video") as threads:
                work = [
                    threads.submit(self._read_part, wanted[p[0] : p[-1] + 1], out[p[0] : p[-1] + 1], size, watch)
                    for p in parts
                ]
                for one in work:
                    one.result()
        return out if np.array_equal(where, np.arange(len(wanted))) else out[where]

    def _read_part(self, wanted: np.ndarray, out: np.ndarray, size: FrameSize, watch: Stopwatch) -> None:
        def keep(i: int, frame: np.ndarray) -> None:
            out[i] = size.resized(frame)

        if len(wanted):
            self._decoder.read(self._source, wanted.tolist(), keep, watch)


def open_video(
    data: bytes, limits: VideoLimits | None = None, *, backend: VideoBackend = "auto", param: str = "messages"
) -> Video:
    """Check a file's format, completeness, size and duration, and that its first frame can be decoded. `backend="auto"`
    is PyAV; decord is for trusted files only (see decord.py).

    Raises `MediaError`, whose message never quotes the decoder, `RequestTooLarge`, `DeadlineExceeded`, or `ConfigError`
    if decord is asked for and not installed.
    """
    limits = limits or VideoLimits()
    decoder = _decoder(backend)
    check_bytes(data, limits, param)
    kind = sniff(data, param)
    check_whole(data, kind, param)
    watch = Stopwatch(limits.decode_s)
    with opened(data, kind, limits.max_frame_pixels, param) as (container, stream):
        _check_header(container, stream, limits, param)
        table = read_table(container, stream, limits, watch, param)
    with opened(data, kind, limits.max_frame_pixels, param) as (container, stream):
        first = next(frames_of(container, stream, watch, param), None)
        if first is None:
            raise damaged(param)
        turns, mirrored = _orientation(first)
        width, height = (first.height, first.width) if turns % 2 else (first.width, first.height)
        _check_size(width, height, limits, param)
    n = len(table.pts)
    facts = VideoFacts(n, table.fps, width, height, table.duration_s or n / table.fps)
    codec = stream.codec_context.name
    source = VideoSource(data, kind, codec, table, facts, turns, mirrored, limits.max_frame_pixels, param)
    return Video(source, limits, decoder)


def _orientation(frame: Any) -> tuple[int, bool]:
    """`VideoSource.turns` and `.mirrored` by a frame's display matrix, of whose angle the nearest quarter counts.

    A stored pixel (column, row) is shown at (a * column + c * row, b * column + d * row), from the centre."""
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return 0, False
    a, b, _, c, d = struct.unpack_from("=5i", bytes(matrix))
    mirrored = a * d < b * c
    clockwise = math.atan2(b, -a if mirrored else a) / (math.pi / 2)
    return -round(clockwise) % 4, mirrored


def _decoder(backend: VideoBackend) -> FrameDecoder:
    if backend == "decord":
        if importlib.util.find_spec("decord") is None:
            raise ConfigError("decord is not installed; install hydrainfer[video]", param="video_backend")
        from hydrainfer.processor.video.decord import DecordDecoder

        return DecordDecoder()
    from hydrainfer.processor.video.pyav import PyavDecoder

    return PyavDecoder()


def _check_header(container: object, stream: object, limits: VideoLimits, param: str) -> None:
    if header_duration_s(container, stream) > limits.max_duration_s:
        raise too_long(limits, param)
    context = stream.codec_context  # type: ignore[attr-defined]
    _check_size(context.width, context.height, limits, param)


def _check_size(width: int, height: int, limits: VideoLimits, param: str) -> None:
    if width < 1 or height < 1:
        raise damaged(param)
    if width * height > limits.max_frame_pixels:
        raise MediaError(
            f"the video is {width} x {height}; at most {limits.max_frame_pixels} pixels per frame are allowed",
            param=param,
        )
