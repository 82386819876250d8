"""Files of configs/clusters: clusters, their devices and prices, and the links between them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Literal

import msgspec

from hydrainfer.config import converted, locate, read_yaml
from hydrainfer.core import ConfigError
from hydrainfer.planner.clusters.system import ClusterLink

GBIT = 1e9 / 8
MOST_FAR = 6  # clusters: every choice of them is tried
_MOST_PRICE = 1e6  # of a device for an hour, in any currency
_MOST_RATIO = 1e3  # of the prices of two devices
_MOST_GBPS = 1e6
_MOST_LATENCY_MS = 10_000.0


class ClusterEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One cluster. `hardware`: a name of configs/hardware or a file, if the times are not measured; else just a name.
    `devices`: of the cluster, `tensor_parallel` of them make an instance. `price`: of a device for an hour; None if not
    known. `roles`: of its instances; a cluster that decodes is the home one. `times`: the file of a `ClusterTable`,
    beside the file of the clusters; None for a roofline of the hardware."""

    hardware: str
    devices: int
    tensor_parallel: int = 1
    price: float | None = None
    roles: tuple[Literal["P", "D"], ...] = ("P", "D")
    times: str | None = None

    @property
    def instances(self) -> int:
        return self.devices // self.tensor_parallel


class LinkEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"source": "from"}):
    """One link, from a far cluster to the home one. `latency_ms`: one way; `price_per_gb`: of 10⁹ bytes, None if not
    known; `max_share`: of its rate that may be planned with."""

    source: str
    to: str
    gbps: float
    latency_ms: float = 0.0
    price_per_gb: float | None = None
    max_share: float = 1.0

    @property
    def link(self) -> ClusterLink:
        return ClusterLink(
            source=self.source,
            target=self.to,
            bytes_per_s=self.gbps * GBIT,
            latency_s=self.latency_ms / 1e3,
            price_per_gb=self.price_per_gb or 0.0,
            max_share=self.max_share,
        )


class ClusterFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a file: clusters by name, and links."""

    clusters: dict[str, ClusterEntry]
    links: tuple[LinkEntry, ...] = ()

    @property
    def home(self) -> str:
        """The name of the cluster that decodes."""
        return next(name for name, entry in self.clusters.items() if "D" in entry.roles)

    @property
    def far(self) -> list[str]:
        """The names of the others."""
        return [name for name in self.clusters if name != self.home]

    @property
    def has_prices(self) -> bool:
        """Whether the prices of devices are known."""
        return all(entry.price is not None for entry in self.clusters.values())


def read_clusters(name: str) -> tuple[Path, ClusterFile]:
    """The file of clusters with this path, or this name in configs/clusters, and its content. Raises `ConfigError` with
    a message that names file and field."""
    path = locate("clusters", name)
    file = converted(read_yaml(path), ClusterFile, str(path), "clusters")
    for field, problem in chain(_cluster_problems(file), _price_problems(file), _link_problems(file)):
        raise ConfigError(f"{path}: {field}: {problem}", param="clusters")
    return path, file


def _cluster_problems(file: ClusterFile) -> Iterator[tuple[str, str]]:
    """Fields that are wrong, with what is."""
    for name, entry in file.clusters.items():
        if entry.devices < 1 or entry.tensor_parallel < 1 or entry.devices % entry.tensor_parallel:
            yield f"clusters.{name}.devices", f"{entry.devices} devices are no groups of {entry.tensor_parallel}"
        if "P" not in entry.roles:
            yield f"clusters.{name}.roles", "nobody prefills there; [P, D] for the home cluster, [P] for a far one"
    home = [name for name, entry in file.clusters.items() if "D" in entry.roles]
    if not home:
        yield "clusters", "nobody decodes; give the home cluster roles: [P, D]"
    if len(home) > 1:
        yield "clusters", f"{' and '.join(home)} decode, but a plan has one home; give the others roles: [P]"
    if len(home) == 1 and file.clusters[home[0]].instances < 2:
        yield f"clusters.{home[0]}.devices", "one instance; home needs two, one to prefill and one to decode"
    if len(file.clusters) - 1 > MOST_FAR:
        yield "clusters", f"{len(file.clusters) - 1} far ones; at most {MOST_FAR} are planned for"


def _price_problems(file: ClusterFile) -> Iterator[tuple[str, str]]:
    known = {name: entry.price for name, entry in file.clusters.items() if entry.price is not None}
    for name in file.clusters:
        if name not in known and known:
            yield f"clusters.{name}.price", f"missing, while {next(iter(known))} has one"
    for name, price in known.items():
        if not 0.0 <= price <= _MOST_PRICE:
            yield f"clusters.{name}.price", f"{price:g} is no price of a device for an hour"
    least = min((price for price in known.values() if price), default=math.inf)
    for name, price in known.items():
        if price > _MOST_RATIO * least:
            yield (
                f"clusters.{name}.price",
                f"{price:g} is {price / least:,.0f} times that of another device; are they in one currency?",
            )
    dearest = max(known.values(), default=0.0)
    for i, link in enumerate(file.links):
        if link.price_per_gb is None:
            continue
        if not 0.0 <= link.price_per_gb < math.inf:
            yield f"links[{i}].price_per_gb", f"{link.price_per_gb:g} is no price of a GB"
        if not known:
            yield f"links[{i}].price_per_gb", "says nothing without the price of the clusters; give all or none"
        if link.price_per_gb > dearest > 0.0:
            yield (
                f"links[{i}].price_per_gb",
                f"{link.price_per_gb:g} for a GB is more than a device for an hour ({dearest:g}): is it in cents?",
            )


def _link_problems(file: ClusterFile) -> Iterator[tuple[str, str]]:
    home = file.home
    for i, link in enumerate(file.links):
        for field, name in (("from", link.source), ("to", link.to)):
            if name not in file.clusters:
                yield f"links[{i}].{field}", f"no cluster {name}; there are {', '.join(file.clusters)}"
        if link.to != home:
            yield f"links[{i}].to", f"{link.to} only prefills; links lead to {home}, which decodes"
        if link.source == home:
            yield f"links[{i}].from", f"{home} decodes; links lead there from the others"
        if any(other.source == link.source for other in file.links[:i]):
            yield f"links[{i}].from", f"a second link from {link.source}; give their joint rate as one"
        if not 0.0 < link.gbps <= _MOST_GBPS:
            yield f"links[{i}].gbps", f"{link.gbps:g} is not between 0 and {_MOST_GBPS:,.0f}"
        if not 0.0 <= link.latency_ms <= _MOST_LATENCY_MS:
            yield f"links[{i}].latency_ms", f"{link.latency_ms:g} is not between 0 and {_MOST_LATENCY_MS:,.0f}"
        if not 0.0 < link.max_share <= 1.0:
            yield f"links[{i}].max_share", f"{link.max_share:g} is no share above 0 and at most 1"
    for name in file.far:
        if not any(link.source == name for link in file.links):
            yield "links", f"none from {name} to {home}"
