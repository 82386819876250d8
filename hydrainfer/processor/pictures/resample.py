"""Resizing of pictures, by Pillow or by the compiled kernel `kernels/cpu/resample.cpp`. The kernel is several times as
fast and gives the same result to the last bit."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

Box = tuple[int, int, int, int]
"""Left, top, right and bottom in pixels of the resized picture."""

_FRACTION_BITS = 22
REACH = {Image.Resampling.BILINEAR: 1.0, Image.Resampling.BICUBIC: 2.0, Image.Resampling.LANCZOS: 3.0}
"""The distance in pixels at which each supported filter ends."""
_STRIP_BYTES = 15 << 20  # Pillow stores pictures of up to this size in one block of memory
POINTER, SIZE = ctypes.c_void_p, ctypes.c_int64
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def resized(
    image: Image.Image, width: int, height: int, resample: int, box: Box | None = None, library: str = ""
) -> np.ndarray:
    """The resized RGB picture as uint8 [height, width, 3], or the `box` of it. `library`: path of the compiled kernel.
    Pillow resizes if there is none, and in cases that the kernel does not support."""
    box = box or (0, 0, width, height)
    kernel = _kernel(library) if library and image.mode == "RGB" and (width, height) != image.size else None
    if kernel is not None:
        columns = _taps(image.width, width, box[0], box[2], resample)
        rows = _taps(image.height, height, box[1], box[3], resample)
        if columns is not None and rows is not None:
            # like Pillow 13: the vertical pass comes first if it leaves much less work for the horizontal one
            shrunk = image.width - width, image.height - height
            passes = _down_first if shrunk[1] > max(0, 2 * shrunk[0]) else along_first
            return passes(image, columns, rows, partial(_along, kernel), partial(_down, kernel))
    whole = np.asarray(image.resize((width, height), Image.Resampling(resample)))
    return np.ascontiguousarray(whole[box[1] : box[3], box[0] : box[2]])


def agrees(library: str) -> bool:
    """Whether the kernel gives the same pixels as the installed Pillow."""
    noise = np.random.default_rng(0).integers(0, 2, (99, 131, 3), np.uint8) * np.uint8(255)
    image = Image.fromarray(noise)
    sizes = ((40, 30), (150, 20), (170, 120), (131, 50), (50, 99))
    return all(
        np.array_equal(resized(image, *size, resample, library=library), resized(image, *size, resample))
        for size in sizes
        for resample in REACH
    )


class Taps(NamedTuple):
    """The filter taps of one axis: output i is the sum of the n inputs from `first[i]` on, times `weights[i]`
    ([outputs, n], int32)."""

    first: np.ndarray
    weights: np.ndarray

    @property
    def n(self) -> int:
        return self.weights.shape[1]

    @property
    def span(self) -> tuple[int, int]:
        """The range of inputs that are used: begin and end."""
        return int(self.first.min()), int(self.first.max()) + self.n


def _taps(n_in: int, n_out: int, begin: int, end: int, resample: int) -> Taps | None:
    """The taps of outputs `begin` to `end` of one axis. Each output has the same even number of taps, all within the
    input. None if the input is too short for that or the filter is not supported. The arithmetic is Pillow's: double
    precision, in the same order, then fixed point."""
    reach = REACH.get(Image.Resampling(resample))
    if reach is None:
        return None
    scale = n_in / n_out
    stretch = max(scale, 1.0)
    reach *= stretch
    n = math.ceil(reach) * 2 + 2
    if n > n_in:
        return None
    low, high, centres = windows(n_in, n_out, begin, end, reach)
    first = np.minimum(low, n_in - n)
    at = first[:, None] + np.arange(n)  # [outputs, n]
    weights = shares(at, low, high, centres, stretch, resample) * (1 << _FRACTION_BITS)
    return Taps(first.astype(np.int32), np.trunc(weights + np.copysign(0.5, weights)).astype(np.int32))


def windows(n_in: int, n_out: int, begin: int, end: int, reach: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The inputs that count for outputs `begin` to `end` of one axis: the first, the one after the last, and the
    centre, each [outputs]. `reach`: the filter's, in inputs."""
    centres = (np.arange(begin, end) + 0.5) * (n_in / n_out)
    low = np.maximum((centres - reach + 0.5).astype(np.int64), 0)
    high = np.minimum((centres + reach + 0.5).astype(np.int64), n_in)
    return low, high, centres


def shares(
    at: np.ndarray, low: np.ndarray, high: np.ndarray, centres: np.ndarray, stretch: float, resample: int
) -> np.ndarray:
    """The weights of the inputs `at` [outputs, n] in double precision; those of an output add up to 1. The rest is as
    `windows` returns it; `stretch`: inputs per output, at least 1."""
    weights = _CURVES[Image.Resampling(resample)](np.abs((at - centres[:, None] + 0.5) * (1.0 / stretch)))
    weights[(at < low[:, None]) | (at >= high[:, None])] = 0.0
    total = np.zeros(len(centres))
    for tap in range(at.shape[1]):  # one after the other, since another order rounds differently
        total += weights[:, tap]
    return weights / total[:, None]


def _bicubic(x: np.ndarray) -> np.ndarray:
    """The cubic convolution kernel with a = -0.5 (Keys 1981, equation 15) at these distances."""
    near = (1.5 * x - 2.5) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * -0.5
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


def _bilinear(x: np.ndarray) -> np.ndarray:
    return np.maximum(1.0 - x, 0.0)


