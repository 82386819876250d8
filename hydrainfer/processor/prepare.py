"""One picture, from bytes to what is encoded: the part of preparing a request that takes time. Knows no request."""

from __future__ import annotations

from typing import NamedTuple

from hydrainfer.processor.adapter import ImageAdapter, MediaItem, content_key
from hydrainfer.processor.media import MediaLimits
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
    picture = part.load(limits)
    item = adapter.fit(picture.image.width, picture.image.height)
    pixels = adapter.pixels(picture)
    return (Encodable(item, content_key(picture, pixels, adapter.parameters, *seal), pixels),)
