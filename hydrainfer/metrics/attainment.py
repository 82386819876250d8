"""Judges whether requests meet their SLO, and how certain a share or a percentile of a sample is.

The definitions are those of the paper, section 2.3. Intervals are two-sided at 95 %. Requests that wait in one queue
share their luck, so that a share of them is less certain than as many independent ones would make it: its interval is
that of the number of independent requests which would scatter as much (`effective_n`). Those of percentiles take
samples as independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from hydrainfer.config import Slo

Z95 = 1.959963984540054
"""The half width, in standard deviations, of an interval that covers 95 % of a normal distribution."""


class Verdict(NamedTuple):
    """The limits that one request kept; a limit that was not set is kept. A failed request keeps none."""

    ttft: bool
    tpot: bool
    e2e: bool

    @property
    def met(self) -> bool:
        return self.ttft and self.tpot and self.e2e


FAILED = Verdict(False, False, False)


def judge(slo: Slo, ttft_s: float | None, interval_s: Sequence[float], e2e_s: float) -> Verdict:
    """`interval_s`: one entry per token after the first. `ttft_s` None: it had no token at all, which is a miss."""
    if ttft_s is None:
        return FAILED
    within = True
    if slo.tpot_s is not None and interval_s:
        n_within = sum(s <= slo.tpot_s for s in interval_s)
        within = n_within >= slo.token_share * len(interval_s) - 1e-9
    return Verdict(slo.ttft_s is None or ttft_s <= slo.ttft_s, within, slo.e2e_s is None or e2e_s <= slo.e2e_s)


class Proportion(NamedTuple):
    """`n_met` of `n`, with its interval."""

    n: int
    n_met: int
    share: float
    low: float
    high: float

    @classmethod
    def of(cls, n_met: int, n: int, n_effective: float | None = None) -> Proportion:
        """`n_effective`: the number of independent samples that say as much; None: all are independent."""
        share = n_met / n if n else 0.0
        return cls(n, n_met, share, *wilson(share, float(n) if n_effective is None else n_effective))

    @classmethod
    def of_each(cls, met: Sequence[bool]) -> Proportion:
        """The share of requests that met it, given in the order of their arrival, with an interval by `effective_n`."""
        return cls.of(sum(met), len(met), effective_n(met))


def wilson(share: float, n: float, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval of a proportion (Wilson 1927); (0, 1) where there is no sample."""
    if n == 0:
        return 0.0, 1.0
    z2 = z * z
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = z / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return (0.0 if share == 0 else max(0.0, centre - half)), (1.0 if share == 1 else min(1.0, centre + half))


def effective_n(met: Sequence[bool], n_batches: int = 12) -> float:
    """The number of independent samples whose mean scatters as that of `met` does, by batch means: from the variance
    between `n_batches` consecutive stretches. At most `len(met)`, which it is where there are too few to tell."""
    n, size = len(met), len(met) // n_batches
    if size < 5:
        return float(n)
    means = [sum(met[i * size : (i + 1) * size]) / size for i in range(n_batches)]
    share = sum(means) / n_batches
    variance = sum((m - share) ** 2 for m in means) / (n_batches - 1)
    if variance == 0:
        return float(n)
    return min(float(n), max(share * (1 - share) / variance, 1.0) * n_batches)


def quantile_interval(ordered: Sequence[float], q: float, z: float = Z95) -> tuple[float | None, float | None]:
    """The interval of the `q` quantile, by ranks, whatever the distribution (the normal approximation to the binomial
    number of samples below it). None on a side where the sample is too small to tell."""
    n = len(ordered)
    if n == 0:
        return None, None
    half = z * math.sqrt(n * q * (1 - q))
    low, high = math.floor(n * q - half), math.ceil(n * q + half)  # ranks from 1
    return (ordered[low - 1] if low >= 1 else None), (ordered[high] if high < n else None)
