"""What a model family wants of a picture: one small adapter each, behind one protocol."""

from __future__ import annotations

import hashlib
from typing import NamedTuple, Protocol

from hydrainfer.processor.media import Picture
from hydrainfer.processor.pixels import Pixels


class ImageFit(NamedTuple):
    """Placeholder tokens a picture takes, and its (t, h, w) grid in patches for models whose positions need it."""

    n_tokens: int
    grid: tuple[int, int, int] | None = None


class ImageAdapter(Protocol):
    """Stateless and thread-safe. `parameters`: the resolved preprocessing, as part of a picture's key. `fit` needs the
    size only, so that a prompt's length can be known before any resizing."""

    parameters: bytes

    def fit(self, width: int, height: int) -> ImageFit:
        """Tokens and grid of a picture of this size, in pixels."""

    def pixels(self, picture: Picture) -> Pixels:
        """The uint8 array that the runtime uploads; rescaling and normalising happen on the device."""


def content_key(picture: Picture, parameters: bytes, weights: bytes, dtype: str) -> bytes:
    """Names the embedding of a picture (DESIGN 4): upright decoded content, mode, size, resolved preprocessing,
    vision-weights fingerprint, dtype. 32 bytes."""
    image = picture.image
    head = f"{picture.mode}|{image.mode}|{image.width}x{image.height}|{dtype}|".encode()
    digest = hashlib.sha256()
    for part in (head, parameters, weights):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    digest.update(image.tobytes())
    return digest.digest()
