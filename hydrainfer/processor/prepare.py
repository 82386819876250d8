"""One picture or video, from bytes to what is encoded: the part of preparing a request that takes time. Knows no
request."""

from __future__ import annotations

from typing import NamedTuple

from hydrainfer.core import InvalidRequest
from hydrainfer.processor.adapter import (
    ImageAdapter,
    MediaItem,
    VideoAdapter,
    VideoShape,
    content_key,
    frames_key,
)
from hydrainfer.processor.media import MediaLimits
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
    picture = part.load(limits)
    item = adapter.fit(picture.image.width, picture.image.height)
    return (Encodable(item, content_key(picture, adapter.parameters, *seal), adapter.pixels(picture)),)


def prepare_video(
    part: VideoPart, adapter: VideoAdapter, reading: VideoReading, seal: Seal, max_frames: int
) -> tuple[Encodable, ...]:
    """At most `max_frames` of its frames. Raises `MediaError`, `InvalidRequest`, `RequestTooLarge` or
    `DeadlineExceeded`."""
    video = part.open(reading)
    indices = chosen_frames(video.shape, adapter, max_frames)
    items = adapter.items(video.shape, indices)
    arrays = adapter.pixels(video.shape, video.read(indices))
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
