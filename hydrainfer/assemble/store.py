"""The shared store of an instance (`--store`): opened, measured, and served by threads."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import NamedTuple

from hydrainfer.assemble.sizes import GIB
from hydrainfer.cache import BlockName, CacheSpec, StoreTier
from hydrainfer.checkpoint import ModelConfig, is_hub_name, model_folder, name_of
from hydrainfer.config import ServeConfig
from hydrainfer.engine import Stored
from hydrainfer.models import fingerprint
from hydrainfer.scheduler import Scheduler
from hydrainfer.storage import BlockStore, ThreadedClient
from hydrainfer.stores import (
    Root,
    SharedStore,
    StoreError,
    open_places,
    parse_places,
)

_log = logging.getLogger(__name__)
_PROBE_BLOCKS, _PROBE_BYTES = 8, 1 << 20
_PROBE = "probe"


class OpenStore(NamedTuple):
    """A store that is open, and what is known of it: the `tier` of the scheduler, and words for people."""

    shared: SharedStore
    tier: StoreTier
    fact: str


def open_store(config: ServeConfig, described: ModelConfig, dtype: str, specs: Mapping[str, CacheSpec]) -> OpenStore:
    """Open the store that `config.store` names. One that cannot be reached is tried again later. Raises `ConfigError`
    or `CheckpointError`."""
    assert config.store is not None
    shared = open_places(parse_places(config.store), _root(config, described, dtype))
    tier = StoreTier(specs)
    try:
        contents, tier.byte_s = shared.contents(), _byte_s(shared)
    except StoreError as e:
        _log.warning("%s; the server starts without it and tries again", e)
        tier.failed(time.monotonic())
        return OpenStore(shared, tier, f"{shared.place}, not reached")
    limit = "" if contents.limit_bytes is None else f" of {contents.limit_bytes / GIB:.3g}"
    held = f"{contents.n_blocks:,} blocks, {contents.n_bytes / GIB:.3g}{limit} GiB"
    speed = f", read at {1 / tier.byte_s / GIB:.2g} GiB/s" if tier.byte_s else ""
    return OpenStore(shared, tier, f"{shared.place}: {held}{speed}")


def stored_of(
    opened: OpenStore, scheduler: Scheduler, stores: Mapping[str, BlockStore], wake: Callable[[], None]
) -> Stored:
    """The engine's work with a store."""
    return Stored(scheduler, ThreadedClient(opened.shared, stores, wake), opened.tier)


def _root(config: ServeConfig, described: ModelConfig, dtype: str) -> Root:
    """What the names of this model's blocks lie below. (Keys themselves depend on all this, too.)"""
    folder, emulated = model_folder(config), config.device == "emulated"
    numbers = dtype if config.quantization == "none" else f"{dtype} {config.quantization}"
    identity = fingerprint(folder, described, weights=not emulated)
    name = config.model if is_hub_name(config.model) else name_of(folder)
    about = {"model": name, "dtype": numbers} | ({"device": "emulated"} if emulated else {})
    return Root(blake2b(identity + repr((numbers, emulated)).encode(), digest_size=16).digest(), about)


def _byte_s(shared: SharedStore) -> float:
    """Seconds per byte read, from a few blocks that are written for it; 0 if they cannot be."""
    names = [BlockName(blake2b(b"%d" % i, digest_size=16).digest(), _PROBE, i, b"") for i in range(_PROBE_BLOCKS)]
    data = [memoryview(os.urandom(_PROBE_BYTES)) for _ in names]
    try:
        n = shared.write(names, data)
    except StoreError:
        n = 0
    into = [memoryview(bytearray(_PROBE_BYTES)) for _ in names[:n]]
    start_s = time.perf_counter()
    there = shared.read(names[:n], into)
    took_s = time.perf_counter() - start_s
    return took_s / (sum(there) * _PROBE_BYTES) if any(there) else 0.0
