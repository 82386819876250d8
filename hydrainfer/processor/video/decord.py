"""Frames decoded by decord (the `video` extra), for trusted files only.

decord bundles an FFmpeg of 2021. Damaged files that PyAV refuses can end the whole process (a segmentation fault after
a few hundred random damages). A server that accepts videos from outside must not use it.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import decord

from hydrainfer.processor.video.file import Stopwatch, damaged
from hydrainfer.processor.video.pyav import PyavDecoder
from hydrainfer.processor.video.source import Keep, VideoSource

_CODECS = ("h264", "vp8", "vp9")  # for H.265 and MPEG-4 decord returns neighbouring frames after a seek
_AT_ONCE = 4  # frames between two checks of the time limit


class DecordDecoder:
    """A `FrameDecoder` that uses decord. Files that decord cannot read, does not read exactly or numbers differently
    are left to PyAV."""

    def read(self, source: VideoSource, indices: Sequence[int], keep: Keep, watch: Stopwatch) -> None:
        table = source.table
        shifted = table.open_groups or table.counted or table.hides_frames
        exact = source.codec in _CODECS and not (shifted or source.turns or source.mirrored)
        reader = _open(source) if exact else None
        if reader is None:
            PyavDecoder().read(source, indices, keep, watch)
            return
        for at in range(0, len(indices), _AT_ONCE):
            watch.check(source.param)
            try:
                frames = reader.get_batch(list(indices[at : at + _AT_ONCE])).asnumpy()
            except (decord.DECORDError, ValueError, IndexError, RuntimeError):
                raise damaged(source.param) from None
            for i, frame in enumerate(frames, at):
                keep(i, frame)


def _open(source: VideoSource) -> decord.VideoReader | None:
    decord.logging.set_level(decord.logging.QUIET)  # silences the messages of decord's FFmpeg
    try:
        reader = decord.VideoReader(io.BytesIO(source.data), ctx=decord.cpu(0), num_threads=1)
        same = len(reader) == source.facts.n_frames
    except (decord.DECORDError, RuntimeError):
        return None
    return reader if same else None
