"""What a model family wants of a picture: one small adapter each, behind one protocol."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from hydrainfer.core import InvalidRequest
from hydrainfer.processor.media import Picture
from hydrainfer.processor.pixels import Pixels


class MediaItem(NamedTuple):
    """What is encoded at once of a picture or a video: `core.MediaSpan` without its place. `before`, `after`: texts
    around its placeholders."""

    n_tokens: int
    grid: tuple[int, int, int] | None = None
    times: tuple[int, ...] = ()
    joined: bool = False
    before: str = ""
    after: str = ""


class ImageAdapter(Protocol):
    """Stateless, thread-safe, picklable. `parameters`: the resolved preprocessing, as part of a picture's key. `fit`
    needs the size only, so that a prompt's length can be known before any resizing."""

    parameters: bytes

    def configured(self, options: Mapping[str, Any]) -> ImageAdapter:
        """With a request's `mm_processor_kwargs`. Raises `InvalidRequest` naming what it does not know."""

    def fit(self, width: int, height: int) -> MediaItem:
        """Tokens and grid of a picture of this size, in pixels."""

    def pixels(self, picture: Picture) -> Pixels:
        """The uint8 array that the runtime uploads; rescaling and normalising happen on the device."""


class VideoShape(NamedTuple):
    """`sampled`: its frames are those that the model shall see, `fps` of them a second."""

    n_frames: int
    fps: float
    width: int
    height: int
    sampled: bool = False


class VideoAdapter(Protocol):
    """Stateless, thread-safe, picklable. `parameters` as of `ImageAdapter`. A video's prompt is known before any frame
    has been decoded."""

    parameters: bytes

    def configured(self, options: Mapping[str, Any]) -> VideoAdapter:
        """As of `ImageAdapter`."""

    def sample(self, video: VideoShape, max_frames: int) -> list[int]:
        """The frames that the model sees, ascending; at least one."""

    def items(self, video: VideoShape, indices: Sequence[int]) -> list[MediaItem]:
        """Of these frames, in order."""

    def pixels(self, video: VideoShape, frames: np.ndarray, resampler: str = "") -> list[Pixels]:
        """One uint8 array per item, of frames uint8 [n, height, width, 3]. `resampler` as of `MediaLimits`."""


def without_options(options: Mapping[str, Any], adapter: ImageAdapter) -> ImageAdapter:
    """`configured` of a family that has none. Raises `InvalidRequest`."""
    if options:
        raise InvalidRequest(
            f"mm_processor_kwargs: this model takes none, not {', '.join(map(repr, options))}",
            param="mm_processor_kwargs",
        )
    return adapter


def content_key(picture: Picture, pixels: Pixels, parameters: bytes, weights: bytes, dtype: str) -> bytes:
    """Names the embedding of a picture (DESIGN 4): what the adapter made of it, which is all that the tower sees; its
    size and mode before, resolved preprocessing, vision-weights fingerprint, dtype. 32 bytes."""
    size = "x".join(map(str, picture.size))
    head = f"{picture.mode}|{picture.image.mode}|{size}|{pixels.shape}|{dtype}|".encode()
    return _digest((head, parameters, weights), pixels)


def frames_key(pixels: Pixels, parameters: bytes, weights: bytes, dtype: str) -> bytes:
    """As `content_key`, of frames of a video as they are encoded."""
    head = f"frames|{'x'.join(map(str, pixels.shape))}|{dtype}|".encode()
    return _digest((head, parameters, weights), pixels)


def _digest(heads: Sequence[bytes], pixels: Pixels) -> bytes:
    digest = hashlib.sha256()
    for part in heads:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.digest()
