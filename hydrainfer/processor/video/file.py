"""The facts about a video file that are read before any frame is decoded: container, completeness, the time of each
frame."""

from __future__ import annotations

import io
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import numpy as np

from hydrainfer.core import DeadlineExceeded, MediaError, RequestTooLarge

SUPPORTED = "MP4/MOV, WebM/Matroska and AVI"
DECODERS = ("h264", "hevc", "mpeg4", "vp8", "vp9", "libdav1d", "av1", "mjpeg")
_MOV_BOXES = (b"ftyp", b"moov", b"moof", b"mdat", b"mfra")  # boxes that must be complete
_OLD_QUICKTIME = (b"moov", b"mdat", b"wide", b"free", b"skip")
_EBML, _SEGMENT = b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"
_MAX_FRAMES_PER_S = 250
_TIME_BASE = 1_000_000  # FFmpeg's ticks per second in a container's own duration
_CHECK_EVERY = 256  # packets between two checks of the time limit


class VideoLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits on a video. `max_duration_s` applies to the header's duration and to that of the packets; `max_frames`
    to the frames asked for, `max_total_pixels` to all of these together once resized (3 bytes per pixel). `decode_s`:
    time limit for checking a file and, separately, for each reading of its frames."""

    max_bytes: int = 256 << 20
    max_duration_s: float = 3600.0
    max_frames: int = 768
    max_frame_pixels: int = 4096 * 2304
    max_total_pixels: int = 200_000_000
    decode_s: float = 30.0


class FrameTable(NamedTuple):
    """The times of all frames. `pts`: ticks at which frame i is shown, ascending; `key_pts`, `key_seek`: when each key
    frame is shown and where to seek to for it, in file order. The first key frame may be one that an edit list hides.
    `open_groups`: some frames that are shown before a key frame come after it in the file. `counted`: the file does not
    say when frames are shown, so a frame's number is known only by decoding from the start. `fps`: frames per
    second."""

    pts: np.ndarray  # [frames] int64
    key_pts: np.ndarray  # [keys] int64
    key_seek: np.ndarray  # [keys] int64
    open_groups: bool
    counted: bool
    duration_s: float
    fps: float

    @property
    def hides_frames(self) -> bool:
        """Whether frames before the first one that is shown are needed to decode it."""
        return bool(self.key_pts[0] < self.pts[0])


class Stopwatch:
    """A time limit that the work itself checks."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._end_s = time.monotonic() + limit_s

    def check(self, param: str) -> None:
        """Raise `DeadlineExceeded` if the time is up."""
        if time.monotonic() > self._end_s:
            raise DeadlineExceeded(
                f"the video takes longer than {self.limit_s:g} s to decode", param=param, code="media_timeout"
            )


def sniff(data: bytes, param: str) -> str:
    """FFmpeg's name of the container format, found by the file's first bytes. Raises `MediaError`."""
    if data[4:8] == b"ftyp" or data[4:8] in _OLD_QUICKTIME:
        return "mov"
    if data.startswith(_EBML):
        return "matroska"
    if data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        return "avi"
    what = "empty" if not data else "not a video file, or of another kind"
    raise MediaError(f"the video is {what}; supported formats are {SUPPORTED}", param=param)


def check_bytes(data: bytes, limits: VideoLimits, param: str) -> None:
    """Raise `RequestTooLarge` if the file is over the limit."""
    if len(data) > limits.max_bytes:
        raise RequestTooLarge(
            f"a video of {len(data)} bytes is over the limit of {limits.max_bytes}; send a smaller one", param=param
        )


def check_whole(data: bytes, kind: str, param: str) -> None:
    """Check that the file has the length that its own headers give. Raises `MediaError` if it is shorter."""
    says = {"mov": _mov_size, "matroska": _matroska_size, "avi": _avi_size}[kind](data)
    if says > len(data):
        raise MediaError("the video is cut off: its file is shorter than it says itself", param=param)


@contextmanager
def opened(data: bytes, kind: str, max_pixels: int, param: str) -> Iterator[tuple[Any, Any]]:
    """FFmpeg's container and its video stream, read from memory with one thread and only the allowed decoders. FFmpeg's
    errors within the block become a `MediaError` without FFmpeg's message."""
    import av  # here, since it takes 15 MB in the server and in each worker, and most of them never see a video
    from av.stream import Disposition

    options = {
        "codec_whitelist": ",".join(DECODERS),
        "protocol_whitelist": "none",
        "enable_drefs": "0",
        "max_pixels": str(max_pixels),
    }
    try:
        with av.open(io.BytesIO(data), format=kind, options=options, metadata_errors="ignore") as container:
            streams = [s for s in container.streams.video if not s.disposition & Disposition.attached_pic]
            if not streams:
                raise MediaError("the file has no video track", param=param)
            stream = streams[0]
            context = stream.codec_context
            if context is None or context.name not in DECODERS:
                raise MediaError(
                    "the video's codec is not supported; send H.264, H.265, VP8, VP9, AV1 or MPEG-4", param=param
                )
            context.thread_count = 1
            context.options = {"max_pixels": str(max_pixels)}
            yield container, stream
    except (av.FFmpegError, EOFError, OSError, ValueError, OverflowError):
        raise damaged(param) from None


def damaged(param: str) -> MediaError:
    return MediaError("the video cannot be decoded: it is damaged or cut off", param=param)


