"""Host memory and the store of a question: what plans count with, and where the numbers come from."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hydrainfer.core import ConfigError
from hydrainfer.planner.simulation import StoreModel
from hydrainfer.profiling.devices import Devices
from hydrainfer.profiling.options import ProfileQuestion
from hydrainfer.stores import FolderAddress, Place, StoreError, parse_places, try_places

_GIB = 1 << 30
_NO_LIMIT = 1 << 60  # bytes: a trial must not make room in a folder that serves others


class PlannedTiers(NamedTuple):
    """The tiers beside the devices. `host_bytes`: host memory of each instance. `options`: those of a layout file.
    `notes`: where the store's rate comes from, for the plan."""

    host_bytes: int = 0
    store: StoreModel | None = None
    options: Mapping[str, str | float] = {}
    notes: Sequence[str] = ()


def check_tiers(q: ProfileQuestion) -> None:
    """Raises `ConfigError` for options that exclude each other, or are no amounts."""
    if (q.store is not None or q.host_cache_gib) and q.engine != "hydrainfer":
        raise ConfigError(
            "--store and --host-cache-gib are planned for hydrainfer alone: leave --engine out", param="engine"
        )
    if not 0.0 <= q.host_cache_gib < math.inf:
        raise ConfigError(
            f"--host-cache-gib is an amount of 0 or more, not {q.host_cache_gib:g}", param="host_cache_gib"
        )
    if q.store_gib_per_s is None:
        return
    if q.store is None:
        raise ConfigError("--store-gib-per-s is for a --store: give both", param="store_gib_per_s")
    if not 0.0 < q.store_gib_per_s < math.inf:
        raise ConfigError(f"--store-gib-per-s is a positive rate, not {q.store_gib_per_s:g}", param="store_gib_per_s")


def check_memory(tiers: PlannedTiers, devices: Devices, n_instances: int) -> None:
    """Raises `ConfigError` if host memory of instances on this machine is more than it has."""
    if devices.kind != "gpu" and tiers.host_bytes * n_instances > devices.device.memory_bytes:
        raise ConfigError(
            f"--host-cache-gib {tiers.host_bytes / _GIB:g} for each of {n_instances} instances is more than "
            f"{devices.device.name} has",
            param="host_cache_gib",
        )


def tiers_of(q: ProfileQuestion) -> PlannedTiers:
    """The tiers of a question. A store is tried out if it is there and no rate is given; a folder is not made. Raises
    `ConfigError`."""
    options: dict[str, str | float] = {}
    store = None
    notes: list[str] = []
    if q.host_cache_gib:
        options["host_cache_gib"] = q.host_cache_gib
    if q.store is not None:
        options["store"] = q.store
        store, note = _store_of(q.store, q.store_gib_per_s)
        notes.append(note)
    return PlannedTiers(int(q.host_cache_gib * _GIB), store, options, notes)


def _store_of(text: str, gib_per_s: float | None) -> tuple[StoreModel, str]:
    """The model of a store, and a note on its rate."""
    places = parse_places(text)
    usual = StoreModel()
    rate = usual.read_bytes_per_s
    if gib_per_s is not None:
        rate = gib_per_s * _GIB
        why = "as --store-gib-per-s says"
    elif byte_s := _measured(places):
        rate = 1.0 / byte_s
        why = "measured here with what was just written: a disk may be slower"
    else:
        why = "which is ASSUMED, as it cannot be measured here: give --store-gib-per-s"
    n_bytes = sum(_limit_bytes(place) for place in places)
    write = min(rate, usual.write_bytes_per_s)
    model = StoreModel(read_bytes_per_s=rate, write_bytes_per_s=write, n_bytes=n_bytes)
    size = "without a limit that is known"
    if n_bytes < math.inf:
        size = f"of {n_bytes / _GIB:.3g} GiB"
    return model, f"The store {size}, empty at first, is read at {rate / _GIB:.3g} GiB/s by an instance, {why}."


def _limit_bytes(place: Place) -> float:
    """The most that a place keeps. A server's own limit is not known."""
    if isinstance(place.address, FolderAddress):
        return place.address.limit_bytes
    return math.inf


def _measured(places: Sequence[Place]) -> float:
    """Seconds to read a byte; 0 if that cannot be measured. Raises `ConfigError` for what is there and is no folder of
    ours."""
    folders = [place.address for place in places if isinstance(place.address, FolderAddress)]
    if not all(os.path.exists(folder.path) for folder in folders):
        return 0.0
    try:
        _, trial = try_places([_unlimited(place) for place in places], "hydrainfer profile")
    except StoreError:
        return 0.0
    return trial.byte_s


def _unlimited(place: Place) -> Place:
    if isinstance(place.address, FolderAddress):
        return place._replace(address=place.address._replace(limit_bytes=_NO_LIMIT))
    return place
