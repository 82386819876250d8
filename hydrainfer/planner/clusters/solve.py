"""The best threshold and split of the home cluster, and the price of a GB from which a far cluster stops paying."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import msgspec
import numpy as np

from hydrainfer.core import ConfigError
from hydrainfer.planner.clusters.model import (
    GB,
    Arrangement,
    Floats,
    Service,
    Throughput,
    limits_of,
    link_prices,
    price_at,
    share_within,
    throughput,
    work_of,
)
from hydrainfer.planner.clusters.system import Clusters

Objective = Literal["rate", "cost"]
_THRESHOLDS = 1000  # 0.7 % apart between 128 and 131,072 tokens


class TtftLimit(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that the TTFT without queues may take, and the `share` of the requests that have to meet it."""

    seconds: float
    share: float = 0.9


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The best arrangement, what it carries, and the share of the requests that meet the limit of the TTFT, 1 without
    a limit."""

    arrangement: Arrangement
    throughput: Throughput
    within: float = 1.0


class BreakEven(msgspec.Struct, frozen=True, kw_only=True):
    """`price_per_gb`: the highest at which some arrangement with the far cluster costs no more per request than another
    deployment does. `arrangement`: the one that costs the same there."""

    price_per_gb: float
    arrangement: Arrangement


@dataclass(frozen=True, slots=True)
class _Grid:
    """All thresholds that meet the limit of the TTFT, the longest first, times all splits: `rates[i, n]` with `n`
    instances that prefill at home. `sent_gb[i, k]`: of the average request, by the k-th far cluster."""

    thresholds: Floats
    rates: Floats
    sent_gb: Floats
    link_prices: Floats
    device_prices: Floats
    within: Floats

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
    ttft: TtftLimit | None = None,
    max_price: float = math.inf,
    n_thresholds: int = _THRESHOLDS,
) -> Answer:
    """The arrangement that carries the highest rate, or whose requests cost least when it carries all it can.

    Tries each split of the home cluster with `n_thresholds` thresholds, equally apart in their logarithm, from the
    shortest prompt (all go to the far clusters) to the longest (none does). Of several that are equally good, the one
    that sends least over the links. A link's `max_share` limits as its rate does. If no threshold meets the limit of
    the TTFT, the one with which most requests do. `max_price`: of a request, if an arrangement costs no more. Raises
    `ConfigError`.
    """
    grid = _grid_of(clusters, service, ttft, n_thresholds)
    prices = grid.device_prices + grid.link_prices[:, None]
    scores = -prices if objective == "cost" else grid.rates
    if np.min(prices) <= max_price:
        scores = np.where(prices <= max_price, scores, -np.inf)
    place = _best(scores)
    arrangement = grid.arrangement(clusters, place)
    return Answer(
        arrangement=arrangement,
        throughput=throughput(clusters, arrangement, service),
        within=float(grid.within[place[0]]),
    )


def rates_by_split(
    clusters: Clusters, *, ttft: TtftLimit | None = None, n_thresholds: int = _THRESHOLDS
) -> list[float]:
    """The highest rate with 0, 1, ... instances at home that prefill, each with its best threshold."""
    grid = _grid_of(clusters, "mean_time", ttft, n_thresholds)
    return [float(rate) for rate in np.max(grid.rates, axis=0)]


def break_even(
    clusters: Clusters,
    other_price: float,
    *,
    name: str | None = None,
    service: Service = "mean_time",
    ttft: TtftLimit | None = None,
    n_thresholds: int = _THRESHOLDS,
) -> BreakEven | None:
    """The price of a GB from which every arrangement that uses the far cluster costs more than `other_price` per
    request, e.g. that of home alone. None if that is so even with a link that costs nothing. `name`: of the far
    cluster; None for the first. The price of its own link does not matter; those of the others' do. Raises
    `ConfigError`."""
    k = 0
    if name is not None:
        k = [cluster.name for cluster in clusters.far].index(name)
    links = [
        msgspec.structs.replace(link, price_per_gb=0.0) if i == k else link for i, link in enumerate(clusters.links)
    ]
    grid = _grid_of(replace(clusters, links=tuple(links)), service, ttft, n_thresholds)
    saved = other_price - grid.device_prices - grid.link_prices[:, None]
    sent_gb = np.broadcast_to(grid.sent_gb[:, k : k + 1], saved.shape)
    prices = np.divide(saved, sent_gb, out=np.full(saved.shape, -np.inf), where=sent_gb > 0.0)
    place = _best(prices)
    if prices[place] < 0.0:
        return None
    return BreakEven(price_per_gb=float(prices[place]), arrangement=grid.arrangement(clusters, place))


def _grid_of(clusters: Clusters, service: Service, ttft: TtftLimit | None, n_thresholds: int) -> _Grid:
    if n_thresholds < 2:
        raise ConfigError(f"{n_thresholds} thresholds: at least 2 are needed", param="n_thresholds")
    lengths = clusters.lengths
    steps = np.geomspace(lengths.longest, lengths.shortest, n_thresholds)
    thresholds = np.concatenate(([lengths.longest], steps[1:-1], [0.0]))
    work = work_of(clusters, thresholds, service)
    within = np.ones_like(thresholds)
    if ttft is not None:
        within = share_within(clusters, work, ttft.seconds)
        chosen = within >= min(ttft.share, np.max(within))
        thresholds, within = thresholds[chosen], within[chosen]
        work = work_of(clusters, thresholds, service)
    n_prefill = np.arange(clusters.home.instances + 1, dtype=np.float64)
    n_decode = clusters.home.instances - n_prefill
    rates = np.full((len(thresholds), len(n_prefill)), np.inf)
    for j in range(len(n_prefill)):
        at_split = limits_of(clusters, work, n_prefill[j : j + 1], n_decode[j : j + 1])
        for limit in at_split.values():
            rates[:, j] = np.minimum(rates[:, j], limit)
    sent_gb = (work.sent_bytes / GB).T
    return _Grid(thresholds, rates, sent_gb, link_prices(clusters, work), price_at(clusters, rates), within)


def _best(scores: Floats) -> tuple[int, int]:
    """Where the highest score is, the first of several."""
    i, j = np.unravel_index(np.argmax(scores), scores.shape)
    return int(i), int(j)