def read_table(container: Any, stream: Any, limits: VideoLimits, watch: Stopwatch, param: str) -> FrameTable:
    """The table of frames, made by reading every packet without decoding any. Raises `MediaError` or
    `DeadlineExceeded`."""
    tick_s = float(stream.time_base)
    is_vp8 = stream.codec_context.name == "vp8"
    pts: list[int] = []
    keys: list[tuple[int, int]] = []
    regular, open_groups = container.format.name != "avi", False
    latest, last_s, n_seen, n_hidden = 0, 0.0, 0, 0
    for packet in container.demux(stream):
        n_seen += 1
        if n_seen % _CHECK_EVERY == 0:
            watch.check(param)
        if not packet.size or (is_vp8 and _is_hidden_vp8(packet)):
            continue
        shown = packet.pts if packet.pts is not None else packet.dts
        regular = regular and packet.pts is not None
        shown = shown if shown is not None else len(pts)
        if packet.is_keyframe:
            keys.append((shown, packet.dts if packet.dts is not None else shown))
        elif not keys or (len(keys) == 1 and shown < keys[0][0]):
            continue  # the frames that it refers to are not in the file
        if packet.is_discard:  # decoded and not shown, as an edit list says
            n_hidden += 1
            continue
        open_groups = open_groups or shown < keys[-1][0]
        if not pts or shown > latest:
            latest, last_s = shown, (packet.duration or 0) * tick_s
        pts.append(shown)
        if (shown - pts[0]) * tick_s > limits.max_duration_s or len(pts) > limits.max_duration_s * _MAX_FRAMES_PER_S:
            raise too_long(limits, param)
    if not pts:
        raise MediaError("the video has no frames", param=param)
    if stream.frames > len(pts) + n_hidden + max(2, stream.frames // 100) and regular:
        raise MediaError("the video is cut off: it has fewer frames than it says itself", param=param)
    key_pts = np.array([k for k, _ in keys], np.int64)
    ordered = np.sort(np.array(pts, np.int64))
    regular = regular and bool((np.diff(ordered) > 0).all()) and bool((np.diff(key_pts) > 0).all())
    span_s = float(ordered[-1] - ordered[0]) * tick_s
    last_s = last_s or span_s / max(1, len(pts) - 1)
    key_seek = np.array([s for _, s in keys], np.int64)
    duration_s = span_s + last_s
    fps = _rate(ordered, tick_s, duration_s, float(stream.average_rate or 0))
    return FrameTable(ordered, key_pts, key_seek, open_groups, not regular, duration_s, fps)


def _rate(pts: np.ndarray, tick_s: float, duration_s: float, header_fps: float) -> float:
    """Frames per second: the rate of the file's header, which is exact where times are rounded, if all frames are shown
    at this rate; otherwise the average of the frames."""
    if header_fps > 0:
        drift_s = (pts - pts[0]) * tick_s - np.arange(len(pts)) / header_fps
        if np.ptp(drift_s) <= 1.01 * tick_s:
            return header_fps
    return len(pts) / duration_s if duration_s > 0 else header_fps or 1.0


def frames_of(container: Any, stream: Any, watch: Stopwatch, param: str) -> Iterator[Any]:
    """All frames from the current position on, decoded. Raises `DeadlineExceeded`, also while packets give no
    frames."""
    for packet in container.demux(stream):
        watch.check(param)
        yield from packet.decode()


def header_duration_s(container: Any, stream: Any) -> float:
    """The longest duration that the header gives, 0 if it gives none."""
    own = (stream.duration or 0) * float(stream.time_base)
    return max(own, (container.duration or 0) / _TIME_BASE)


def too_long(limits: VideoLimits, param: str) -> MediaError:
    return MediaError(f"the video is longer than the limit of {limits.max_duration_s:g} s", param=param)


def _is_hidden_vp8(packet: Any) -> bool:
    """Whether this frame only serves as a reference for others and is never shown (RFC 6386, 9.1: the show_frame
    bit)."""
    return not memoryview(packet)[0] & 0x10


def _mov_size(data: bytes) -> int:
    """The end of the last top-level box that must be complete. A box without a size reaches to the end of the file."""
    at = 0
    while at + 8 <= len(data):
        size, box = struct.unpack_from(">I4s", data, at)
        if size == 1 and at + 16 <= len(data):
            (size,) = struct.unpack_from(">Q", data, at + 8)
        if size < 8 or (at + size > len(data) and box not in _MOV_BOXES):
            return len(data)
        at += size
    return at


def _matroska_size(data: bytes) -> int:
    """The end of the segment, if the file gives one."""
    at = 4
    size, at = _ebml_number(data, at)
    at += size
    if data[at : at + 4] != _SEGMENT:
        return 0
    size, at = _ebml_number(data, at + 4)
    return at + size


def _ebml_number(data: bytes, at: int) -> tuple[int, int]:
    """A length at position `at`, and the position after it. An unknown length is 0."""
    first = data[at] if at < len(data) else 0
    n = 9 - first.bit_length()
    if n > 8 or at + n > len(data):
        return 0, at
    value = int.from_bytes(data[at : at + n], "big") & ((1 << 7 * n) - 1)
    return (0 if value == (1 << 7 * n) - 1 else value), at + n


def _avi_size(data: bytes) -> int:
    return 8 + int(struct.unpack_from("<I", data, 4)[0])
