"""Small videos made here, whose frames differ from each other and from themselves turned."""

import io
import struct

import av
import numpy as np
import pytest

H264 = {"g": "7", "bf": "2"}


def picture(i, width, height):
    """A gradient with a block that moves and a bar that grows: no two of a video are alike."""
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    image = np.stack([x * 2 % 256, y * 3 % 256, np.full_like(x, i * 5 % 256)], -1).astype(np.uint8)
    left, top = i * 3 % (width - 12), i * 2 % (height - 12)
    image[top : top + 12, left : left + 12] = (255, 255 - i % 256, 30)
    image[:4, : 1 + i % width] = 255
    return image


def make_video(
    codec="libx264", kind="mp4", n=40, size=(96, 64), rate=10, options=None, pts=None, sound=False, movflags=""
):
    """`pts`: of each frame, in units of `1 / rate` s."""
    if codec not in av.codecs_available:
        pytest.skip(f"this PyAV cannot write {codec}")
    out = io.BytesIO()
    with av.open(out, "w", format=kind, options={"movflags": movflags} if movflags else {}) as container:
        stream = container.add_stream(codec, rate=rate, options=H264 if options is None else options)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        audio = _sound_stream(container) if sound else None
        for i in range(n):
            frame = av.VideoFrame.from_ndarray(picture(i, *size), format="rgb24")
            frame.pts = i if pts is None else pts[i]
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
        if audio is not None:
            _write_sound(container, audio)
    return out.getvalue()


def make_sound(kind="mp4"):
    out = io.BytesIO()
    with av.open(out, "w", format=kind) as container:
        _write_sound(container, _sound_stream(container))
    return out.getvalue()


def _sound_stream(container):
    stream = container.add_stream("aac", rate=8000)
    stream.layout = "mono"
    return stream


def _write_sound(container, stream):
    for i in range(8):
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.rate, frame.pts = 8000, i * 1024
        container.mux(stream.encode(frame))
    container.mux(stream.encode())


def all_frames(data):
    """Every frame, decoded one after the other, as stored."""
    with av.open(io.BytesIO(data)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def turned(data, degrees):
    """An MP4 that says it is shown turned clockwise."""
    cos, sin = {0: (1, 0), 90: (0, 1), 180: (-1, 0), 270: (0, -1)}[degrees]
    at = data.index(b"tkhd") + 44
    matrix = (cos, sin, 0, -sin, cos, 0, 0, 0)
    return data[:at] + struct.pack(">8i", *(v << 16 for v in matrix)) + data[at + 32 :]


def with_duration(matroska, duration_ms):
    """A Matroska file whose header says this."""
    at = matroska.index(b"\x44\x89\x88") + 3
    return matroska[:at] + struct.pack(">d", duration_ms) + matroska[at + 8 :]
