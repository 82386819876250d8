"""Whether a rate would be carried in the steady state, judged from runs of finite length.

A run begins with empty queues, which makes it look too good, and the delays of neighbouring requests are correlated.
So for each run,

- the warm-up is left out: the number of requests that minimizes the marginal standard error of the delays (MSER-5,
  White 1997);
- the share that met the SLO gets an interval by batch means, widened if neighbouring batches are still correlated;
- the share counts only if the run is many times as long as the relaxation time of the queue. In heavy traffic that is
  `8 L² / v` requests, where `L` is the mean backlog in requests beyond the usual, and `v` the sum of the squared
  coefficients of variation of arrivals and of work (relaxation time of reflected Brownian motion, Harrison 1985);
- a queue certainly grows if it is longer at the end than a queue at the edge of its capacity gets. The latter is a
  reflected random walk: the limit is `sqrt(v n)` times a quantile of the normal distribution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, median

import msgspec
import numpy as np
from numpy.typing import NDArray

from hydrainfer.config import Slo
from hydrainfer.judging.attainment import Z95, Proportion, effective_n, wilson

ENOUGH = 24.0
"""The number of relaxation times that a run must last for its share to count as that of the steady state."""
_STABLE = 8.0
"""The same, for a limit so high that only a queue that grows without end could exceed it: hardly one in 40 queues at
the edge of its capacity looks so short for so long."""
_FAR = 7.0  # mean waits; in an exponential tail less than one in a thousand requests waits longer
_PER_RELAXATION = 1.5  # the most independent requests per relaxation time
_WORK_CV2 = 1.0  # squared coefficient of variation of the work, which is not observed: that of exponential times
_T95, _SURE = 2.093, 2.861  # Student's t, 19 degrees of freedom: 95 %; 99 %, as the test is made repeatedly
_GROWS = NormalDist().inv_cdf(1 - 0.025 / 2)  # a reflected walk has two tails


class Series(msgspec.Struct, frozen=True):
    """The requests of one run in the order of arrival. `at_s`: arrival times; `delay_s`: times to first token, inf for
    none; `met`: whether the SLO was met. `limit_s`: the SLO's limit on the delay (`delay_limit_s`), 0 if not known."""

    at_s: Sequence[float] | NDArray[np.float64]
    delay_s: Sequence[float] | NDArray[np.float64]
    met: Sequence[bool] | NDArray[np.bool_]
    limit_s: float = 0.0


def delay_limit_s(slo: Slo, rest_s: Sequence[float]) -> float:
    """The longest time to first token with which a request meets the SLO; inf if the SLO only limits tokens. `rest_s`:
    the seconds from the first token to the end of each request. An E2E limit leaves what their median does not take."""
    of_e2e = math.inf if slo.e2e_s is None else slo.e2e_s - median(rest_s or [0.0])
    return min(of_e2e, math.inf if slo.ttft_s is None else slo.ttft_s)


class Steady(msgspec.Struct, frozen=True, kw_only=True):
    """The steady state at a rate. `met`: the share that meets the SLO, after `n_warmup` requests. `n_effective`: the
    effective number of independent requests. `growth`: the length of the queue at the end, relative to the limit for a
    queue at the edge of its capacity. `n_wanted`: the number of requests after which the share counts as steady."""

    met: Proportion
    n_effective: float
    n_warmup: int
    growth: float
    n_wanted: int

    @property
    def grows(self) -> bool:
        """Whether the queue certainly grows."""
        return self.growth > 1.0

    @property
    def settled(self) -> bool:
        """Whether the runs were long enough."""
        return self.n_wanted <= self.met.n

    def carried(self, target: float) -> bool | None:
        """Whether the rate is carried, that is, at least a share `target` of the requests meets the SLO. None if the
        runs cannot tell."""
        if self.grows:
            return False
        low, high = wilson(self.met.share, self.n_effective, _SURE)
        if not self.settled or low < target <= high:
            return None
        return self.met.share >= target


def steady_state(runs: Sequence[Series]) -> Steady:
    """The steady state estimated from independent runs at one rate. Runs less than half as long as the longest are left
    out."""
    longest = max(len(run.met) for run in runs)
    runs = [run for run in runs if 2 * len(run.met) >= longest]
    delays = [_capped(run) for run in runs]
    cuts = [warm_up(each) for each in delays]
    met = [np.asarray(run.met[cut:], dtype=float) for run, cut in zip(runs, cuts)]
    n = sum(len(m) for m in met)
    share = sum(float(m.sum()) for m in met) / n
    relaxation = max(_relaxation(run) for run in runs)
    delays = [each[cut:] for each, cut in zip(delays, cuts)]
    n_effective = effective_n(*met)
    enough = _STABLE
    if not all(_far(run) for run in runs):
        n_effective = min(n_effective, effective_n(*delays), _PER_RELAXATION * n / relaxation)
        enough = ENOUGH
    met_share = Proportion.of(round(share * n), n, n_effective * (Z95 / _T95) ** 2)
    return Steady(
        met=met_share,
        n_effective=n_effective,
        n_warmup=sum(cuts),
        growth=max(map(_growth, runs)),
        n_wanted=math.ceil(enough * relaxation),
    )


def warm_up(values: NDArray[np.float64]) -> int:
    """The number of values to leave out at the beginning, at most half of them (MSER-5)."""
    means = values[: len(values) // 5 * 5].reshape(-1, 5).mean(axis=1)
    m = len(means)
    if m < 10:
        return 0
    left = np.arange(m, m - m // 2, -1)
    after = np.cumsum(means[::-1])[::-1][: len(left)]
    squares = np.cumsum(means[::-1] ** 2)[::-1][: len(left)]
    return int(np.argmin((squares - after**2 / left) / left**2)) * 5


def _capped(run: Series) -> NDArray[np.float64]:
    """The delays. Infinite ones are replaced by the longest finite one."""
    delays = np.asarray(run.delay_s, dtype=float)
    finite = np.isfinite(delays)
    return np.where(finite, delays, delays[finite].max() if finite.any() else 0.0)


def _variation(run: Series) -> float:
    gaps = np.diff(run.at_s)
    mean = float(gaps.mean()) if len(gaps) else 0.0
    return (float(gaps.var()) / mean**2 if mean else 0.0) + _WORK_CV2


def _backlog(run: Series) -> NDArray[np.float64]:
    """The backlog in requests, beyond that of the quietest batch, per batch. There are as many batches as requests in a
    batch."""
    delays = _capped(run)
    size = max(1, math.isqrt(len(delays)))
    means = delays[: len(delays) // size * size].reshape(-1, size).mean(axis=1)
    span = run.at_s[-1] - run.at_s[0]
    return (means - means.min()) * (len(delays) / span if span > 0.0 else 0.0)


def _far(run: Series) -> bool:
    """Whether the SLO's limit is far beyond the delays."""
    delays = _capped(run)
    rate = len(delays) / max(run.at_s[-1] - run.at_s[0], 1e-9)
    usual_s = float(np.quantile(delays, 0.9))
    return run.limit_s > usual_s + _FAR * float(_backlog(run).mean()) / rate


def _relaxation(run: Series) -> float:
    """The relaxation time, in requests. Exact for M/M/1 (1 / (1 - sqrt(rho))^2 services); for other queues correct in
    heavy traffic."""
    backlog = float(_backlog(run).mean())
    return max(1.0, backlog * (1 + backlog) * (1 + math.sqrt(backlog / (1 + backlog))) ** 2 * 2 / _variation(run))


def _growth(run: Series) -> float:
    return float(_backlog(run)[-1]) / (_GROWS * math.sqrt(_variation(run) * len(run.met)))
