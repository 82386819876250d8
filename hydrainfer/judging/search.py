"""Goodput: the highest rate at which enough requests would meet their SLO in the steady state.

A search gets the results of each run, and returns the rate and the length of the next one; it measures nothing itself.
A rate that the runs so far cannot decide is run again, twice as long, up to a limit; then it stays undecided. The
result is the interval between the highest rate that is certainly carried and the lowest that certainly is not. Both
ends are refined until nothing is left to decide. The search assumes that attainment falls with the rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from hydrainfer.core import ConfigError
from hydrainfer.judging.attainment import Proportion
from hydrainfer.judging.steady import Series, Steady, steady_state

_FAR_BELOW = 1000.0  # a search gives up at this fraction of the first rate


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a search. `rate_per_s`: the best estimate, 0 if no rate tried reached `target`. At `low`,
    attainment is above the target with 95 % confidence; at `high`, below it; None if no rate tried was that clear.
    `note`: why the search ended, if not with a clear result."""

    rate_per_s: float
    low: float | None
    high: float | None
    target: float
    curve: tuple[tuple[float, Proportion], ...]
    note: str = ""


class Ask(NamedTuple):
    """A request for a run at `rate` per second, `times` as long as the first one at this rate."""

    rate: float
    times: int


class Search:
    """A search for the goodput: `while (ask := search.next()) is not None: search.tell(ask.rate, series)`. Raises
    `ConfigError`."""

    def __init__(
        self,
        first: float,
        *,
        target: float = 0.9,
        tolerance: float = 0.05,
        max_rate: float = math.inf,
        bound: float = math.inf,
        max_runs: int = 3,
        factor: float = 2.0,
    ) -> None:
        """`max_rate`: the highest rate to try. `bound`: a rate that is known to be too high. A rate gets at most
        `max_runs` runs, each twice as long as the one before it."""
        if not first > 0 or not max_rate > 0:
            raise ConfigError(f"a search needs a positive first rate, not {first:g}", param="rate")
        if not 0 < target <= 1 or not tolerance > 0 or max_runs < 1:
            raise ConfigError("a search needs 0 < target <= 1, tolerance > 0 and at least one run a rate")
        self._first = min(first, max_rate)
        self._target = target
        self._tolerance = tolerance
        self._max_rate = max_rate
        self._bound = bound
        self._factor = factor
        self._max_runs = max_runs
        self._runs: dict[float, list[Series]] = {}
        self._found: dict[float, Steady] = {}
        self._not_ours: dict[float, str] = {}
        self._left: dict[float, str] = {}

    def tell(self, rate: float, run: Series) -> None:
        """Add the result of a run at `rate`. `run`: at least one request."""
        self._runs.setdefault(rate, []).append(run)
        self._found[rate] = steady_state(self._runs[rate])

    def give_up_above(self, rate: float, why: str) -> None:
        """Do not try `rate` or higher ones again, since runs there do not measure the server. The result's note is
        `why`."""
        self._not_ours[rate] = why

    def leave(self, rate: float, why: str) -> None:
        """Do not run `rate` again, as there are too few requests for that. If it never ran, no higher rate is tried
        either. The result's note has `why`."""
        if rate in self._found:
            self._left[rate] = why
        else:
            self.give_up_above(rate, why)

    def next(self) -> Ask | None:
        low = self._low or 0.0
        high = min([*self._not_ours, self._high or math.inf])
        for rate, found in self._found.items():
            if low < rate < high and found.carried(self._target) is None and self._may_tell(rate):
                return Ask(rate, 2 ** len(self._runs[rate]))
        wanted = self._next_rate()
        return None if wanted is None else Ask(wanted, 1)

    def _may_tell(self, rate: float) -> bool:
        """Whether the runs that are left may decide this rate: they are long enough for its steady state, or may show
        that the queue grows. A queue beyond its capacity grows in proportion to time, while the limit for chance grows
        only with the square root of time."""
        runs = self._runs[rate]
        state = self._found[rate]
        left = 0
        if rate not in self._left:
            left = self._max_runs - len(runs)
        if not left:
            return False
        longest = len(runs[-1].met) * 2**left
        enough = 1.5 * longest * left  # the last two runs count; times `left`, as short runs measure `n_wanted` badly
        return state.n_wanted <= enough or state.growth * math.sqrt(2**left) > 1.0

    def _next_rate(self) -> float | None:
        low = self._low
        high = min([*self._not_ours, self._high or self._bound, self._bound])
        open_ = [rate for rate in self._found if (low or 0.0) < rate < high]
        most = max(open_, default=low)
        least = min(open_, default=high)
        if not self._found and not self._not_ours:
            return self._first
        if high == math.inf:
            assert most is not None
            if most < self._max_rate:
                return min(most * self._factor, self._max_rate)
            return None
        if low is None:
            tried = {*self._found, *self._not_ours}
            n_tried = sum(rate <= self._first for rate in tried)  # the steps become larger
            least = min([self._first, *tried])
            if least > self._first / _FAR_BELOW:
                return least / self._factor ** max(1, n_tried)
            return None
        gaps = [(low, high)] if most is None or not open_ else [(low, least), (most, high)]
        a, b = max(gaps, key=lambda gap: gap[1] / gap[0])
        if b / a > 1 + self._tolerance:
            return math.sqrt(a * b)
        return None

    @property
    def _low(self) -> float | None:
        high = self._high or math.inf
        return max((r for r, s in self._found.items() if r < high and s.carried(self._target)), default=None)

    @property
    def _high(self) -> float | None:
        return min((r for r, s in self._found.items() if s.carried(self._target) is False), default=None)

    def result(self) -> Goodput:
        """The goodput, from all runs so far."""
        curve = tuple((rate, found.met) for rate, found in sorted(self._found.items()))
        low = self._low
        high = self._high
        if high is None and self._bound < math.inf:
            high = self._bound
        return Goodput(
            rate_per_s=min(max(self._estimate(), low or 0.0), high or math.inf),
            low=low,
            high=high,
            target=self._target,
            curve=curve,
            note=self._note(),
        )

    def _estimate(self) -> float:
        """The rate at which attainment falls below the target. Short runs overestimate attainment. Counting the rates
        whose runs met the target but were too short as not carried gives too low an estimate; leaving them out gives
        too high an estimate, by about the same factor (`benchmarks/b22_intervals.py`). The result is the geometric mean
        of the two."""
        states = sorted(self._found.items())
        certain = self._low or 0.0
        settled = [(rate, s) for rate, s in states if s.settled or s.grows or s.met.share < self._target]
        least = self._crossing([(r, s) for r, s in states if r > certain or (r, s) in settled])
        return math.sqrt(least * max(least, self._crossing(settled, self._bound)))

    def _crossing(self, found: Sequence[tuple[float, Steady]], bound: float = math.inf) -> float:
        """The rate at which attainment crosses the target, interpolated between two rates. Waiting times have
        exponential tails that become longer towards the capacity (Kingman 1961), so the logarithm of the share of
        misses is nearly linear in between. The attainment of runs that were too short counts as 0, and so does that at
        the `bound`."""
        points = [(rate, s.met.share if s.settled else 0.0, s.met.n) for rate, s in found]
        points += [(bound, 0.0, 1)] if bound < math.inf else []
        low = (0.0, 0.0)
        most = math.log(max(1.0 - self._target, 1e-9))
        for (rate, share), (_, _, n) in zip(_falling(points), points):
            missed = math.log(max(1.0 - share, 0.5 / n))
            if share < self._target:
                if low[0]:
                    return low[0] * (rate / low[0]) ** ((most - low[1]) / (missed - low[1]))
                return 0.0
            low = (rate, min(missed, most))
        return low[0]

    def _note(self) -> str:
        return "; ".join(filter(None, (self._ending(), next(iter(self._left.values()), ""))))

    def _ending(self) -> str:
        if self._not_ours:
            return self._not_ours[min(self._not_ours)]
        shares = sorted((rate, s.met.share) for rate, s in self._found.items())
        if not shares:
            return ""
        if all(share >= self._target for _, share in shares):
            return f"the target was still reached at {shares[-1][0]:.4g} requests/s, the highest rate tried"
        if shares[0][1] < self._target:
            rate, share = shares[0]
            return f"the target was not reached at any rate: at {rate:.3g} requests/s, attainment was {share:.1%}"
        low = self._low or 0.0
        high = self._high or math.inf
        if open_ := [rate for rate, s in self._found.items() if low < rate < high and s.carried(self._target) is None]:
            n = max(len(run.met) for rate in open_ for run in self._runs[rate])
            return f"undecided in between: runs of {n} requests are too short to tell there"
        return ""


def _falling(points: list[tuple[float, float, int]]) -> list[tuple[float, float]]:
    """Pairs (rate, share) whose shares never rise with the rate: neighbours that do get their mean (pool adjacent
    violators). `points`: rate, share and number of requests, by rate."""
    pools: list[list[float]] = []  # share, weight, number of points
    for _, share, n in points:
        pools.append([share, n, 1])
        while len(pools) > 1 and pools[-1][0] > pools[-2][0]:
            share, n_, k = pools.pop()
            last = pools[-1]
            last[0] = (last[0] * last[1] + share * n_) / (last[1] + n_)
            last[1], last[2] = last[1] + n_, last[2] + k
    shares = [share for share, _, k in pools for _ in range(int(k))]
    return [(rate, share) for (rate, _, _), share in zip(points, shares)]
