"""Int8 weights: made from wide ones, multiplied as they are, or widened slice by slice where that is faster."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hydrainfer.ops.cpu.measured import Chosen, WideProducts, measured_ways, race_of
from hydrainfer.ops.cpu.native import Kernels
from hydrainfer.ops.cpu.products import Way
from hydrainfer.ops.weights import Int8Weight

_SLICE_BYTES = 4 << 20
"""Weights are widened in slices of this size, so that the product reads them from a cache."""


class Int8Products:
    """`linear` and `linear_add` for both kinds of weight: tensors as `wide` does, int8 weights by the fastest way for
    each number of rows."""

    def __init__(
        self, wide: WideProducts, dtype: torch.dtype, kernels: Kernels | None, threads: int | None = None
    ) -> None:
        found = int8_ways(wide, kernels)

        def weights(n_bytes: int, shape: tuple[int, int]) -> list[Int8Weight]:
            values = torch.ones((n_bytes // math.prod(shape), *shape), dtype=torch.int8)
            return [Int8Weight(v, torch.ones(shape[0])) for v in values]

        self._wide, self._dtype = wide, dtype
        build = kernels.build if kernels else ""
        race = race_of("int8", dtype, weights, build, threads)
        self._narrow = Chosen(measured_ways("int8", dtype, found, weights, build, threads), found, race)

    def linear(self, x: Tensor, weight: Tensor | Int8Weight, bias: Tensor | None = None) -> Tensor:
        if isinstance(weight, Tensor):
            return self._wide.linear(x, weight, bias)
        return self._narrow.way(x, weight).linear(x, weight, bias)

    def linear_add(self, out: Tensor, x: Tensor, weight: Tensor | Int8Weight, bias: Tensor | None = None) -> Tensor:
        if isinstance(weight, Tensor):
            return self._wide.linear_add(out, x, weight, bias)
        return self._narrow.way(x, weight).linear_add(out, x, weight, bias)

    @property
    def native_rows(self) -> int:
        return self._narrow.native_rows

    def slower(self, rows: int) -> float:
        return self._narrow.slower(rows)

    def decoder_rows(self, n_elements: int) -> int:
        return self._narrow.decoder_rows(n_elements)

    def prepare(self, weight: Tensor | Int8Weight) -> None:
        """As `WideProducts.prepare`."""
        if isinstance(weight, Tensor):
            self._wide.prepare(weight)
        elif self._narrow.way_of_many(weight).name == "widened":
            for part in self._slices(weight):
                self._wide.prepare(part)

    def compiles(self, x: Tensor, weight: Tensor | Int8Weight) -> bool:
        """`WideProducts.compiles` for both kinds of weight. Int8 weights count only if they are widened first."""
        if isinstance(weight, Tensor):
            return self._wide.compiles(x, weight)
        widened = self._narrow.way(x, weight).name == "widened"
        return widened and any(self._wide.compiles(x, part) for part in self._slices(weight))

    def _slices(self, weight: Int8Weight) -> list[Tensor]:
        """The wide weights that "widened" multiplies by instead of `weight`, one of each shape, without memory."""
        n, k = weight.shape
        step = _rows_of_slice(k, self._dtype)
        return [torch.empty((rows, k), dtype=self._dtype, device="meta") for rows in (min(step, n), n % step) if rows]

    def packs(self, weight: Tensor) -> bool:
        """`WideProducts.packs` for wide weights."""
        return self._wide.packs(weight)

    def describe(self) -> list[str]:
        """The chosen ways in lines: those for wide weights with their measurements, then those for int8 weights."""
        return [*self._wide.describe(), f"8 bits: {self._narrow.ranges()}"]


def _rows_of_slice(width: int, dtype: torch.dtype) -> int:
    return max(1, _SLICE_BYTES // (dtype.itemsize * width))


def int8_ways(wide: WideProducts, kernels: Kernels | None) -> dict[str, Way]:
    """The ways to multiply an int8 weight on this machine: our kernels for few and for many rows, and "widened"."""

    def linear(x: Tensor, weight: Int8Weight, bias: Tensor | None = None) -> Tensor:
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype)
        step = _rows_of_slice(weight.shape[1], x.dtype)
        for first in range(0, weight.shape[0], step):
            rows = slice(first, first + step)
            part = weight[rows].wide(x.dtype) if kernels is None else kernels.widen_int8(weight[rows], x.dtype)
            out[:, rows] = wide.linear(x, part, None if bias is None else bias[rows])
        return out

    widened = Way("widened", linear, lambda out, x, weight, bias=None: out.add_(linear(x, weight, bias)))
    if kernels is None:
        return {widened.name: widened}
    few = Way("native-cpu", kernels.linear_int8, kernels.linear_int8_add)
    many = Way("native-many", kernels.linear_many, kernels.linear_many_add)
    return {way.name: way for way in (few, many, widened)}
