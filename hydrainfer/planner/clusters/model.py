"""The throughput of a home cluster that prefills and decodes, with far ones that only prefill long prompts.

Equations are those of Prefill-as-a-Service, section 3.4. They say how long each stage is busy for the average request,
and so how many requests per second each could serve; the slowest stage limits all. Of several far clusters, each gets a
share of the long prompts, whatever their lengths, with which all of them are equally busy: the share of what it can
prefill and send, of what all can.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from hydrainfer.core import ConfigError
from hydrainfer.planner.clusters.lengths import Lengths
from hydrainfer.planner.clusters.system import Cluster, Clusters

Service = Literal["mean_time", "mean_length"]
"""How long the average request of a cluster takes: E[T(L)], which is what a queue serves, or T(E[L]), as in the paper.
Where T is convex, the second is less, and promises a rate that no queue carries."""
Stage = Literal["far prefill", "link", "home prefill", "decode"]
STAGES: tuple[Stage, ...] = ("far prefill", "link", "home prefill", "decode")
GB = 1e9
Floats = NDArray[np.float64]


class Arrangement(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts of more than `threshold` tokens go to the far clusters, the others to `n_prefill` instances at home;
    `n_decode` instances at home decode all answers."""

    threshold: float
    n_prefill: int
    n_decode: int


class FarUse(msgspec.Struct, frozen=True, kw_only=True):
    """What one far cluster does. `share`: of all requests; `per_s`: requests per second that it could prefill and send,
    `limit`: which of the two allows no more. At the rate of the throughput, `egress_bytes_per_s` leave it,
    `link_share` of what its link can carry."""

    name: str
    share: float
    per_s: float
    limit: Stage
    egress_bytes_per_s: float
    link_share: float


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """What an arrangement carries at most.

    `rate`: requests per second, `limit`: the stage that allows no more. `far_per_s`, `home_per_s`: requests per second
    that the far clusters and home could prefill of their own, None if they get none; `decode_per_s`: that home could
    decode. `far_share`: of the requests; `far_tokens`, `home_tokens`: mean lengths of the prompts that each gets. At
    this rate, `egress_bytes_per_s` cross all links, `link_share` of what the busiest can. `device_price`, `link_price`:
    of a request. `guessed_share`: of the requests, those that are shorter or longer than all that was measured where
    they go. `far`: each far cluster; () if they get no requests.
    """

    rate: float
    limit: Stage
    far_per_s: float | None
    home_per_s: float | None
    decode_per_s: float
    far_share: float
    far_tokens: float | None
    home_tokens: float | None
    egress_bytes_per_s: float
    link_share: float
    bytes_per_request: float
    device_price: float
    link_price: float
    guessed_share: float
    far: tuple[FarUse, ...] = ()

    @property
    def price(self) -> float:
        """The price of a request, with its share of the devices and what it sends over links."""
        return self.device_price + self.link_price


