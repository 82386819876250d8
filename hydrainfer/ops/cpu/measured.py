"""The fastest way to multiply, by number of rows and size of the weight, measured once on this machine and
remembered."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from functools import cache
from itertools import groupby

import msgspec
import torch
from torch import Tensor

from hydrainfer.ops.cpu.native import Kernels
from hydrainfer.ops.cpu.products import WAYS, Way, ways
from hydrainfer.ops.cpu.remembered import remembered
from hydrainfer.ops.weights import Int8Weight

_log = logging.getLogger(__name__)
ROWS = (1, 2, 4, 8, 16, 32, 64, 256)
"""The numbers of rows that are measured. A number between two of them uses the way of the larger one."""

MANY = 576
"""The number of rows that a large weight's shape is measured with, on first use, for all numbers above ROWS[-1]."""

_SMALL, _LARGE = (256, 256), (2048, 1024)
_SMALL_UP_TO = 1 << 19
"""Weights with up to this many elements are small: the time of a call matters more than the arithmetic."""

_BYTES = 96 << 20  # of large weights: more than a processor's cache holds
_SMALL_BYTES = 2 << 20
_READS = 8  # rows up to which a product is bound by reading the weight
_ROUNDS = 3
_BUDGET_S = 0.7  # after which no further round starts
_MARGIN = 0.95  # a later way must take less than this share of an earlier one's time
_HOPELESS = 3.0  # times the fastest: not tried again
_SLOW_S = 0.02  # a first call that takes longer is slow, even if it also prepares something
_CALLS_S = 3e-4  # saved, at least, by one call per layer instead of one per operator
_CLOSE = 1.7  # times the fastest at ROWS[-1] rows: such a way may be faster for some shapes of weights
_SHAPE = 4 << 20  # the most elements of a measured weight, in whole rows

ProductTimes = dict[int, dict[str, float]]
Weights = Callable[[int, tuple[int, int]], list]
"""`weights(n_bytes, shape)` makes weights of this shape that take `n_bytes` together."""


class ProductSeconds(msgspec.Struct, frozen=True):
    """Seconds of one product, by rows and way."""

    small: ProductTimes
    large: ProductTimes


Race = Callable[[tuple[int, int], Mapping[str, Way]], dict[str, float]]
"""Seconds of `MANY` rows times a weight of this shape [out, in], by each of these ways."""


