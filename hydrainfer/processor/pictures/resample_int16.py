"""Resizing of pictures as torch, and so torchvision, does it with 8-bit pixels on a CPU: by the compiled kernel
`kernels/cpu/resample_int16.cpp` or, several times slower, by numpy. Both give torch's result to the last bit.

Rows are resized first. Weights have 16 bits. How many of them are fractional depends on the largest weight of an axis.
"""

from __future__ import annotations

import ctypes
from functools import partial
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


def resized(
    image: Image.Image, width: int, height: int, resample: int, box: Box | None = None, library: str = ""
) -> np.ndarray:
    """The resized RGB picture as uint8 [height, width, 3], or the `box` of it. `resample`: one of `REACH`. `library`:
    path of the compiled kernel; numpy resizes if there is none, or if it has been removed."""
    box = box or (0, 0, width, height)
    columns = _axis(image.width, width, box[0], box[2], resample, 4)
    rows = _axis(image.height, height, box[1], box[3], resample, 2)
    room = max(image.width, columns.taps.n), max(image.height, rows.taps.n)
    if room != image.size:
        image = image.crop((0, 0, *room))  # black beyond the edge, where all weights are zero
    kernel = _kernel(library) if library else None
    if kernel is None:
        begin, end = rows.taps.span
        between = _summed(np.asarray(image)[begin:end].swapaxes(0, 1), columns)
        return np.ascontiguousarray(_summed(between.swapaxes(0, 1), rows.moved(-begin)))
    along, down = partial(_along, kernel, columns.bits), partial(_down, kernel, rows.bits)
    return along_first(image, columns.taps, rows.taps, along, down)


def agrees(library: str) -> bool:
    """Whether the kernel gives the same pixels as numpy."""
    noise = np.random.default_rng(0).integers(0, 2, (49, 61, 3), np.uint8) * np.uint8(255)
    image = Image.fromarray(noise)
    return all(
        np.array_equal(resized(image, *size, resample, library=library), resized(image, *size, resample))
        for size in ((40, 30), (70, 20), (9, 80), (61, 50), (2, 1))
        for resample in REACH
    )


class _Axis(NamedTuple):
    """The taps of one axis, with int16 weights of `bits` fractional bits."""

    taps: Taps
    bits: int

    def moved(self, by: int) -> _Axis:
        return self._replace(taps=self.taps._replace(first=self.taps.first + np.int32(by)))


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


def _summed(pixels: np.ndarray, axis: _Axis) -> np.ndarray:
    """Pixels [inputs, others, 3], resized along their first axis."""
    first, weights = axis.taps
    total = np.full((len(first), *pixels.shape[1:]), 1 << (axis.bits - 1), np.int32)
    for tap in range(axis.taps.n):
        total += pixels[first + tap] * weights[:, tap, None, None].astype(np.int32)
    return np.clip(total >> axis.bits, 0, 255).astype(np.uint8)


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
