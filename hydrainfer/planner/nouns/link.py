"""The links between instances and the routes between clusters: how long messages and copies take."""

from __future__ import annotations

import math
from itertools import pairwise

import msgspec

from hydrainfer.core import ConfigError


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """The link between any two instances. `bytes_per_s`, `latency_s`: of a copy; each instance sends one copy and
    receives one at a time. `message_s`: seconds of a message; `host_bytes_per_s`: rate between a device and its host's
    memory, one copy at a time."""

    bytes_per_s: float = 20e9
    latency_s: float = 50e-6
    message_s: float = 300e-6
    host_bytes_per_s: float = 20e9


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One direction between two clusters, which all copies from `source` to `target` share fairly. `rates`: times and
    the bytes per second from then on, the first at 0.0; loss counts as a lower rate. `latency_s`: of a copy, and of a
    message in either direction. Raises `ConfigError`."""

    source: str
    target: str
    rates: tuple[tuple[float, float], ...]
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        name = f"the route from {self.source} to {self.target}"
        if not self.rates or self.rates[0][0] != 0.0:
            raise ConfigError(f"{name} needs a rate from 0 s on", param="rates")
        if any(after[0] <= before[0] for before, after in pairwise(self.rates)):
            raise ConfigError(f"{name}: times must ascend", param="rates")
        if not all(0.0 < rate < math.inf for _, rate in self.rates):
            raise ConfigError(f"{name}: rates must be positive", param="rates")
        if not 0.0 <= self.latency_s < math.inf:
            raise ConfigError(f"{name}: the latency must not be negative", param="latency_s")
