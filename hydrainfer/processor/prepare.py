"""One picture, from bytes to what is encoded: the part of preparing a request that takes time. Knows no request."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from hydrainfer.processor.adapter import ImageAdapter, MediaItem, content_key
from hydrainfer.processor.media import MediaLimits, Size
from hydrainfer.processor.messages import ImagePart
from hydrainfer.processor.pixels import Pixels


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
    item = adapter.fit(picture.image.width, picture.image.height)
    pixels = adapter.pixels(picture)
    parameters = adapter.parameters + (b"|fast-jpeg" if limits.fast_jpeg else b"")
    return (Encodable(item, content_key(picture, pixels, parameters, *seal), pixels),)


@runtime_checkable
class Resizing(Protocol):
    """An adapter whose `fit` and `pixels` may be given a smaller picture than the client sent, if not smaller than
    this; one that derives its grid from the size may not."""

    def resized(self, width: int, height: int) -> Size:
        """Width and height that a picture of this size is resized to."""
