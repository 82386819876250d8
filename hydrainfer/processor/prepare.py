"""One picture or video, from bytes to what is encoded: the part of preparing a request that takes time. Knows no
request."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from hydrainfer.core import InvalidRequest
from hydrainfer.processor.adapter import (
    ImageAdapter,
    MediaItem,
    VideoAdapter,
    VideoShape,
    content_key,
    frames_key,
)
from hydrainfer.processor.media import MediaLimits, Target
from hydrainfer.processor.messages import ImagePart
from hydrainfer.processor.pixels import Pixels
from hydrainfer.processor.video_part import VideoPart, VideoReading


class Seal(NamedTuple):
    """What besides a picture decides its embedding: fingerprint of the vision weights, dtype of the embeddings."""

    weights: bytes
    dtype: str


class Encodable(NamedTuple):
    """`key` names its embedding."""

    item: MediaItem
    key: bytes
    pixels: Pixels


def prepare_image(part: ImagePart, adapter: ImageAdapter, limits: MediaLimits, seal: Seal) -> tuple[Encodable, ...]:
    """Raises `MediaError`, `InvalidRequest` or `RequestTooLarge`."""
    wanted = adapter.resized if isinstance(adapter, Resizing) else None
    picture = part.load(limits, wanted)
    item = adapter.fit(*picture.size)
    pixels = adapter.pixels(picture)
    parameters = adapter.parameters + (b"|fast-jpeg" if limits.fast_jpeg else b"") + (b"|dali" if limits.dali else b"")
    return (Encodable(item, content_key(picture, pixels, parameters, *seal), pixels),)


@runtime_checkable
class Resizing(Protocol):
    """An adapter that resizes a picture once, and may be given a smaller one (`Picture.full`) if not smaller than
    this."""

    def resized(self, width: int, height: int) -> Target:
        """What a picture of this size is resized to."""


def prepare_video(
    part: VideoPart, adapter: VideoAdapter, reading: VideoReading, seal: Seal, max_frames: int
) -> tuple[Encodable, ...]:
    """At most `max_frames` of its frames. Raises `MediaError`, `InvalidRequest`, `RequestTooLarge` or
    `DeadlineExceeded`."""
    video = part.open(reading)
    indices = chosen_frames(video.shape, adapter, max_frames)
    items = adapter.items(video.shape, indices)
    arrays = adapter.pixels(video.shape, video.read(indices), reading.resampler)
    return tuple(
        Encodable(item, frames_key(pixels, adapter.parameters, *seal), pixels)
        for item, pixels in zip(items, arrays, strict=True)
    )


def chosen_frames(video: VideoShape, adapter: VideoAdapter, max_frames: int) -> list[int]:
    """All, if the caller has sampled them. Raises `InvalidRequest` if these are too many."""
    if not video.sampled:
        return adapter.sample(video, max_frames)
    if video.n_frames > max_frames:
        raise InvalidRequest(
            f"a video of {video.n_frames} frames, where {max_frames} are left of what a request may have",
            param="messages",
        )
    return list(range(video.n_frames))
