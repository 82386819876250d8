"""The throughput of a home cluster that prefills and decodes, with a far one that only prefills long prompts.

Equations are those of Prefill-as-a-Service, section 3.4. They say how long each stage is busy for the average request,
and so how many requests per second each could serve; the slowest stage limits all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from hydrainfer.core import ConfigError
from hydrainfer.planner.clusters.lengths import Lengths
from hydrainfer.planner.clusters.times import Times

Service = Literal["mean_time", "mean_length"]
"""How long the average request of a cluster takes: E[T(L)], which is what a queue serves, or T(E[L]), as in the paper.
Where T is convex, the second is less, and promises a rate that no queue carries."""
Stage = Literal["far prefill", "link", "home prefill", "decode"]
STAGES: tuple[Stage, ...] = ("far prefill", "link", "home prefill", "decode")
GB = 1e9
_HOUR_S = 3600.0
Floats = NDArray[np.float64]


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """Equal instances in one place. `devices`: of one instance; `price`: of one device for an hour, in any currency;
    `decodes_per_s`: requests per second whose answers one instance can decode within the SLO, 0 if it only prefills.
    Raises `ConfigError`."""

    times: Times
    instances: int
    devices: int = 1
    price: float = 0.0
    decodes_per_s: float = 0.0

    def __post_init__(self) -> None:
        if self.instances < 1 or self.devices < 1:
            raise ConfigError("clusters: instances and devices must be at least 1", param="clusters")
        if not (0.0 <= self.price < math.inf and 0.0 <= self.decodes_per_s < math.inf):
            raise ConfigError("clusters: price and decodes_per_s must not be negative", param="clusters")

    @property
    def price_per_s(self) -> float:
        """The price of all devices for a second."""
        return self.instances * self.devices * self.price / _HOUR_S


class ClusterLink(msgspec.Struct, frozen=True, kw_only=True):
    """The link from the far cluster to the home one. `max_share`: of its rate that may be planned with;
    `price_per_gb`: of 10⁹ bytes. Raises `ConfigError`."""

    bytes_per_s: float
    price_per_gb: float = 0.0
    max_share: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 < self.bytes_per_s < math.inf:
            raise ConfigError("links: the rate must be positive", param="links")
        if not 0.0 <= self.price_per_gb < math.inf:
            raise ConfigError("links: the price of a GB must not be negative", param="links")
        if not 0.0 < self.max_share <= 1.0:
            raise ConfigError("links: max_share must be above 0 and at most 1", param="links")


@dataclass(frozen=True, slots=True, kw_only=True)
class Clusters:
    """A home cluster, perhaps a far one with a link to it, and the prompts that they serve. Raises `ConfigError`."""

    home: Cluster
    lengths: Lengths
    far: Cluster | None = None
    link: ClusterLink | None = None

    def __post_init__(self) -> None:
        if (self.far is None) != (self.link is None):
            raise ConfigError("clusters: a far cluster needs a link, and a link a far cluster", param="links")
        if self.home.decodes_per_s == 0.0:
            raise ConfigError("clusters: nobody decodes, decodes_per_s of home is 0", param="clusters")

    @property
    def price_per_s(self) -> float:
        """The price of all devices for a second, whether or not they are used."""
        far = self.far.price_per_s if self.far is not None else 0.0
        return self.home.price_per_s + far


class Arrangement(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts of more than `threshold` tokens go to the far cluster, the others to `n_prefill` instances at home;
    `n_decode` instances at home decode all answers."""

    threshold: float
    n_prefill: int
    n_decode: int


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """What an arrangement carries at most.

    `rate`: requests per second, `limit`: the stage that allows no more. `far_per_s`, `home_per_s`: requests per second
    that each cluster could prefill of its own, None if it gets none; `decode_per_s`: that home could decode.
    `far_share`: of the requests; `far_tokens`, `home_tokens`: mean lengths of the prompts that each gets. At this rate,
    `egress_bytes_per_s` cross the link, `link_share` of what it can. `device_price`, `link_price`: of a request.
    `guessed_share`: of the requests, those that are shorter or longer than all that was measured where they go.
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

    @property
    def price(self) -> float:
        """The price of a request, with its share of the devices and what it sends over the link."""
        return self.device_price + self.link_price


class PrefillSeconds(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of prefill, over all requests: the TTFT without queues, messages and waiting for the link."""

    mean: float
    p90: float


