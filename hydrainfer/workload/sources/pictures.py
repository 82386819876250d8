"""Pictures for requests: drawn from a seed (all distinct by default, so that caches do not help) or read from files."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from PIL import Image

from hydrainfer.core import ConfigError
from hydrainfer.machine import n_cores
from hydrainfer.processes import processes

_NOISE = np.float32(20 * 3**0.5 / 255)  # per value of a random byte: a standard deviation of 10
MANY = 64
"""The number of pictures from which several processes draw them faster than one."""
_MEDIA_TYPES = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".webp": "image/webp",
    ".gif": "image/gif",
}


class DrawnPicture(msgspec.Struct, frozen=True, tag="drawn"):
    """A picture of `width` × `height` pixels drawn from `seed`."""

    seed: int
    width: int = 336
    height: int = 336
    encoding: Literal["png", "jpeg"] = "png"

    def data_url(self) -> str:
        out = io.BytesIO()
        picture = Image.fromarray(draw_picture(self.seed, self.width, self.height))
        if self.encoding == "png":
            picture.save(out, "PNG", compress_level=1)
        else:
            picture.save(out, "JPEG", quality=90)
        return _data_url(f"image/{self.encoding}", out.getvalue())


class FilePicture(msgspec.Struct, frozen=True, tag="file"):
    """A picture file, sent unchanged. `data_url` raises `ConfigError` if it is absent or of an unknown type."""

    path: str

    def data_url(self) -> str:
        path = Path(self.path)
        kind = _MEDIA_TYPES.get(path.suffix.lower())
        if kind is None:
            raise ConfigError(f"{path}: pictures must be one of {', '.join(_MEDIA_TYPES)}", param="path")
        try:
            return _data_url(kind, path.read_bytes())
        except OSError as e:
            raise ConfigError(f"{path}: {e.strerror}", param="path") from e


class EncodedPicture(msgspec.Struct, frozen=True, tag="encoded"):
    """A picture that has already been drawn or read."""

    url: str

    def data_url(self) -> str:
        return self.url


SentPicture = DrawnPicture | FilePicture | EncodedPicture


class DrawingStopped(Exception):
    """The pictures were not all drawn, because `given_up` returned True."""


def data_urls(pictures: Sequence[SentPicture], given_up: Callable[[], bool] = lambda: False) -> list[str]:
    """The pictures as `data:` URLs. Many are drawn by one process per core or, if those die, by this process. Raises
    `DrawingStopped` soon after `given_up` returns True, or `ConfigError`."""
    if sum(isinstance(p, DrawnPicture) for p in pictures) < MANY:
        return [p.data_url() for p in pictures]
    try:
        with processes(n_cores(), preload=[__name__]) as pool:
            return list(_until(given_up, pool.map(_data_url_of, pictures, chunksize=8)))
    except BrokenProcessPool:
        return list(_until(given_up, map(_data_url_of, pictures)))


def _until(given_up: Callable[[], bool], urls: Iterable[str]) -> Iterator[str]:
    for url in urls:
        if given_up():
            raise DrawingStopped
        yield url


def _data_url_of(picture: SentPicture) -> str:
    return picture.data_url()


def draw_picture(seed: int, width: int, height: int) -> np.ndarray:
    """A picture of soft colour waves, a little noise and a few hard-edged boxes: uint8 [height, width, 3]. Depends only
    on its arguments and numpy's generator, so that every machine sends the same pixels."""
    rng = np.random.default_rng(seed)
    cycles_x = rng.uniform(0.5, 4.0, 3)
    cycles_y = rng.uniform(0.5, 4.0, 3)
    phase = rng.uniform(0.0, 1.0, 3)
    across = 2 * np.pi * np.linspace(0.0, 1.0, width)[:, None] * cycles_x  # [width, 3]
    down = 2 * np.pi * (np.linspace(0.0, 1.0, height)[:, None] * cycles_y + phase)  # [height, 3]
    sin_x, cos_x, sin_y, cos_y = (f(at).astype(np.float32) for at in (across, down) for f in (np.sin, np.cos))
    pixels = np.empty((height, width, 3), np.uint8)
    for k in range(3):  # sin(across + down)
        waves = np.outer(cos_y[:, k], sin_x[:, k]) + np.outer(sin_y[:, k], cos_x[:, k])  # [height, width]
        waves *= 100.0
        noise = np.frombuffer(rng.bytes(waves.size), np.uint8).reshape(waves.shape)
        waves += _NOISE * noise + (127.0 - 127.5 * _NOISE)
        pixels[:, :, k] = np.clip(waves, 0.0, 255.0, out=waves)
    for _ in range(6):
        left = int(rng.integers(0, width))
        top = int(rng.integers(0, height))
        right = left + 1 + int(rng.integers(0, width)) // 2
        bottom = top + 1 + int(rng.integers(0, height)) // 2
        pixels[top:bottom, left:right] = rng.integers(0, 256, 3)
    return pixels


def _data_url(media_type: str, content: bytes) -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"
