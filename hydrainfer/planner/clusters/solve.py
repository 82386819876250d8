"""The best threshold and split of the home cluster, and the price of a GB from which a far cluster stops paying."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from hydrainfer.core import ConfigError
from hydrainfer.planner.clusters.model import (
    GB,
    Arrangement,
    Clusters,
    Floats,
    Service,
    Throughput,
    limits_of,
    price_at,
    throughput,
    work_of,
)

Objective = Literal["rate", "cost"]
_THRESHOLDS = 1000  # 0.7 % apart between 128 and 131,072 tokens


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The best arrangement, and what it carries."""

    arrangement: Arrangement
    throughput: Throughput


class BreakEven(msgspec.Struct, frozen=True, kw_only=True):
    """`price_per_gb`: the highest at which some arrangement with the far cluster costs no more per request than another
    deployment does. `arrangement`: the one that costs the same there."""

    price_per_gb: float
    arrangement: Arrangement


@dataclass(frozen=True, slots=True)
class _Grid:
    """All thresholds, the longest first, times all splits: `rates[i, n]` with `n` instances that prefill at home."""

    thresholds: Floats
    rates: Floats
    far_bytes: Floats
    device_prices: Floats

    def arrangement(self, clusters: Clusters, place: tuple[int, int]) -> Arrangement:
        i, n_prefill = place
        return Arrangement(
            threshold=float(self.thresholds[i]), n_prefill=n_prefill, n_decode=clusters.home.instances - n_prefill
        )


def solve(
    clusters: Clusters,
    *,
    objective: Objective = "rate",
    service: Service = "mean_time",
    n_thresholds: int = _THRESHOLDS,
) -> Answer:
    """The arrangement that carries the highest rate, or whose requests cost least when it carries all it can.

    Tries each split of the home cluster with `n_thresholds` thresholds, equally apart in their logarithm, from the
    shortest prompt (all go to the far cluster) to the longest (none does). Of several that are equally good, the one
    that sends least over the link. The link's `max_share` limits as its rate does. Raises `ConfigError`.
    """
    grid = _grid_of(clusters, service, n_thresholds)
    if objective == "rate":
        scores = grid.rates
    else:
        price_per_gb = clusters.link.price_per_gb if clusters.link is not None else 0.0
        scores = -(grid.device_prices + (grid.far_bytes / GB * price_per_gb)[:, None])
    arrangement = grid.arrangement(clusters, _best(scores))
    return Answer(arrangement=arrangement, throughput=throughput(clusters, arrangement, service))


def break_even(
    clusters: Clusters, other_price: float, *, service: Service = "mean_time", n_thresholds: int = _THRESHOLDS
) -> BreakEven | None:
    """The price of a GB from which every arrangement that uses the far cluster costs more than `other_price` per
    request, e.g. that of home alone. None if that is so even with a link that costs nothing. The link's own price does
    not matter. Raises `ConfigError`."""
    grid = _grid_of(clusters, service, n_thresholds)
    saved = other_price - grid.device_prices
    used = np.broadcast_to((grid.far_bytes > 0.0)[:, None], saved.shape)
    sent_gb = np.broadcast_to((grid.far_bytes / GB)[:, None], saved.shape)
    prices = np.divide(saved, sent_gb, out=np.full(saved.shape, -np.inf), where=used)
    place = _best(prices)
    if prices[place] < 0.0:
        return None
    return BreakEven(price_per_gb=float(prices[place]), arrangement=grid.arrangement(clusters, place))


def _grid_of(clusters: Clusters, service: Service, n_thresholds: int) -> _Grid:
    if n_thresholds < 2:
        raise ConfigError(f"{n_thresholds} thresholds: at least 2 are needed", param="n_thresholds")
    lengths = clusters.lengths
    steps = np.geomspace(lengths.longest, lengths.shortest, n_thresholds)
    thresholds = np.concatenate(([lengths.longest], steps[1:-1], [0.0]))
    n_prefill = np.arange(clusters.home.instances + 1, dtype=np.float64)
    n_decode = clusters.home.instances - n_prefill
    work = work_of(clusters, thresholds, service)
    shape = (len(thresholds), len(n_prefill))
    rates = np.full(shape, np.inf)
    for j in range(shape[1]):
        at_split = limits_of(clusters, work, n_prefill[j : j + 1], n_decode[j : j + 1])
        for limit in at_split.values():
            rates[:, j] = np.minimum(rates[:, j], limit)
    return _Grid(thresholds, rates, work.far_bytes, price_at(clusters, rates))


def _best(scores: Floats) -> tuple[int, int]:
    """Where the highest score is, the first of several."""
    i, j = np.unravel_index(np.argmax(scores), scores.shape)
    return int(i), int(j)
