"""Caches in host memory beside those of a device, with equal blocks, for sequences that have no room on the device."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from hydrainfer.cache.sizing import usual_parts
from hydrainfer.cache.spec import CacheSpec, Wishes
from hydrainfer.core import Stage

_PREFIX = "landing_"


def landing_of(spec: CacheSpec) -> CacheSpec:
    """The spec of the same cache in host memory."""
    return msgspec.structs.replace(spec, name=_PREFIX + spec.name)


def origin_of(name: str) -> str:
    """The name of a cache at other instances: for one in host memory, the name of the device's cache."""
    return name.removeprefix(_PREFIX)


def counterpart(name: str) -> str:
    """The name of the host memory's cache for one of the device, and the reverse."""
    return name.removeprefix(_PREFIX) if name.startswith(_PREFIX) else _PREFIX + name


def size_landing(specs: Iterable[CacheSpec], wishes: Wishes, n_bytes: int) -> dict[CacheSpec, int]:
    """The number of blocks in host memory of each cache that decoding requests use, for `n_bytes` together; empty if
    not every cache gets one."""
    parts = usual_parts([spec for spec in specs if Stage.DECODE in spec.stages], wishes)
    total = sum(spec.block_bytes * n for spec, n in parts.items())
    sizes = {landing_of(spec): n_bytes * n // total for spec, n in parts.items()}
    return sizes if all(sizes.values()) else {}
