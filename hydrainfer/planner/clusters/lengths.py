"""Lengths of prompts, as a distribution: a sample, or a truncated log-normal cut into many pieces."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hydrainfer.core import ConfigError

_PIECES = 16384  # of a log-normal: each 0.04 % longer than the last between 128 and 131,072 tokens


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """How many uncached tokens prompts have: ascending `tokens`, and the share of the requests that have so many."""

    tokens: NDArray[np.float64]
    shares: NDArray[np.float64]

    @classmethod
    def of(cls, sample: Sequence[float]) -> Lengths:
        """The lengths of a sample, each as likely as the others. Raises `ConfigError`."""
        if not sample or not all(math.isfinite(n) and n > 0 for n in sample):
            raise ConfigError("lengths: a sample needs at least one length, and all of them positive", param="lengths")
        return cls(np.sort(np.asarray(sample, dtype=np.float64)), np.full(len(sample), 1.0 / len(sample)))

    @property
    def shortest(self) -> float:
        return float(self.tokens[0])

    @property
    def longest(self) -> float:
        return float(self.tokens[-1])

    @property
    def mean_tokens(self) -> float:
        return self.mean(self.tokens)

    def mean(self, values: NDArray[np.float64]) -> float:
        """The mean over requests of something that has a value for each of `tokens`."""
        return float(self.shares @ values)

    def quantile(self, share: float, values: NDArray[np.float64] | None = None) -> float:
        """The smallest number that `values` do not exceed for this share of the requests; without values, of tokens."""
        values = self.tokens if values is None else values
        order = np.argsort(values, kind="stable")
        reached = np.cumsum(self.shares[order])
        place = int(np.searchsorted(reached, share * reached[-1]))
        return float(values[order][min(place, len(values) - 1)])


def log_normal(mu: float, sigma: float, shortest: float, longest: float) -> Lengths:
    """Lengths whose natural logarithm is normal with mean `mu` and deviation `sigma`, if between `shortest` and
    `longest` tokens. Raises `ConfigError`."""
    if not (math.isfinite(mu) and 0.0 < sigma < math.inf and 0.0 < shortest < longest < math.inf):
        raise ConfigError(
            f"lengths: no log-normal has mu={mu:g}, sigma={sigma:g}, shortest={shortest:g}, longest={longest:g}",
            param="lengths",
        )
    edges = np.geomspace(shortest, longest, _PIECES + 1)
    # erfc of the nearer tail, so that pieces far from the middle keep their digits
    z = (np.log(edges) - mu) / (sigma * math.sqrt(2.0))
    below = np.array([math.erfc(-x) for x in z])
    above = np.array([math.erfc(x) for x in z])
    shares = np.where(z[1:] < 0.0, np.diff(below), -np.diff(above))
    if not shares.sum() > 0.0:
        raise ConfigError(
            f"lengths: a log-normal with mu={mu:g}, sigma={sigma:g} has nothing between {shortest:g} and {longest:g}",
            param="lengths",
        )
    return Lengths(np.sqrt(edges[:-1] * edges[1:]), shares / shares.sum())
