"""Resizing of pictures as torch, and so torchvision, does it with 8-bit pixels on a CPU: by the compiled kernel
`kernels/cpu/resample_int16.cpp`, with the same result to the last bit, or by torch itself.

Rows are resized first. Weights have 16 bits. How many of them are fractional depends on the largest weight of an axis.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import NamedTuple

import numpy as np
from PIL import Image

from hydrainfer.processor.pictures.resample import (
    POINTER,
    REACH,
    SIZE,
    Box,
    Plane,
    Taps,
    along_first,
    loaded,
    shares,
    windows,
)

_MOST_BITS = 22
_MODES = {
    Image.Resampling.LANCZOS: "lanczos",
    Image.Resampling.BILINEAR: "bilinear",
    Image.Resampling.BICUBIC: "bicubic",
}
_DIGESTS = {
    Image.Resampling.LANCZOS: "f52244ff4ea6122c1203f9130d82273009c3602b3af9c59e9458a500cd72b4f2",
    Image.Resampling.BILINEAR: "3dc30eab210004421c03603b51b5987b16c79b7a7d8ef963fba629879a1b17df",
    Image.Resampling.BICUBIC: "435560524874ba3761a96d32e67535208881d4ce49367f2e23d8f43dae2a9586",
}
"""What `digest` returns for torch's own resizing, by filter."""


def resized(
    image: Image.Image, width: int, height: int, resample: int, box: Box | None = None, library: str = ""
) -> np.ndarray:
    """The resized RGB picture as uint8 [height, width, 3], or the `box` of it. `resample`: one of `REACH`. `library`:
    path of the compiled kernel; torch resizes if there is none, or if it has been removed."""
    box = box or (0, 0, width, height)
    kernel = _kernel(library) if library else None
    if kernel is None:
        whole = by_torch(image, width, height, resample)
        return np.ascontiguousarray(whole[box[1] : box[3], box[0] : box[2]])
    columns = _axis(image.width, width, box[0], box[2], resample, 4)
    rows = _axis(image.height, height, box[1], box[3], resample, 2)
    room = max(image.width, columns.taps.n), max(image.height, rows.taps.n)
    if room != image.size:
        image = image.crop((0, 0, *room))  # black beyond the edge, where all weights are zero
    along, down = partial(_along, kernel, columns.bits), partial(_down, kernel, rows.bits)
    return along_first(image, columns.taps, rows.taps, along, down)


def load_torch() -> ModuleType:
    """Torch, which is imported now if it has not been."""
    import torch

    return torch


def by_torch(image: Image.Image, width: int, height: int, resample: int) -> np.ndarray:
    """The resized RGB picture as uint8 [height, width, 3], by torch, which is imported for it."""
    torch = load_torch()
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]  # channels last
    mode = _MODES[Image.Resampling(resample)]
    made = torch.nn.functional.interpolate(pixels, (height, width), mode=mode, antialias=True)
    return np.ascontiguousarray(made[0].permute(1, 2, 0).numpy())


def agrees(library: str) -> bool:
    """Whether the kernel gives the same pixels as torch, which is not imported for it."""
    resize = partial(resized, library=library)
    return all(digest(resize, resample) == expected for resample, expected in _DIGESTS.items())


def digest(resize: Callable[[Image.Image, int, int, int], np.ndarray], resample: int) -> str:
    """A digest of pixels that `resize` makes of a fixed picture with this filter."""
    width, height = 61, 49
    noise = np.frombuffer(hashlib.shake_128(b"noise").digest(3 * width * height), np.uint8)
    image = Image.fromarray((noise.reshape(height, width, 3) >> 7) * np.uint8(255))  # which overshoots most
    made = hashlib.sha256()
    for size in ((40, 30), (70, 20), (9, 80), (61, 50), (2, 1)):
        made.update(resize(image, *size, resample).tobytes())
    return made.hexdigest()


class _Axis(NamedTuple):
    """The taps of one axis, with int16 weights of `bits` fractional bits."""

    taps: Taps
    bits: int


def _axis(n_in: int, n_out: int, begin: int, end: int, resample: int, multiple: int) -> _Axis:
    """The taps of outputs `begin` to `end` of one axis. Each output has the same number of taps, a multiple of
    `multiple`. They are within the input, unless that has fewer pixels."""
    stretch = max(n_in / n_out, 1.0)
    low, high, centres = windows(n_in, n_out, 0, n_out, REACH[Image.Resampling(resample)] * stretch)
    n = -(-int((high - low).max()) // multiple) * multiple
    first = np.minimum(low, max(n_in - n, 0))
    weights = shares(first[:, None] + np.arange(n), low, high, centres, stretch, resample)
    bits, most = 0, weights.max()  # of the whole axis, whatever part is wanted
    while bits < _MOST_BITS and int(0.5 + most * 2.0 ** (bits + 1)) < 2**15:
        bits += 1
    scaled = weights[begin:end] * 2.0**bits
    rounded = np.trunc(scaled + np.copysign(0.5, scaled)).astype(np.int16)
    return _Axis(Taps(first[begin:end].astype(np.int32), rounded), bits)


def _along(kernel: ctypes.CDLL, bits: int, plane: Plane, columns: Taps, out: np.ndarray) -> None:
    pairs = columns.weights.reshape(len(columns.first), -1, 1, 2)
    weights = np.repeat(pairs, 4, axis=2)  # for each of four channels
    kernel.hydra_resample16_along(
        plane.address,
        plane.stride,
        plane.n_rows,
        columns.first.ctypes.data,
        weights.ctypes.data,
        columns.n,
        bits,
        len(columns.first),
        out.ctypes.data,
        out.strides[0],
    )


def _down(kernel: ctypes.CDLL, bits: int, plane: Plane, rows: Taps, out: np.ndarray) -> None:
    kernel.hydra_resample16_down(
        plane.address,
        plane.stride,
        plane.row_bytes,
        rows.first.ctypes.data,
        rows.weights.ctypes.data,
        rows.n,
        bits,
        len(rows.first),
        out.ctypes.data,
        out.strides[0],
    )


def _kernel(library: str) -> ctypes.CDLL | None:
    arguments = (POINTER, SIZE, SIZE, POINTER, POINTER, SIZE, SIZE, SIZE, POINTER, SIZE)
    return loaded(library, ("hydra_resample16_along", "hydra_resample16_down"), arguments)