class Chosen:
    """The fastest way for each number of rows, for small weights and for large ones. For more than ROWS[-1] rows, the
    fastest way for each shape of a large weight."""

    def __init__(self, measured: ProductSeconds, found: Mapping[str, Way], race: Race) -> None:
        self._small, self._large = (_by_rows(times, found) for times in (measured.small, measured.large))
        self._times = measured.large
        many = measured.large[ROWS[-1]]
        self._close = {name: way for name, way in found.items() if many[name] < _CLOSE * min(many.values())}
        self._race = race
        self._shapes: dict[tuple[int, int], Way] = {}

    def way(self, x: Tensor, weight: Tensor | Int8Weight) -> Way:
        rows = x.shape[0]
        if weight.numel() <= _SMALL_UP_TO:
            return self._small[min(rows, ROWS[-1])]
        return self._large[rows] if rows <= ROWS[-1] else self.way_of_many(weight)

    def way_of_many(self, weight: Tensor | Int8Weight) -> Way:
        """The way for more than ROWS[-1] rows. The first call for a shape may measure it, once on a machine, for up to
        `_BUDGET_S` and one call of each way."""
        usual = (self._small if weight.numel() <= _SMALL_UP_TO else self._large)[ROWS[-1]]
        if weight.numel() <= _SMALL_UP_TO or len(self._close) == 1:
            return usual
        n, k = weight.shape
        shape = min(n, max(1, _SHAPE // k)), k
        if shape not in self._shapes:
            try:
                self._shapes[shape] = self._close[fastest(self._race(shape, self._close))]
            except OSError:  # the result could not be stored; requests must not fail for that
                self._shapes[shape] = usual
        return self._shapes[shape]

    @property
    def native_rows(self) -> int:
        """The number of rows up to which the compiled kernel multiplies large weights."""
        others = (rows for rows, way in enumerate(self._large) if rows and way.name != "native-cpu")
        return next(others, len(self._large)) - 1

    def decoder_rows(self, n_elements: int) -> int:
        """The number of rows up to which the compiled kernel computes a decoder layer, with `n_elements` elements of
        weights, faster than the fastest ways do. It computes whole layers in one call, which saves the calls of single
        operators."""
        most = 0
        for rows in ROWS:
            native_s = self._times[rows].get("native-cpu", math.inf)
            later_s = (native_s - min(self._times[rows].values())) / math.prod(_LARGE) * n_elements
            if rows > self.native_rows and later_s > _CALLS_S:
                break
            most = rows
        return max(most, self.native_rows)

    def slower(self, rows: int) -> float:
        """How many times longer a large weight's product with so many rows takes than that with one."""
        times = {n: min(of_way.values()) for n, of_way in self._times.items()}
        over = next((n for n in ROWS if n >= rows), ROWS[-1])
        under = max((n for n in ROWS if n <= rows), default=ROWS[0])
        part = (rows - under) / (over - under) if over > under else 0.0
        seconds = times[under] + part * (times[over] - times[under])
        return max(seconds / times[ROWS[0]], 1.0) * max(rows / ROWS[-1], 1.0)

    def ranges(self) -> str:
        """A text like "native-cpu up to 8 rows, onednn above", for large weights. Above ROWS[-1] a shape may differ."""
        runs = [(name, len(list(run))) for name, run in groupby(way.name for way in self._large)]
        parts, end = [], -1
        for name, n in runs[:-1]:
            end += n
            parts.append(f"{name} up to {end} rows")
        return ", ".join([*parts, f"{runs[-1][0]} above" if parts else runs[-1][0]])


class WideProducts:
    """`linear` and `linear_add` by the fastest way for each number of rows."""

    def __init__(self, measured: ProductSeconds, found: Mapping[str, Way], dtype: torch.dtype, race: Race) -> None:
        self._measured, self._dtype = measured, dtype
        self._chosen = Chosen(measured, found, race)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._chosen.way(x, weight).linear(x, weight, bias)

    def linear_add(self, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._chosen.way(x, weight).linear_add(out, x, weight, bias)

    @property
    def native_rows(self) -> int:
        return self._chosen.native_rows

    def slower(self, rows: int) -> float:
        return self._chosen.slower(rows)

    def decoder_rows(self, n_elements: int) -> int:
        return self._chosen.decoder_rows(n_elements)

    def prepare(self, weight: Tensor | Int8Weight) -> None:
        """Measure the shape of `weight` now, if a product of many rows would: no request has to wait for it then."""
        self._chosen.way_of_many(weight)

    def compiles(self, x: Tensor, weight: Tensor | Int8Weight) -> bool:
        """Whether oneDNN, which compiles code for each number of rows, computes this product."""
        way = self._chosen.way(x, weight).name
        return way in ("onednn", "widened") or (way == "torch" and self._dtype != torch.float32)

    def packs(self, weight: Tensor) -> bool:
        """Whether oneDNN multiplies many rows by `weight` without widening it; packing then makes that faster."""
        return self._chosen.way_of_many(weight).name == "onednn"

    def describe(self) -> list[str]:
        """The choice and the measurements behind it, one line each."""
        n, k = _LARGE
        few, many = self._measured.large[ROWS[0]], self._measured.large[ROWS[-1]]
        gb = n * k * self._dtype.itemsize / 1e9
        rates = [
            f"{way} {gb / few[way]:.0f} GB/s, {2e-9 * ROWS[-1] * n * k / many[way]:.0f} GFLOP/s" for way in sorted(few)
        ]
        return [self._chosen.ranges(), f"(weights at 1 row, {ROWS[-1]} rows: {'; '.join(rates)})"]


def products(dtype: torch.dtype, kernels: Kernels | None, threads: int | None = None) -> WideProducts:
    """The products for this dtype, measured with this many threads (default: torch's current number). The first call on
    a machine takes up to a second."""
    race = race_of(str(dtype), dtype, _weights_of(dtype), kernels.build if kernels else "", threads)
    return WideProducts(_measured(dtype, kernels, threads), ways(dtype, kernels), dtype, race)


def faster_than_float32(dtype: torch.dtype, kernels: Kernels | None, threads: int | None = None) -> bool:
    """Whether the processor multiplies many rows faster in this dtype itself, without widening, and few rows not much
    slower. If it has to widen the weights, a long prompt takes longer."""
    narrow, wide = (_measured(d, kernels, threads).large for d in (dtype, torch.float32))
    many = dict(narrow[ROWS[-1]])
    # float32 takes no longer than widening; it may have been measured while the machine was busier
    wide_many_s = min(many.pop("widened", math.inf), *wide[ROWS[-1]].values())
    few_s, wide_few_s = (min(times[ROWS[0]].values()) for times in (narrow, wide))
    return min(many.values()) < 0.9 * wide_many_s and few_s < 1.1 * wide_few_s


def fastest(times: Mapping[str, float]) -> str:
    """The way that takes the least time; of two that are about equal, the one that `WAYS` names first."""
    ordered = [way for way in WAYS if way in times]
    best = ordered[0]
    for way in ordered[1:]:
        if times[way] < _MARGIN * times[best]:
            best = way
    return best


def _by_rows(times: ProductTimes, found: Mapping[str, Way]) -> list[Way]:
    """The way for 0, 1, … ROWS[-1] rows."""
    chosen: list[Way] = []
    for rows in ROWS:
        chosen += [found[fastest(times[rows])]] * (rows + 1 - len(chosen))
    return chosen


def _measured(dtype: torch.dtype, kernels: Kernels | None, threads: int | None) -> ProductSeconds:
    build = kernels.build if kernels else ""
    return measured_ways(str(dtype), dtype, ways(dtype, kernels), _weights_of(dtype), build, threads)


def _weights_of(dtype: torch.dtype) -> Weights:
    def weights(n_bytes: int, shape: tuple[int, int]) -> list[Tensor]:
        return list(torch.ones((n_bytes // (math.prod(shape) * dtype.itemsize), *shape), dtype=dtype).unbind())

    return weights


def measured_ways(
    name: str, dtype: torch.dtype, found: Mapping[str, Way], weights: Weights, build: str, threads: int | None
) -> ProductSeconds:
    """Times of these ways with rows in `dtype`, remembered under `name` for this `build` of the kernels."""

    def whole(kept: ProductSeconds) -> bool:
        times = [(kept.small.get(rows), kept.large.get(rows)) for rows in ROWS]
        return all(t and t.keys() == found.keys() for pair in times for t in pair)

    what = (name, str(dtype), build, sorted(found), ROWS)
    return remembered("products", what, ProductSeconds, whole, lambda: measure(dtype, found, weights), threads)


def race_of(name: str, dtype: torch.dtype, weights: Weights, build: str, threads: int | None) -> Race:
    """A function that measures as `measured_ways` does, one shape at a time."""

    def race(shape: tuple[int, int], found: Mapping[str, Way]) -> dict[str, float]:
        def measure() -> dict[str, float]:
            _say_once()
            with torch.inference_mode():
                some = weights(2 * math.prod(shape) * dtype.itemsize, shape)[:2]
                x = torch.ones((MANY, shape[1]), dtype=dtype)
                for way in found.values():
                    way.linear(x, some[0])  # "widened" may first measure the shape of its slices
                return _race(found, some, dtype, MANY, time.perf_counter() + _BUDGET_S)

        what = (name, str(dtype), build, sorted(found), MANY, shape)
        return remembered("shapes", what, dict[str, float], lambda kept: kept.keys() == found.keys(), measure, threads)

    return race


@cache
def _say_once() -> None:
    _log.info("measuring the fastest way to multiply by each shape of weight, up to a second for each")


def measure(dtype: torch.dtype, found: Mapping[str, Way], weights: Weights) -> ProductSeconds:
    """Time every way for every number of rows. The shortest of several products counts, so that other load on the
    machine matters little."""
    end_s = time.perf_counter() + _BUDGET_S
    with torch.inference_mode():
        large, small = weights(_BYTES, _LARGE), weights(_SMALL_BYTES, _SMALL)
        of_small = {rows: _race(found, small, dtype, rows, end_s) for rows in ROWS}
        of_large = {rows: _race(found, large if rows <= _READS else large[:2], dtype, rows, end_s) for rows in ROWS}
        return ProductSeconds(of_small, of_large)


def _race(found: Mapping[str, Way], weights: list, dtype: torch.dtype, rows: int, end_s: float) -> dict[str, float]:
    """Seconds of one product by way. A way passes over all weights before the next one does, so that it finds none of
    them in a cache."""
    x = torch.ones((rows, weights[0].shape[1]), dtype=dtype)
    best = {
        name: _seconds(way, x, weights[0]) for name, way in found.items()
    }  # the first call may compile, so only hopelessly slow ways are dropped
    in_race = {name: way for name, way in found.items() if best[name] < max(_SLOW_S, _HOPELESS * min(best.values()))}
    for i in range(_ROUNDS):
        if i and time.perf_counter() > end_s:
            break
        for name, way in in_race.items():
            best[name] = min(best[name], *(_seconds(way, x, weight) for weight in weights))
        in_race = {name: way for name, way in in_race.items() if best[name] < _HOPELESS * min(best.values())}
    return best


def _seconds(way: Way, x: Tensor, weight: Tensor | Int8Weight) -> float:
    start_s = time.perf_counter()
    way.linear(x, weight)
    return time.perf_counter() - start_s
