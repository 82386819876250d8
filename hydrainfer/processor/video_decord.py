"""Frames by decord (the `video` extra): an old FFmpeg of its own, faster at 720p and above on one thread."""

from __future__ import annotations

import io
from collections.abc import Sequence

import decord
import numpy as np

from hydrainfer.processor.video import Source
from hydrainfer.processor.video_file import Stopwatch, damaged
from hydrainfer.processor.video_pyav import PyavDecoder

_AT_ONCE = 4  # frames between two looks at the clock


class DecordDecoder:
    """A `Decoder`. Where decord numbers the frames differently or cannot read the file, PyAV decodes."""

    def read(self, source: Source, indices: Sequence[int], out: np.ndarray, watch: Stopwatch) -> None:
        reader = None if source.table.counted or source.turns else _open(source)
        if reader is None:
            PyavDecoder().read(source, indices, out, watch)
            return
        for at in range(0, len(indices), _AT_ONCE):
            watch.check(source.param)
            try:
                out[at : at + _AT_ONCE] = reader.get_batch(list(indices[at : at + _AT_ONCE])).asnumpy()
            except (decord.DECORDError, ValueError, IndexError, RuntimeError):
                raise damaged(source.param) from None


def _open(source: Source) -> decord.VideoReader | None:
    try:
        reader = decord.VideoReader(io.BytesIO(source.data), ctx=decord.cpu(0), num_threads=1)
        same = len(reader) == source.facts.n_frames
    except (decord.DECORDError, RuntimeError):
        return None
    return reader if same else None
