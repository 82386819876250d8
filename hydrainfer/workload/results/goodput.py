"""Goodput: the highest rate at which enough requests meet their SLO, found by doubling and bisection.

A search is told what came of each rate and says which to try next; it measures nothing itself. Requests of several runs
at one rate count together. A rate whose interval leaves open on which side of the target it lies is run again, with
another seed, up to `max_runs` times. Attainment is taken to fall with the rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from hydrainfer.core import ConfigError
from hydrainfer.metrics import Proportion

Tried = Sequence[tuple[float, bool]]


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """`rate_per_s`: the highest rate that reached `target`, 0 if none did. The true one lies within [`low`, `high`] as
    far as the runs can tell: at `low`, and at every lower rate tried, attainment is above the target with 95 %
    confidence, at `high` and above it below; None where no rate tried was that clear. `note`: why the search ended, if
    it did not just find it."""

    rate_per_s: float
    low: float | None
    high: float | None
    target: float
    curve: tuple[tuple[float, Proportion], ...]
    note: str = ""


def next_rate(tried: Tried, first: float, factor: float, tolerance: float) -> float | None:
    """The rate to try next, given (rate, carried) of all before; None when it is known within `tolerance`, or when
    `first / factor**6` was too much as well. Grows by `factor` until one fails, then halves the gap on a log scale."""
    failed = min((rate for rate, carried in tried if not carried), default=None)
    carried = max((rate for rate, ok in tried if ok and (failed is None or rate < failed)), default=None)
    if failed is None:
        return first if carried is None else carried * factor
    if carried is None:
        return failed / factor if failed > first / factor**6 * 1.001 else None
    return (failed * carried) ** 0.5 if failed / carried > 1 + tolerance else None


class Search:
    """`while (rate := search.next()) is not None: search.tell(rate, n_met, n)`. Raises `ConfigError`."""

    def __init__(
        self,
        first: float,
        *,
        target: float = 0.9,
        tolerance: float = 0.05,
        max_rate: float = 1e4,
        max_runs: int = 3,
        factor: float = 2.0,
    ) -> None:
        if not first > 0 or not max_rate > 0:
            raise ConfigError(f"a search needs a positive first rate, not {first:g}", param="rate")
        if not 0 < target <= 1 or not tolerance > 0 or max_runs < 1:
            raise ConfigError("a search needs 0 < target <= 1, tolerance > 0 and at least one run a rate")
        self._first, self._target, self._tolerance = min(first, max_rate), target, tolerance
        self._max_rate, self._max_runs, self._factor = max_rate, max_runs, factor
        self._seen: dict[float, list[float]] = {}  # rate -> [met, requests, effective requests, runs]
        self.limit_note = ""

    def tell(self, rate: float, n_met: int, n: int, n_effective: float | None = None) -> None:
        """`n_effective`: see `metrics.effective_n`."""
        seen = self._seen.setdefault(rate, [0, 0, 0, 0])
        for i, amount in enumerate((n_met, n, n if n_effective is None else n_effective, 1)):
            seen[i] += amount

    def give_up_above(self, rate: float, why: str) -> None:
        """Count `rate` as not carried, since its runs say nothing of the server; the result says why."""
        self._seen[rate] = [0, 0, 0, self._max_runs]
        self.limit_note = why

    def next(self) -> float | None:
        for rate, (n_met, n, n_effective, runs) in self._seen.items():
            found = Proportion.of(int(n_met), int(n), n_effective)
            if found.low < self._target <= found.high and n > 0 and runs < self._max_runs:
                return rate
        tried = [(rate, n > 0 and n_met >= self._target * n - 1e-9) for rate, (n_met, n, _, _) in self._seen.items()]
        wanted = next_rate(tried, self._first, self._factor, self._tolerance)
        if wanted is None or wanted <= self._max_rate:
            return wanted
        return None if any(ok and r >= self._max_rate for r, ok in tried) else self._max_rate

    def result(self) -> Goodput:
        """The goodput by all runs so far."""
        curve = [
            (rate, Proportion.of(int(n_met), int(n), n_effective))
            for rate, (n_met, n, n_effective, _) in sorted(self._seen.items())
            if n
        ]
        low_fail = min((r for r, p in curve if p.share < self._target), default=None)
        best = max((r for r, p in curve if p.share >= self._target and (low_fail is None or r < low_fail)), default=0.0)
        not_above = min((r for r, p in curve if p.low < self._target), default=math.inf)
        not_below = max((r for r, p in curve if p.high >= self._target), default=0.0)
        low = max((r for r, p in curve if r < not_above), default=None)
        high = min((r for r, p in curve if r > not_below), default=None)
        note = self.limit_note
        if not note and low_fail is None and best:
            note = f"the target was still reached at {best:.4g} requests/s, the highest rate tried"
        elif not note and not best and curve:
            rate, share = curve[0][0], curve[0][1].share
            note = f"the target was not reached at any rate: at {rate:.3g} requests/s, attainment was {share:.1%}"
        return Goodput(rate_per_s=best, low=low, high=high, target=self._target, curve=tuple(curve), note=note)
