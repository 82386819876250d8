"""Clusters, the links between them, and the prompts that they serve."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

import msgspec

from hydrainfer.core import ConfigError
from hydrainfer.planner.clusters.lengths import Lengths
from hydrainfer.planner.clusters.times import Times

_HOUR_S = 3600.0


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """Equal instances in one place. `devices`: of one instance; `price`: of one device for an hour, in any currency;
    `decodes_per_s`: requests per second whose answers one instance can decode within the SLO, 0 if it only prefills.
    Raises `ConfigError`."""

    name: str
    times: Times
    instances: int
    devices: int = 1
    price: float = 0.0
    decodes_per_s: float = 0.0

    def __post_init__(self) -> None:
        if self.instances < 1 or self.devices < 1:
            raise ConfigError(f"cluster {self.name}: instances and devices must be at least 1", param="clusters")
        if not (0.0 <= self.price < math.inf and 0.0 <= self.decodes_per_s < math.inf):
            raise ConfigError(f"cluster {self.name}: price and decodes_per_s must not be negative", param="clusters")

    @property
    def price_per_s(self) -> float:
        """The price of all devices for a second."""
        return self.instances * self.devices * self.price / _HOUR_S


class ClusterLink(msgspec.Struct, frozen=True, kw_only=True):
    """A link from a far cluster to the home one, both by name. `latency_s`: of a message one way; `max_share`: of the
    rate that may be planned with; `price_per_gb`: of 10⁹ bytes. Raises `ConfigError`."""

    source: str
    target: str
    bytes_per_s: float
    latency_s: float = 0.0
    price_per_gb: float = 0.0
    max_share: float = 1.0

    def __post_init__(self) -> None:
        name = f"link from {self.source} to {self.target}"
        if not 0.0 < self.bytes_per_s < math.inf:
            raise ConfigError(f"{name}: the rate must be positive", param="links")
        if not 0.0 <= self.latency_s < math.inf:
            raise ConfigError(f"{name}: the latency must not be negative", param="links")
        if not 0.0 <= self.price_per_gb < math.inf:
            raise ConfigError(f"{name}: the price of a GB must not be negative", param="links")
        if not 0.0 < self.max_share <= 1.0:
            raise ConfigError(f"{name}: max_share must be above 0 and at most 1", param="links")

    @property
    def planned_bytes_per_s(self) -> float:
        """The rate that may be planned with."""
        return self.bytes_per_s * self.max_share

    @property
    def answer_s(self) -> float:
        """The time that the link adds to a TTFT: the request goes there, its first token comes back."""
        return 2.0 * self.latency_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Clusters:
    """A home cluster, far ones that have one link each to it, and the prompts that all serve. `links` are in the order
    of `far`, in whichever order they are given. Raises `ConfigError`."""

    home: Cluster
    lengths: Lengths
    far: tuple[Cluster, ...] = ()
    links: tuple[ClusterLink, ...] = ()

    def __post_init__(self) -> None:
        names = [self.home.name, *(cluster.name for cluster in self.far)]
        if len(set(names)) < len(names):
            raise ConfigError(f"clusters: {', '.join(names)} are to have names of their own", param="clusters")
        for link in self.links:
            if link.source not in names[1:] or link.target != self.home.name:
                raise ConfigError(
                    f"links: one from {link.source} to {link.target}, but they lead from a far cluster to "
                    f"{self.home.name}",
                    param="links",
                )
        by_source = {link.source: link for link in self.links}
        if len(by_source) < len(self.links):
            raise ConfigError("links: several from one cluster; give their joint rate as one", param="links")
        for name in names[1:]:
            if name not in by_source:
                raise ConfigError(f"links: none from {name} to {self.home.name}", param="links")
        if self.home.decodes_per_s == 0.0:
            raise ConfigError(f"clusters: nobody decodes, decodes_per_s of {self.home.name} is 0", param="clusters")
        object.__setattr__(self, "links", tuple(by_source[name] for name in names[1:]))

    @property
    def price_per_s(self) -> float:
        """The price of all devices for a second, whether or not they are used."""
        return self.home.price_per_s + sum(cluster.price_per_s for cluster in self.far)

    def with_far(self, names: Collection[str]) -> Clusters:
        """The home cluster with these far ones only."""
        far = tuple(cluster for cluster in self.far if cluster.name in names)
        return replace(self, far=far, links=tuple(link for link in self.links if link.source in names))

    @property
    def alone(self) -> Clusters:
        """The home cluster without far ones."""
        return self.with_far(())
