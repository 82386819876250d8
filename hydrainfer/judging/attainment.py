"""SLO attainment: whether requests meet their SLO, and confidence intervals of shares and percentiles.

The definitions are those of the paper, section 2.3. Intervals are two-sided at 95 %. Requests that wait in one queue
have correlated delays, so a share of them is less certain than that of as many independent requests. Its interval is
that of the number of independent requests whose share would vary as much (`effective_n`). The intervals of percentiles
assume independent samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from hydrainfer.config import Slo

Number = TypeVar("Number", int, float)
N_BATCHES = 20
_ROUNDING = 1e-9  # a standard deviation below this share of the mean counts as zero
Z95 = 1.959963984540054
"""The half width, in standard deviations, of an interval that covers 95 % of a normal distribution."""


class Verdict(NamedTuple):
    """Which limits of the SLO one request met. A limit that is not set is met. A failed request meets none."""

    ttft: bool
    tpot: bool
    e2e: bool

    @property
    def met(self) -> bool:
        return self.ttft and self.tpot and self.e2e


FAILED = Verdict(False, False, False)


def judge(slo: Slo, ttft_s: float | None, interval_s: Sequence[float], e2e_s: float) -> Verdict:
    """The verdict on one request. `interval_s`: one entry per token after the first. `ttft_s` None: the request had no
    token, and failed."""
    if ttft_s is None:
        return FAILED
    within = True
    if slo.tpot_s is not None and interval_s:
        n_within = sum(s <= slo.tpot_s for s in interval_s)
        within = n_within >= slo.token_share * len(interval_s) - 1e-9
    return Verdict(slo.ttft_s is None or ttft_s <= slo.ttft_s, within, slo.e2e_s is None or e2e_s <= slo.e2e_s)


class Proportion(NamedTuple):
    """The share `n_met` / `n`, with its 95 % interval."""

    n: int
    n_met: int
    share: float
    low: float
    high: float

    @classmethod
    def of(cls, n_met: int, n: int, n_effective: float | None = None) -> Proportion:
        """The proportion `n_met` / `n`. `n_effective`: the number of independent samples for the interval; None: all
        `n` are independent."""
        share = n_met / n if n else 0.0
        return cls(n, n_met, share, *wilson(share, float(n) if n_effective is None else n_effective))

    @classmethod
    def of_each(cls, met: Sequence[bool]) -> Proportion:
        """The share of requests that met their SLO, with an interval by `effective_n`. `met`: in order of arrival."""
        return cls.of(sum(met), len(met), effective_n(met))


def wilson(share: float, n: float, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval of a proportion (Wilson 1927); (0, 1) without samples."""
    if n == 0:
        return 0.0, 1.0
    z2 = z * z
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = z / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return (0.0 if share == 0 else max(0.0, centre - half)), (1.0 if share == 1 else min(1.0, centre + half))


def effective_n(*runs: Sequence[float] | NDArray[np.float64]) -> float:
    """The effective sample size: the number of independent values whose mean has the variance of the mean of the runs'
    values. Found by batch means: from the variance between `N_BATCHES` batches and the correlation of neighbouring
    batches. At most the number of values; exactly that if there are too few to tell."""
    each = [np.asarray(run, dtype=float) for run in runs]
    values = np.concatenate(each)
    n = len(values)
    size = len(values) // N_BATCHES
    if size < 5:
        return float(n)
    mean = float(values.mean())
    variance = float(values.var())
    if variance <= (_ROUNDING * mean) ** 2:
        return float(n)
    batches = [run[len(run) % size :].reshape(-1, size).mean(axis=1) - mean for run in each]
    means = np.concatenate(batches)
    between = float(means @ means) / (len(means) - 1)
    if between == 0.0:
        return float(n)
    lagged = sum(float(own[1:] @ own[:-1]) for own in batches) / max(1, len(means) - len(batches))
    together = min(max(lagged / between, 0.0), 0.8)
    return min(float(n), variance / between * len(means) * (1 - together) / (1 + together))


def at_quantile(ordered: Sequence[Number], q: float) -> Number:
    """The sample at the `q` quantile, by rank. `ordered`: at least one sample, in ascending order."""
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def quantile_interval(ordered: Sequence[float], q: float) -> tuple[float | None, float | None]:
    """The 95 % interval of the `q` quantile, by ranks, for any distribution (normal approximation to the binomial
    number of samples below the quantile). None for an end for which there are too few samples."""
    n = len(ordered)
    if n == 0:
        return None, None
    half = Z95 * math.sqrt(n * q * (1 - q))
    # ranks from 1
    low = math.floor(n * q - half)
    high = math.ceil(n * q + half)
    return (ordered[low - 1] if low >= 1 else None), (ordered[high] if high < n else None)