def _lanczos(x: np.ndarray) -> np.ndarray:
    return np.where(x < 3, np.sinc(x) * np.sinc(x / 3), 0.0)


_CURVES: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    Image.Resampling.BILINEAR: _bilinear,
    Image.Resampling.BICUBIC: _bicubic,
    Image.Resampling.LANCZOS: _lanczos,
}


Pass = Callable[["Plane", Taps, np.ndarray], None]
"""Resizes the rows, or the columns, of a plane into an array."""


def along_first(image: Image.Image, columns: Taps, rows: Taps, along: Pass, down: Pass) -> np.ndarray:
    """The resized picture, uint8 [height, width, 3], of which first the rows are resized, then the columns."""
    width, height = len(columns.first), len(rows.first)
    begin, end = rows.span
    between = np.empty((end - begin, 3 * width + 1), np.uint8)
    at_once = max(1, _STRIP_BYTES // (4 * image.width))
    for top in range(begin, end, at_once):
        bottom = min(top + at_once, end)
        along(Plane.of(image, (0, top, image.width, bottom)), columns, between[top - begin :])
    out = np.empty((height, width, 3), np.uint8)
    plane = Plane(between, between.ctypes.data, between.strides[0], 3 * width, end - begin)
    down(plane, rows._replace(first=rows.first - np.int32(begin)), out)
    return out


def _down_first(image: Image.Image, columns: Taps, rows: Taps, along: Pass, down: Pass) -> np.ndarray:
    width, height = len(columns.first), len(rows.first)
    (left, right), (top, bottom) = columns.span, rows.span
    rows = rows._replace(first=rows.first - np.int32(top))
    between = np.empty((height, right - left, 4), np.uint8)
    at_once = max(1, _STRIP_BYTES // (4 * (bottom - top)))
    for begin in range(left, right, at_once):
        end = min(begin + at_once, right)
        down(Plane.of(image, (begin, top, end, bottom)), rows, between[:, begin - left :])
    out = np.empty((height, 3 * width + 1), np.uint8)
    plane = Plane(between, between.ctypes.data, between.strides[0], between.strides[0], height)
    along(plane, columns._replace(first=columns.first - np.int32(left)), out)
    return np.ascontiguousarray(out[:, :-1]).reshape(height, width, 3)


class Plane(NamedTuple):
    """A block of memory with `n_rows` rows of `row_bytes` bytes, `stride` bytes apart, starting at `address`. It is
    valid as long as `owner` lives."""

    owner: Any
    address: int
    stride: int
    row_bytes: int
    n_rows: int

    @classmethod
    def of(cls, image: Image.Image, box: Box) -> Plane:
        """A part of an RGB picture, with four bytes per pixel: in Pillow's own memory if that is one block, else in a
        copy."""
        left, top, right, bottom = box
        width, n_rows = right - left, bottom - top
        if 4 * image.width * image.height > _STRIP_BYTES:
            image, left, top = image.crop(box), 0, 0
        owner = image.__arrow_c_array__()
        pixels = _ArrowArray.from_address(_pointer_of(owner[1], b"arrow_array"))
        channels = _ArrowArray.from_address(ctypes.addressof(pixels.children[0].contents))
        assert pixels.length == image.width * image.height and channels.length == 4 * pixels.length
        stride = 4 * image.width
        start = channels.buffers[1] + top * stride + 4 * left
        return cls(owner, start, stride, 4 * width, n_rows)


def _along(kernel: ctypes.CDLL, plane: Plane, columns: Taps, out: np.ndarray) -> None:
    weights = np.repeat(columns.weights, 4, axis=1)  # for each of four channels
    kernel.hydra_resample_along(
        plane.address,
        plane.stride,
        plane.n_rows,
        columns.first.ctypes.data,
        weights.ctypes.data,
        columns.n,
        len(columns.first),
        out.ctypes.data,
        out.strides[0],
    )


def _down(kernel: ctypes.CDLL, plane: Plane, rows: Taps, out: np.ndarray) -> None:
    kernel.hydra_resample_down(
        plane.address,
        plane.stride,
        plane.row_bytes,
        rows.first.ctypes.data,
        rows.weights.ctypes.data,
        rows.n,
        len(rows.first),
        out.ctypes.data,
        out.strides[0],
    )


class _ArrowArray(ctypes.Structure):
    """The first fields of `ArrowArray` of Arrow's C data interface."""

    _fields_ = (
        ("length", SIZE),
        ("null_count", SIZE),
        ("offset", SIZE),
        ("n_buffers", SIZE),
        ("n_children", SIZE),
        ("buffers", ctypes.POINTER(POINTER)),
        ("children", ctypes.POINTER(ctypes.POINTER(POINTER))),
    )


def _kernel(library: str) -> ctypes.CDLL | None:
    arguments = (POINTER, SIZE, SIZE, POINTER, POINTER, SIZE, SIZE, POINTER, SIZE)
    return loaded(library, ("hydra_resample_along", "hydra_resample_down"), arguments)


@cache
def loaded(library: str, functions: tuple[str, ...], arguments: tuple[Any, ...]) -> ctypes.CDLL | None:
    """A compiled library, with these functions declared; None if it has been removed, as builds are that nobody has
    started for long."""
    try:
        kernel = ctypes.CDLL(library)
    except OSError:
        return None
    for name in functions:
        function = getattr(kernel, name)
        function.argtypes, function.restype = arguments, None
    return kernel
