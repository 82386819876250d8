"""What devices cost and draw."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from hydrainfer.core import ConfigError
from hydrainfer.planner.costs import Hardware
from hydrainfer.planner.search import DevicePrice
from hydrainfer.profiling.devices import Devices
from hydrainfer.profiling.options import ProfileQuestion


class Prices(NamedTuple):
    """`by_name`: the price of a device for an hour by its name, or one price for all under ""; None if not known.
    `names`: of the kinds of devices, if they are unlike. `group`: devices of an instance."""

    by_name: Mapping[str, float] | None
    names: tuple[str, ...]
    devices: Devices
    group: int

    def terms(self, n_instances: int) -> tuple[DevicePrice, ...]:
        """The devices of each kind and their price; () if it is not known."""
        prices = self.by_name
        if prices is None:
            return ()
        if not self.devices.unlike:
            price = next(iter(prices.values()))
            name = self.names[0] or self.devices.device.name
            return (DevicePrice(device=name, n=n_instances * self.group, per_hour=price),)
        return tuple(
            DevicePrice(device=name, n=n * self.group, per_hour=prices.get(name, prices.get("", 0.0)))
            for name, (_, n) in zip(self.names, self.devices.unlike)
        )

    def per_hour(self, n_instances: int) -> float | None:
        """The price of `n_instances` for an hour; None if not known."""
        if self.by_name is None:
            return None
        return sum(term.n * term.per_hour for term in self.terms(n_instances))

    def watts(self, n_instances: int) -> float | None:
        """The power of `n_instances` at their boards' limits; None if not known."""
        groups: tuple[tuple[Hardware, int], ...] = self.devices.unlike or ((self.devices.device, n_instances),)
        if not all(device.watts for device, _ in groups):
            return None
        return sum(device.watts * n for device, n in groups)


def prices_of(q: ProfileQuestion, devices: Devices) -> Prices:
    """The prices of a question. Raises `ConfigError`."""
    return Prices(read_prices(q), _names(q), devices, q.tensor_parallel)


def read_prices(q: ProfileQuestion) -> dict[str, float] | None:
    """The price of each device by its name, or one price for all under "". Raises `ConfigError`."""
    if q.price is None:
        return None
    prices: dict[str, float] = {}
    for part in q.price.split(","):
        name, _, number = part.rpartition("=")
        try:
            prices[name] = float(number)
        except ValueError:
            prices[name] = 0.0
    names = _names(q)
    complete = set(prices) in ({""}, set(names))
    if not complete or not all(0.0 < price < math.inf for price in prices.values()):
        raise ConfigError(
            f"--price is what a device costs for an hour, such as 2.5, or {names[0] or 'h800'}=2.5 for each kind, not "
            f"{q.price}",
            param="price",
        )
    return prices


def _names(q: ProfileQuestion) -> tuple[str, ...]:
    return tuple(name.partition(":")[0] for name in (q.hardware or "").split(","))
