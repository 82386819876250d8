"""The choice among far clusters, and what it is compared with: home alone, all prefill far, the fastest, the
cheapest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import msgspec
import numpy as np

from hydrainfer.planner.clusters.model import (
    GB,
    Arrangement,
    Throughput,
    limits_of,
    prefill_seconds,
    share_within,
    throughput,
    work_of,
)
from hydrainfer.planner.clusters.plan import (
    ALL_FAR,
    ALONE,
    CHEAPEST,
    CHOSEN,
    FASTEST,
    Curves,
    Deployment,
    LinkPoint,
    PricePoint,
    SplitPoint,
    ThresholdPoint,
    Worth,
)
from hydrainfer.planner.clusters.solve import Answer, Objective, TtftLimit, break_even, rates_by_split, solve
from hydrainfer.planner.clusters.system import Clusters

_GAIN = 0.01  # of the rate, from which a far cluster is worth it if there are no prices
_MORE = 1e-3  # of the rate or the cost, from which one more far cluster is
_ROUNDING = 1e-9
_GBIT = 1e9 / 8
_THOUSAND = 1e3
_POINTS, _LINK_POINTS, _PRICE_POINTS = 60, 15, 41
_SLOWEST, _FASTEST = 1 / 64, 2.0  # times the links' rate
_DEAREST = 2.0  # times the price at which far clusters stop paying, or their links' own


@dataclass(frozen=True, slots=True)
class Candidate:
    """Some of the clusters, and their best arrangement."""

    clusters: Clusters
    answer: Answer

    @property
    def throughput(self) -> Throughput:
        return self.answer.throughput

    def is_like(self, other: Candidate) -> bool:
        """Whether both have the same clusters and arrangement."""
        return self.clusters.far == other.clusters.far and self.answer.arrangement == other.answer.arrangement

    def meets(self, ttft: TtftLimit | None) -> bool:
        return ttft is None or self.answer.within >= ttft.share - _ROUNDING


@dataclass(frozen=True, slots=True)
class Choice:
    """What to deploy, and what it was chosen from. `fastest`, `cheapest`: of those with far clusters that meet the
    limit of the TTFT; None if none does, or prices are not known. `pays`, `met`: as in `ClusterPlan`; if nothing meets
    the limit, `chosen` comes nearest."""

    chosen: Candidate
    alone: Candidate
    fastest: Candidate | None
    cheapest: Candidate | None
    pays: bool | None
    met: bool


def choose(clusters: Clusters, objective: Objective, ttft: TtftLimit | None, *, priced: bool) -> Choice:
    """Tries each choice of far clusters. With prices, far clusters are chosen only if a request then costs no more than
    on home alone; if that does not meet the limit of the TTFT and all that do cost more, whatever they cost. Raises
    `ConfigError`."""
    alone = Candidate(clusters.alone, solve(clusters.alone, ttft=ttft))
    able = alone.meets(ttft)
    some = list(_with_far(clusters))
    every = [Candidate(each, solve(each, ttft=ttft)) for each in some]
    fast = [candidate for candidate in every if candidate.meets(ttft)]
    if not able and not fast:
        nearest = max([alone, *every], key=lambda candidate: candidate.answer.within)
        return Choice(nearest, alone, None, None, None, False)
    fastest = _first_best(fast, [candidate.throughput.rate for candidate in fast])
    if not priced:
        chosen = alone
        if fastest is not None and (not able or fastest.throughput.rate > alone.throughput.rate * (1.0 + _GAIN)):
            chosen = fastest
        return Choice(chosen, alone, fastest, None, None, True)
    cheap = [Candidate(each, solve(each, objective="cost", ttft=ttft)) for each in some]
    cheap = [candidate for candidate in cheap if candidate.meets(ttft)]
    cheapest = _first_best(cheap, [-candidate.throughput.price for candidate in cheap])
    pays = cheapest is not None and cheapest.throughput.price < alone.throughput.price
    chosen = alone
    if fastest is not None and cheapest is not None and (pays or not able):
        chosen = cheapest
        if objective == "rate":
            chosen = fastest
        if objective == "rate" and pays:
            chosen = _fastest_up_to(alone.throughput.price, cheap, ttft)
    return Choice(chosen, alone, fastest, cheapest, pays, True)


def deployment_of(name: str, candidate: Candidate, ttft: TtftLimit | None, *, priced: bool) -> Deployment:
    """A candidate in the units of a plan."""
    clusters, arrangement, carried = candidate.clusters, candidate.answer.arrangement, candidate.throughput
    seconds = prefill_seconds(clusters, arrangement.threshold)
    used = carried.far_share > 0.0
    return Deployment(
        name=name,
        far=tuple(cluster.name for cluster in clusters.far) if used else (),
        threshold=arrangement.threshold if used else None,
        n_prefill=arrangement.n_prefill,
        n_decode=arrangement.n_decode,
        rate=carried.rate,
        limit=carried.limit,
        far_share=carried.far_share,
        egress_gbps=carried.egress_bytes_per_s / _GBIT,
        link_share=carried.link_share,
        request_gb=carried.bytes_per_request / GB,
        device_cost=carried.device_price * _THOUSAND if priced else None,
        link_cost=carried.link_price * _THOUSAND if priced else None,
        ttft_mean=seconds.mean,
        ttft_p90=seconds.p90,
        ttft_met=candidate.answer.within if ttft is not None else 1.0,
        guessed=carried.guessed_share,
        uses=carried.far,
    )


def all_far(clusters: Clusters, ttft: TtftLimit | None) -> Candidate:
    """All prompts go to all far clusters, and all instances at home decode."""
    arrangement = Arrangement(threshold=0.0, n_prefill=0, n_decode=clusters.home.instances)
    within = 1.0
    if ttft is not None:
        work = work_of(clusters, np.array([0.0]), "mean_time")
        within = float(share_within(clusters, work, ttft.seconds)[0])
    answer = Answer(arrangement=arrangement, throughput=throughput(clusters, arrangement), within=within)
    return Candidate(clusters, answer)


def worth_of(clusters: Clusters, ttft: TtftLimit | None) -> tuple[Worth, ...]:
    """The price of a GB from which each far cluster stops paying: from there, every choice with it costs more than the
    cheapest without."""
    alone = Candidate(clusters.alone, solve(clusters.alone, ttft=ttft))
    costs = [(each, solve(each, objective="cost", ttft=ttft).throughput.price) for each in _with_far(clusters)]
    worth = []
    for far in clusters.far:
        without = [price for each, price in costs if far not in each.far]
        other = min([alone.throughput.price, *without])
        evens = [break_even(each, other, name=far.name, ttft=ttft) for each, _ in costs if far in each.far]
        best = max((even for even in evens if even is not None), key=lambda even: even.price_per_gb, default=None)
        if best is None:
            worth.append(Worth(name=far.name, price_per_gb=None))
            continue
        split = best.arrangement
        worth.append(
            Worth(name=far.name, price_per_gb=best.price_per_gb, threshold=split.threshold, n_prefill=split.n_prefill)
        )
    return tuple(worth)


def deployments_of(
    clusters: Clusters, choice: Choice, ttft: TtftLimit | None, *, priced: bool
) -> tuple[Deployment, ...]:
    """The chosen deployment, home alone, all prefill far, and the fastest and the cheapest if they are others."""
    candidates = {CHOSEN: choice.chosen, ALONE: choice.alone}
    if choice.chosen is choice.alone:
        del candidates[CHOSEN]
    if clusters.far:
        candidates[ALL_FAR] = all_far(clusters, ttft)
    known = [choice.chosen]
    for name, candidate in ((FASTEST, choice.fastest), (CHEAPEST, choice.cheapest)):
        if candidate is not None and not any(candidate.is_like(other) for other in known):
            candidates[name] = candidate
            known.append(candidate)
    return tuple(deployment_of(name, each, ttft, priced=priced) for name, each in candidates.items())


def curves_of(choice: Choice, ttft: TtftLimit | None, worth: Sequence[Worth]) -> Curves | None:
    """The curves around the chosen deployment or, if that is home alone, around the fastest. `worth`: () if prices are
    not known. None if no far cluster is in either."""
    name, candidate = CHOSEN, choice.chosen
    if not candidate.clusters.far:
        if choice.fastest is None:
            return None
        name, candidate = FASTEST, choice.fastest
    clusters, planned = candidate.clusters, candidate.answer.arrangement
    return Curves(
        of=name,
        thresholds=tuple(_thresholds(clusters, planned)),
        splits=tuple(_splits(clusters, planned, ttft)),
        links=tuple(_links(clusters, planned, ttft)),
        prices=tuple(_prices(clusters, ttft, max((w.price_per_gb or 0.0 for w in worth), default=0.0))),
    )


def _with_far(clusters: Clusters) -> Iterator[Clusters]:
    """Every choice of far clusters, the smallest first."""
    names = [cluster.name for cluster in clusters.far]
    for n in range(1, len(names) + 1):
        for some in combinations(names, n):
            yield clusters.with_far(some)


def _first_best(candidates: Sequence[Candidate], scores: Sequence[float]) -> Candidate | None:
    """The candidate with the highest score; of several that hardly differ, the first."""
    best = None
    highest = -np.inf
    for candidate, score in zip(candidates, scores, strict=True):
        if best is None or score > highest + _MORE * abs(highest):
            best, highest = candidate, score
    return best


def _fastest_up_to(price: float, cheap: Sequence[Candidate], ttft: TtftLimit | None) -> Candidate:
    """The highest rate of arrangements whose requests cost no more than `price`, of which there is one."""
    able = [candidate.clusters for candidate in cheap if candidate.throughput.price <= price]
    fast = [Candidate(each, solve(each, ttft=ttft, max_price=price)) for each in able]
    best = _first_best(fast, [candidate.throughput.rate for candidate in fast])
    assert best is not None
    return best


def _thresholds(clusters: Clusters, planned: Arrangement) -> Iterator[ThresholdPoint]:
    lengths = clusters.lengths
    thresholds = np.geomspace(lengths.shortest, lengths.longest, _POINTS)
    work = work_of(clusters, thresholds, "mean_time")
    limits = limits_of(clusters, work, np.array([float(planned.n_prefill)]), np.array([float(planned.n_decode)]))
    by_stage = [np.broadcast_to(limit, thresholds.shape) for limit in limits.values()]
    for threshold, *rates in zip(thresholds, *by_stage, strict=True):
        far, link, home, decode = rates
        yield ThresholdPoint(
            threshold=float(threshold),
            far_prefill=_finite(far),
            link=_finite(link),
            home_prefill=_finite(home),
            decode=float(decode),
            rate=float(min(rates)),
        )


def _splits(clusters: Clusters, planned: Arrangement, ttft: TtftLimit | None) -> Iterator[SplitPoint]:
    n_home = clusters.home.instances
    for n_prefill, best in enumerate(rates_by_split(clusters, ttft=ttft)):
        split = Arrangement(threshold=planned.threshold, n_prefill=n_prefill, n_decode=n_home - n_prefill)
        yield SplitPoint(n_prefill=n_prefill, rate=throughput(clusters, split).rate, best_rate=best)


def _links(clusters: Clusters, planned: Arrangement, ttft: TtftLimit | None) -> Iterator[LinkPoint]:
    for factor in np.geomspace(_SLOWEST, _FASTEST, _LINK_POINTS).tolist():
        scaled = replace(
            clusters,
            links=tuple(
                msgspec.structs.replace(link, bytes_per_s=link.bytes_per_s * factor) for link in clusters.links
            ),
        )
        best = solve(scaled, ttft=ttft)
        yield LinkPoint(
            gbps=sum(link.bytes_per_s for link in scaled.links) / _GBIT,
            rate=throughput(scaled, planned).rate,
            best_rate=best.throughput.rate,
            threshold=best.arrangement.threshold,
            n_prefill=best.arrangement.n_prefill,
        )


def _prices(clusters: Clusters, ttft: TtftLimit | None, even: float) -> Iterator[PricePoint]:
    """The cheapest arrangements by ascending price of a GB, up to well beyond `even`, each with the first price that
    was tried with it."""
    last = None
    even = max(even, *(link.price_per_gb for link in clusters.links)) if even else 0.0
    for price in np.linspace(0.0, _DEAREST * even, _PRICE_POINTS).tolist() if even else ():
        links = tuple(msgspec.structs.replace(link, price_per_gb=price) for link in clusters.links)
        best = solve(replace(clusters, links=links), objective="cost", ttft=ttft)
        if best.arrangement == last:
            continue
        last = best.arrangement
        yield PricePoint(
            price_per_gb=price,
            threshold=last.threshold,
            n_prefill=last.n_prefill,
            n_decode=last.n_decode,
            rate=best.throughput.rate,
            device_cost=best.throughput.device_price * _THOUSAND,
            thousand_gb=best.throughput.bytes_per_request / GB * _THOUSAND,
        )


def _finite(rate: float) -> float | None:
    return float(rate) if np.isfinite(rate) else None
