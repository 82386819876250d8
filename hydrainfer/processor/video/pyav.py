"""Frames decoded by PyAV: from the key frame before a wanted frame up to that frame, once per key frame."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from hydrainfer.processor.video.file import Stopwatch, damaged, frames_of, opened
from hydrainfer.processor.video.source import Keep, VideoSource

_SKIPPING = ("h264", "hevc", "mpeg4", "vp8", "vp9")  # decoders whose skip_frame can change from packet to packet


class PyavDecoder:
    """A `FrameDecoder` that uses PyAV. Every wanted frame is decoded from its own key frame, whatever was decoded
    before, so that the same frame always has the same pixels."""

    def read(self, source: VideoSource, indices: Sequence[int], keep: Keep, watch: Stopwatch) -> None:
        if source.table.counted:
            self._count(source, indices, keep, watch)
            return
        table = source.table
        key_of = np.searchsorted(table.key_pts, table.pts[indices], side="right") - 1
        with opened(source.data, source.kind, source.max_pixels, source.param) as (container, stream):
            at = 0
            for key, group in groupby(key_of.tolist()):
                n = len(list(group))
                wanted = {int(table.pts[i]): at + j for j, i in enumerate(indices[at : at + n])}
                if not self._from_key(container, stream, source, key, wanted, keep, watch):
                    raise damaged(source.param)
                at += n

    def _from_key(
        self,
        container: Any,
        stream: Any,
        source: VideoSource,
        key: int,
        wanted: dict[int, int],
        keep: Keep,
        watch: Stopwatch,
    ) -> bool:
        """Decode from a key frame on. Returns whether every frame of `wanted` (pts → number) was decoded."""
        last, context = max(wanted), stream.codec_context
        left = dict(wanted)
        for packet in _packets_from(container, stream, source, key, watch):
            if source.codec in _SKIPPING:  # frames that are neither wanted nor a reference are not decoded
                context.skip_frame = "DEFAULT" if packet.pts is None or packet.pts in left else "NONREF"
            for frame in packet.decode():
                number = left.pop(frame.pts, None)
                if number is not None:
                    keep(number, upright(frame, source))
                elif frame.pts is not None and frame.pts > last:
                    return not left
            if not left:
                return True
        return not left

    def _count(self, source: VideoSource, indices: Sequence[int], keep: Keep, watch: Stopwatch) -> None:
        """Decode from the start. Frame i is the i-th that the decoder returns."""
        numbers = {index: number for number, index in enumerate(indices)}
        n_left = len(numbers)
        with opened(source.data, source.kind, source.max_pixels, source.param) as (container, stream):
            for i, frame in enumerate(frames_of(container, stream, watch, source.param)):
                if i in numbers:
                    keep(numbers[i], upright(frame, source))
                    n_left -= 1
                    if not n_left:
                        return
        raise damaged(source.param)


def upright(frame: Any, source: VideoSource) -> np.ndarray:
    """The frame, upright, as [height, width, 3] uint8. It has the size of the first frame even if the size changes
    within the file."""
    facts = source.facts
    width, height = (facts.height, facts.width) if source.turns % 2 else (facts.width, facts.height)
    array = frame.to_ndarray(format="rgb24", width=width, height=height)
    array = np.rot90(array, source.turns) if source.turns else array
    return array[:, ::-1] if source.mirrored else array


def _packets_from(container: Any, stream: Any, source: VideoSource, key: int, watch: Stopwatch) -> Iterator[Any]:
    """The packets from key frame `key` on, and a last empty one that flushes the decoder. If the container's index
    leads past the key frame, the search starts at the beginning of the file."""
    at_pts = int(source.table.key_pts[key])
    for seek_to in (int(source.table.key_seek[key]), int(source.table.key_seek[0])):
        container.seek(seek_to, stream=stream, backward=True)
        found = False
        for packet in container.demux(stream):
            watch.check(source.param)
            found = found or (packet.is_keyframe and packet.pts == at_pts)
            if found:
                yield packet
            elif packet.is_keyframe and packet.pts is not None and packet.pts > at_pts:
                break
        if found:
            return
    raise damaged(source.param)