class PrefillSeconds(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of prefill, and of messages over a link, over all requests: the TTFT without queues."""

    mean: float
    p90: float


@dataclass(frozen=True, slots=True)
class Work:
    """What the average of all requests asks of the stages: one value per threshold. The average includes requests that
    go elsewhere, which ask nothing. `n_home`: how many of the lengths stay at home.

    Arrays of far clusters are [far clusters, thresholds]: `far_s` and `far_bytes` are those of a cluster that gets all
    long prompts, `split` is the share of them that it gets, `sent_bytes` what it sends of the average request.
    """

    n_home: NDArray[np.int64]
    far_share: Floats
    home_s: Floats
    far_tokens: Floats
    home_tokens: Floats
    far_s: Floats
    far_bytes: Floats
    split: Floats

    @property
    def sent_bytes(self) -> Floats:
        return self.far_bytes * self.split


def decodes_per_s(batch: int, step_s: float, n_output: float) -> float:
    """Requests per second that one instance decodes with `batch` sequences per step of `step_s` (Eq. 5, one D)."""
    return batch / (step_s * n_output)


def egress_bytes_per_s(cluster: Cluster, lengths: Lengths) -> float:
    """Bytes per second that a cluster sends while all its instances prefill prompts of these lengths (Eq. 2)."""
    kv_bytes = lengths.mean(cluster.times.kv_bytes(lengths.tokens))
    seconds = lengths.mean(cluster.times.prefill_s(lengths.tokens))
    return cluster.instances * kv_bytes / seconds


def work_of(clusters: Clusters, thresholds: Floats, service: Service) -> Work:
    """What the average request asks of each stage, for each threshold. Without a far cluster, all stay at home."""
    lengths, home = clusters.lengths, clusters.home
    n_home = np.searchsorted(lengths.tokens, thresholds, side="right")
    if not clusters.far:
        n_home = np.full(len(thresholds), len(lengths.tokens))
    home_share, far_share = _sums(lengths.shares, n_home)
    home_tokens, far_tokens = _sums(lengths.shares * lengths.tokens, n_home)
    far_s = np.zeros((len(clusters.far), len(thresholds)))
    far_bytes = np.zeros_like(far_s)
    if service == "mean_time":
        home_s, _ = _sums(lengths.shares * home.times.prefill_s(lengths.tokens), n_home)
        for i, cluster in enumerate(clusters.far):
            _, far_s[i] = _sums(lengths.shares * cluster.times.prefill_s(lengths.tokens), n_home)
            _, far_bytes[i] = _sums(lengths.shares * cluster.times.kv_bytes(lengths.tokens), n_home)
    else:
        home_s = home_share * home.times.prefill_s(_mean(home_tokens, home_share))
        for i, cluster in enumerate(clusters.far):
            far_s[i] = far_share * cluster.times.prefill_s(_mean(far_tokens, far_share))
            far_bytes[i] = far_share * cluster.times.kv_bytes(_mean(far_tokens, far_share))
    far_share = np.minimum(far_share, 1.0)  # a sum of many shares may round to more
    split = _split(clusters, far_s, far_bytes)
    return Work(n_home, far_share, home_s, far_tokens, home_tokens, far_s, far_bytes, split)


def limits_of(clusters: Clusters, work: Work, n_prefill: Floats, n_decode: Floats) -> dict[Stage, Floats]:
    """Requests per second, of all, that each stage allows (the terms of Eq. 6); infinite if it has nothing to do."""
    prefill, link = _far_limits(clusters, work.far_s * work.split, work.sent_bytes)
    return {
        "far prefill": np.min(prefill, axis=0, initial=np.inf),
        "link": np.min(link, axis=0, initial=np.inf),
        "home prefill": _per_work(n_prefill, work.home_s),
        "decode": n_decode * clusters.home.decodes_per_s,
    }


def link_prices(clusters: Clusters, work: Work) -> Floats:
    """What the average request pays for what it sends, for each threshold."""
    price: Floats = np.zeros(len(work.far_share))
    for link, sent in zip(clusters.links, work.sent_bytes, strict=True):
        price = price + sent / GB * link.price_per_gb
    return price


def throughput(clusters: Clusters, arrangement: Arrangement, service: Service = "mean_time") -> Throughput:
    """What an arrangement carries at most (Eq. 3 to 6), and what it costs then. Raises `ConfigError`."""
    n_prefill, n_decode = arrangement.n_prefill, arrangement.n_decode
    if min(n_prefill, n_decode) < 0 or n_prefill + n_decode > clusters.home.instances:
        raise ConfigError(
            f"clusters: {n_prefill} P and {n_decode} D, home has {clusters.home.instances} instances", param="clusters"
        )
    work = work_of(clusters, np.array([arrangement.threshold]), service)
    limits = limits_of(clusters, work, np.array([float(n_prefill)]), np.array([float(n_decode)]))
    bounds = {stage: float(limit[0]) for stage, limit in limits.items()}
    slowest = min(STAGES, key=lambda stage: bounds[stage])
    rate = bounds[slowest]
    far_share = float(work.far_share[0])
    home_share = 1.0 - far_share
    far: tuple[FarUse, ...] = ()
    far_per_s = home_per_s = far_tokens = home_tokens = None
    if far_share > 0.0:
        far = _far_uses(clusters, work, rate)
        far_per_s = far_share * min(bounds["far prefill"], bounds["link"])
        far_tokens = float(work.far_tokens[0]) / far_share
    if work.home_s[0] > 0.0:
        home_per_s = home_share * bounds["home prefill"]
        home_tokens = float(work.home_tokens[0]) / home_share
    sent_bytes = float(np.sum(work.sent_bytes))
    return Throughput(
        rate=rate,
        limit=slowest,
        far_per_s=far_per_s,
        home_per_s=home_per_s,
        decode_per_s=bounds["decode"],
        far_share=far_share,
        far_tokens=far_tokens,
        home_tokens=home_tokens,
        egress_bytes_per_s=rate * sent_bytes,
        link_share=max((use.link_share for use in far), default=0.0),
        bytes_per_request=sent_bytes,
        device_price=float(price_at(clusters, rate)),
        link_price=float(link_prices(clusters, work)[0]),
        guessed_share=_guessed_share(clusters, work),
        far=far,
    )


def prefill_seconds(clusters: Clusters, threshold: float, service: Service = "mean_time") -> PrefillSeconds:
    """Mean and p90 of the TTFT of all requests without queues, each in the cluster where it goes."""
    lengths = clusters.lengths
    work = work_of(clusters, np.array([threshold]), service)
    at_home = np.arange(len(lengths.tokens)) < work.n_home[0]
    home_s = clusters.home.times.prefill_s(lengths.tokens)
    far_s = [_first_token_s(clusters, i) for i in range(len(clusters.far))]
    split = work.split[:, 0]
    mean_far_s: Floats = sum((share * s for share, s in zip(split, far_s, strict=True)), np.zeros_like(home_s))
    shares = [np.where(at_home, lengths.shares, 0.0)]
    shares += [np.where(at_home, 0.0, lengths.shares * share) for share in split]
    everyone = Lengths(np.tile(lengths.tokens, len(shares)), np.concatenate(shares))
    return PrefillSeconds(
        mean=lengths.mean(np.where(at_home, home_s, mean_far_s)),
        p90=everyone.quantile(0.9, np.concatenate([home_s, *far_s])),
    )


def share_within(clusters: Clusters, work: Work, ttft_s: float) -> Floats:
    """The share of the requests whose TTFT without queues is within the limit, for each threshold."""
    lengths = clusters.lengths
    in_time = clusters.home.times.prefill_s(lengths.tokens) <= ttft_s
    share, _ = _sums(np.where(in_time, lengths.shares, 0.0), work.n_home)
    for i, split in enumerate(work.split):
        _, far = _sums(np.where(_first_token_s(clusters, i) <= ttft_s, lengths.shares, 0.0), work.n_home)
        share = share + split * far
    return share


def price_at(clusters: Clusters, rate: float | Floats) -> Floats:
    """The price of the devices for one request, if so many are served per second; infinite if none are."""
    return _per_work(clusters.price_per_s, np.asarray(rate, dtype=np.float64))


def _split(clusters: Clusters, far_s: Floats, far_bytes: Floats) -> Floats:
    """The share of the long prompts that each far cluster gets: [far clusters, thresholds]. The same for all where no
    prompt is long."""
    if not clusters.far:
        return far_s
    capacity = np.minimum(*_far_limits(clusters, far_s, far_bytes))
    return np.where(far_s > 0.0, capacity, 1.0) / np.sum(np.where(far_s > 0.0, capacity, 1.0), axis=0)


def _far_limits(clusters: Clusters, far_s: Floats, far_bytes: Floats) -> tuple[Floats, Floats]:
    """Requests per second, of all, that prefill and link of each far cluster allow: [far clusters, thresholds]."""
    instances = np.array([[float(cluster.instances)] for cluster in clusters.far]).reshape(-1, 1)
    rates = np.array([[link.planned_bytes_per_s] for link in clusters.links]).reshape(-1, 1)
    return _per_work(instances, far_s), _per_work(rates, far_bytes)


def _far_uses(clusters: Clusters, work: Work, rate: float) -> tuple[FarUse, ...]:
    prefill, link = _far_limits(clusters, work.far_s, work.far_bytes)
    uses = []
    for i, cluster in enumerate(clusters.far):
        egress = rate * float(work.sent_bytes[i, 0])
        limit: Stage = "link" if link[i, 0] < prefill[i, 0] else "far prefill"
        uses.append(
            FarUse(
                name=cluster.name,
                share=float(work.far_share[0] * work.split[i, 0]),
                per_s=float(work.far_share[0] * min(prefill[i, 0], link[i, 0])),
                limit=limit,
                egress_bytes_per_s=egress,
                link_share=egress / clusters.links[i].bytes_per_s,
            )
        )
    return tuple(uses)


def _first_token_s(clusters: Clusters, i: int) -> Floats:
    """The TTFT without queues of prompts of each length in the i-th far cluster."""
    seconds: Floats = clusters.far[i].times.prefill_s(clusters.lengths.tokens) + clusters.links[i].answer_s
    return seconds


def _guessed_share(clusters: Clusters, work: Work) -> float:
    lengths = clusters.lengths
    guessed, _ = _sums(np.where(clusters.home.times.covers(lengths.tokens), 0.0, lengths.shares), work.n_home)
    for cluster, split in zip(clusters.far, work.split, strict=True):
        _, far = _sums(np.where(cluster.times.covers(lengths.tokens), 0.0, lengths.shares), work.n_home)
        guessed = guessed + split * far
    return float(guessed[0])


def _sums(values: Floats, n: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """The sum of the first `n` values, and of the others, for each of several `n`."""
    first = np.concatenate(([0.0], np.cumsum(values)))
    others = np.concatenate((np.cumsum(values[::-1])[::-1], [0.0]))
    return first[n], others[n]


def _mean(total: Floats, share: Floats) -> Floats:
    """`total / share`, and 1 where both are 0, so that a logarithm of it is one."""
    return np.divide(total, share, out=np.ones_like(total), where=share > 0.0)


def _per_work(capacity: float | Floats, work: Floats) -> Floats:
    """`capacity / work`, infinite where there is no work."""
    shape = np.broadcast_shapes(np.shape(capacity), np.shape(work))
    unlimited: Floats = np.full(shape, np.inf)
    return np.divide(capacity, work, out=unlimited, where=np.broadcast_to(work > 0.0, shape))
