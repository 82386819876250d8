"""The shared store of an instance (`--store`): opened, measured, and served by threads."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import NamedTuple

from hydrainfer.assemble.sizes import GIB
from hydrainfer.cache import CacheSpec, StoreTier
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
    try_out,
)

_log = logging.getLogger(__name__)


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
        tier.failed("ask", time.monotonic())
        return OpenStore(shared, tier, f"{shared.place}, not reached")
    limit = "" if contents.limit_bytes is None else f" of {contents.limit_bytes / GIB:.3g}"
    held = f"{contents.n_blocks:,} blocks, {contents.n_bytes / GIB:.2f}{limit} GiB"
    speed = f", read at {1 / tier.byte_s / GIB:.2g} GiB/s" if tier.byte_s else ""
    return OpenStore(shared, tier, f"{shared.place}: {held}{speed}")


def stored_of(
    opened: OpenStore,
    scheduler: Scheduler,
    stores: Mapping[str, BlockStore],
    wake: Callable[[], None],
    clock: Callable[[], float],
) -> Stored:
    """The engine's work with a store. `clock`: the engine's."""
    return Stored(scheduler, ThreadedClient(opened.shared, stores, wake, clock), opened.tier)


def _root(config: ServeConfig, described: ModelConfig, dtype: str) -> Root:
    """What the names of this model's blocks lie below. (Keys themselves depend on all this, too.)"""
    folder, emulated = model_folder(config), config.device == "emulated"
    numbers = dtype if config.quantization == "none" else f"{dtype} {config.quantization}"
    identity = fingerprint(folder, described, weights=not emulated)
    name = config.model if is_hub_name(config.model) else name_of(folder)
    about = {"model": name, "dtype": numbers} | ({"device": "emulated"} if emulated else {})
    return Root(blake2b(identity + repr((numbers, emulated)).encode(), digest_size=16).digest(), about)


def _byte_s(shared: SharedStore) -> float:
    """Seconds per byte read, 0 if that is not known. Raises `StoreError`."""
    trial = try_out(shared)
    if trial.full:
        _log.warning("%s; nothing is written to the store until there is room", trial.full)
    return trial.byte_s
