"""The preparation of one picture or video, from its bytes to pixels that can be encoded. This is the part that takes
time. Knows nothing of requests."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from PIL import Image

from hydrainfer.core import InvalidRequest
from hydrainfer.processor.messages import ImagePart, VideoPart, VideoReading
from hydrainfer.processor.pictures import (
    ImageAdapter,
    MediaItem,
    MediaLimits,
    Pixels,
    ResizeTarget,
    VideoAdapter,
    VideoShape,
    content_key,
    frames_key,
)
from hydrainfer.processor.video import FrameSize


class Seal(NamedTuple):
    """The parts of an embedding's key that are the same for all pictures: the fingerprint of the model and the dtype of
    the embeddings."""

    weights: bytes
    dtype: str


class Encodable(NamedTuple):
    """Pixels ready to be encoded. `key` is the key of their embedding."""

    item: MediaItem
    key: bytes
    pixels: Pixels


def prepare_image(part: ImagePart, adapter: ImageAdapter, limits: MediaLimits, seal: Seal) -> tuple[Encodable, ...]:
    """The pixels of a picture, as one `Encodable`. Raises `MediaError`, `InvalidRequest` or `RequestTooLarge`."""
    wanted = adapter.resized if isinstance(adapter, Resizing) else None
    picture = part.load(limits, wanted)
    item = adapter.fit(*picture.size)
    pixels = adapter.pixels(picture)
    parameters = adapter.parameters + (b"|fast-jpeg" if limits.fast_jpeg else b"") + (b"|dali" if limits.dali else b"")
    return (Encodable(item, content_key(picture, pixels, parameters, *seal), pixels),)


@runtime_checkable
class Resizing(Protocol):
    """An adapter that resizes a picture only once. It may be given a picture that the decoder has made smaller
    (`Picture.full`), but not smaller than the target size."""

    def resized(self, width: int, height: int) -> ResizeTarget:
        """The target size and filter for a picture of this size."""


def prepare_video(
    part: VideoPart, adapter: VideoAdapter, reading: VideoReading, seal: Seal, max_frames: int
) -> tuple[Encodable, ...]:
    """The pixels of at most `max_frames` frames of a video. Raises `MediaError`, `InvalidRequest`, `RequestTooLarge` or
    `DeadlineExceeded`."""
    video = part.open(reading)
    indices = chosen_frames(video.shape, adapter, max_frames)
    items = adapter.items(video.shape, indices)
    target = adapter.resized(video.shape, len(indices))

    def made(frame: np.ndarray) -> np.ndarray:
        return target.resized(Image.fromarray(frame), library=reading.resampler)

    arrays = adapter.pixels(video.shape, video.read(indices, FrameSize(target.width, target.height, made)))
    return tuple(
        Encodable(item, frames_key(pixels, item.n_tokens, adapter.parameters, *seal), pixels)
        for item, pixels in zip(items, arrays, strict=True)
    )


def chosen_frames(video: VideoShape, adapter: VideoAdapter, max_frames: int) -> list[int]:
    """The frames to read: the adapter's sample, or all if the caller has sampled them. Raises `InvalidRequest` if these
    are too many."""
    if not video.sampled:
        return adapter.sample(video, max_frames)
    if video.n_frames > max_frames:
        raise InvalidRequest(
            f"a video of {video.n_frames} frames, where {max_frames} are left of what a request may have",
            param="messages",
        )
    return list(range(video.n_frames))