@dataclass(frozen=True, slots=True)
class Work:
    """What the average of all requests asks of the stages: one value per threshold. The average includes requests that
    go elsewhere, which ask nothing."""

    far_share: Floats
    far_s: Floats
    far_bytes: Floats
    home_s: Floats
    far_tokens: Floats
    home_tokens: Floats


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
    lengths, far = clusters.lengths, clusters.far
    n_home = np.searchsorted(lengths.tokens, thresholds, side="right")
    if far is None:
        n_home = np.full(len(thresholds), len(lengths.tokens))
    home_share, far_share = _sums(lengths.shares, n_home)
    home_tokens, far_tokens = _sums(lengths.shares * lengths.tokens, n_home)
    far_s, far_bytes = np.zeros(len(thresholds)), np.zeros(len(thresholds))
    if service == "mean_time":
        home_s, _ = _sums(lengths.shares * clusters.home.times.prefill_s(lengths.tokens), n_home)
    else:
        home_s = home_share * clusters.home.times.prefill_s(_mean(home_tokens, home_share))
    if far is not None and service == "mean_time":
        _, far_s = _sums(lengths.shares * far.times.prefill_s(lengths.tokens), n_home)
        _, far_bytes = _sums(lengths.shares * far.times.kv_bytes(lengths.tokens), n_home)
    elif far is not None:
        far_s = far_share * far.times.prefill_s(_mean(far_tokens, far_share))
        far_bytes = far_share * far.times.kv_bytes(_mean(far_tokens, far_share))
    far_share = np.minimum(far_share, 1.0)  # a sum of many shares may round to more
    return Work(far_share, far_s, far_bytes, home_s, far_tokens, home_tokens)


def limits_of(clusters: Clusters, work: Work, n_prefill: Floats, n_decode: Floats) -> dict[Stage, Floats]:
    """Requests per second, of all, that each stage allows (the terms of Eq. 6); infinite if it has nothing to do."""
    far_instances, link_bytes_per_s = 0.0, 0.0
    if clusters.far is not None and clusters.link is not None:
        far_instances = float(clusters.far.instances)
        link_bytes_per_s = clusters.link.bytes_per_s * clusters.link.max_share
    return {
        "far prefill": _per_work(far_instances, work.far_s),
        "link": _per_work(link_bytes_per_s, work.far_bytes),
        "home prefill": _per_work(n_prefill, work.home_s),
        "decode": n_decode * clusters.home.decodes_per_s,
    }


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
    far_share, far_bytes = float(work.far_share[0]), float(work.far_bytes[0])
    home_share = 1.0 - far_share
    link_share, link_price = 0.0, 0.0
    if clusters.link is not None:
        link_share = rate * far_bytes / clusters.link.bytes_per_s
        link_price = far_bytes / GB * clusters.link.price_per_gb
    far_per_s = home_per_s = far_tokens = home_tokens = None
    if far_share > 0.0:
        far_per_s = far_share * min(bounds["far prefill"], bounds["link"])
        far_tokens = float(work.far_tokens[0]) / far_share
    if work.home_s[0] > 0.0:
        home_per_s = home_share * bounds["home prefill"]
        home_tokens = float(work.home_tokens[0]) / home_share
    return Throughput(
        rate=rate,
        limit=slowest,
        far_per_s=far_per_s,
        home_per_s=home_per_s,
        decode_per_s=bounds["decode"],
        far_share=far_share,
        far_tokens=far_tokens,
        home_tokens=home_tokens,
        egress_bytes_per_s=rate * far_bytes,
        link_share=link_share,
        bytes_per_request=far_bytes,
        device_price=float(price_at(clusters, rate)),
        link_price=link_price,
        guessed_share=_guessed_share(clusters, arrangement.threshold),
    )


def prefill_seconds(clusters: Clusters, threshold: float) -> PrefillSeconds:
    """Mean and p90 of the prefill times of all requests, each in the cluster where it goes."""
    lengths = clusters.lengths
    seconds = clusters.home.times.prefill_s(lengths.tokens)
    if clusters.far is not None:
        goes_far = lengths.tokens > threshold
        seconds = np.where(goes_far, clusters.far.times.prefill_s(lengths.tokens), seconds)
    return PrefillSeconds(mean=lengths.mean(seconds), p90=lengths.quantile(0.9, seconds))


def price_at(clusters: Clusters, rate: float | Floats) -> Floats:
    """The price of the devices for one request, if so many are served per second; infinite if none are."""
    return _per_work(clusters.price_per_s, np.asarray(rate, dtype=np.float64))


def _guessed_share(clusters: Clusters, threshold: float) -> float:
    tokens = clusters.lengths.tokens
    is_known = clusters.home.times.covers(tokens)
    if clusters.far is not None:
        is_known = np.where(tokens > threshold, clusters.far.times.covers(tokens), is_known)
    return clusters.lengths.mean(np.where(is_known, 0.0, 1.0))


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
