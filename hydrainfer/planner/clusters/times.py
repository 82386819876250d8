"""Prefill seconds and KV bytes of prompts, by their length: a table of measurements, and curves between its points."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from hydrainfer.core import ConfigError


class TimesPoint(msgspec.Struct, frozen=True):
    """One measurement of one instance: the uncached tokens of a prompt, the bytes that it leaves in the caches (KV and
    states), and the seconds of its prefill."""

    tokens: float
    kv_bytes: float
    prefill_s: float


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """A table of measurements, by ascending tokens. Raises `ConfigError`.

    Between two points, the logarithm of a value is linear in the logarithm of the tokens. Beyond the first and the last
    point the nearest of these lines goes on, which is a guess: see `covers`, and `guessed_share` of a throughput.
    """

    points: tuple[TimesPoint, ...]

    def __post_init__(self) -> None:
        if len(self.points) < 2:
            raise ConfigError(f"times: {len(self.points)} points, at least 2 are needed", param="times")
        for point in self.points:
            values = (point.tokens, point.kv_bytes, point.prefill_s)
            if not all(math.isfinite(value) and value > 0.0 for value in values):
                raise ConfigError(
                    f"times: tokens, KV bytes and seconds must be positive, not {point.tokens:g}, "
                    f"{point.kv_bytes:g} and {point.prefill_s:g}",
                    param="times",
                )
        for before, after in pairwise(self.points):
            if after.tokens <= before.tokens:
                raise ConfigError(
                    f"times: {after.tokens:g} tokens after {before.tokens:g}, points must ascend", param="times"
                )

    @classmethod
    def sampled(
        cls, tokens: Sequence[float], kv_bytes: Callable[[float], float], prefill_s: Callable[[float], float]
    ) -> Times:
        """The table of two curves at these lengths."""
        return cls(points=tuple(TimesPoint(n, kv_bytes(n), prefill_s(n)) for n in tokens))

    @property
    def shortest(self) -> float:
        """Tokens of the first point."""
        return self.points[0].tokens

    @property
    def longest(self) -> float:
        """Tokens of the last point."""
        return self.points[-1].tokens

    def covers(self, tokens: ArrayLike) -> NDArray[np.bool_]:
        """False where a value would be a guess, because no point is as short or none as long."""
        n = np.asarray(tokens, dtype=np.float64)
        return (n >= self.shortest) & (n <= self.longest)

    def prefill_s(self, tokens: ArrayLike) -> NDArray[np.float64]:
        """Seconds that one instance takes to prefill a prompt of this many uncached tokens."""
        return self._between(tokens, [point.prefill_s for point in self.points])

    def kv_bytes(self, tokens: ArrayLike) -> NDArray[np.float64]:
        """Bytes that a prompt of this many tokens leaves in the caches."""
        return self._between(tokens, [point.kv_bytes for point in self.points])

    def kv_bytes_per_s(self, tokens: ArrayLike) -> NDArray[np.float64]:
        """Bytes per second of prefill that one instance fills its caches with (Eq. 1 of Prefill-as-a-Service)."""
        return self.kv_bytes(tokens) / self.prefill_s(tokens)

    def _between(self, tokens: ArrayLike, values: Sequence[float]) -> NDArray[np.float64]:
        x = np.log(np.asarray(tokens, dtype=np.float64))
        known_x = np.log([point.tokens for point in self.points])
        known_y = np.log(values)
        segment = np.clip(np.searchsorted(known_x, x) - 1, 0, len(known_x) - 2)
        slope = np.diff(known_y) / np.diff(known_x)
        y: NDArray[np.float64] = known_y[segment] + slope[segment] * (x - known_x[segment])
        return np.exp(y)
