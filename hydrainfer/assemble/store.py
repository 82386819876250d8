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
from hydrainfer.models import fingerprint, whole_fingerprint
from hydrainfer.scheduler import Scheduler
from hydrainfer.storage import BlockStore, ThreadedClient
from hydrainfer.stores import (
    Root,
    SharedStore,
    StoreError,
    make_folders,
    open_places,
    parse_places,
    try_out,
)

_log = logging.getLogger(__name__)


class OpenStore(NamedTuple):
    """A store that is open, and what is known of it. `byte_s`: seconds per byte read, 0 if that is not known; None if
    the store was not reached. `fact`: for people."""

    shared: SharedStore
    byte_s: float | None
    fact: str

    def tier(self, specs: Mapping[str, CacheSpec]) -> StoreTier:
        """The tier of a scheduler whose caches are these. A store that was not reached is tried again later."""
        tier = StoreTier(specs)
        if self.byte_s is None:
            tier.failed("ask", time.monotonic())
        else:
            tier.byte_s = self.byte_s
        return tier


def open_store(config: ServeConfig, described: ModelConfig, dtype: str) -> OpenStore:
    """Open the store that `config.store` names. Reads all weights if what they hold is not remembered. Raises
    `ConfigError` or `CheckpointError`."""
    assert config.store is not None
    places = parse_places(config.store)
    make_folders(places)
    shared = open_places(places, _root(config, described, dtype))
    try:
        contents, byte_s = shared.contents(), _byte_s(shared)
    except StoreError as e:
        _log.warning("%s; the server starts without it and tries again", e)
        return OpenStore(shared, None, f"{shared.place}, not reached")
    limit = "" if contents.limit_bytes is None else f" of {contents.limit_bytes / GIB:.3g}"
    held = f"{contents.n_blocks:,} blocks, {contents.n_bytes / GIB:.2f}{limit} GiB"
    speed = f", read at {1 / byte_s / GIB:.2g} GiB/s" if byte_s else ""
    return OpenStore(shared, byte_s, f"{shared.place}: {held}{speed}")


def stored_of(
    shared: SharedStore,
    tier: StoreTier,
    scheduler: Scheduler,
    stores: Mapping[str, BlockStore],
    wake: Callable[[], None],
    clock: Callable[[], float],
) -> Stored:
    """The engine's work with a store. `clock`: the engine's."""
    return Stored(scheduler, ThreadedClient(shared, stores, wake, clock), tier)


def _root(config: ServeConfig, described: ModelConfig, dtype: str) -> Root:
    """What the names of this model's blocks lie below. A store outlives the server, and another checkpoint may differ
    in a few bytes only, so all bytes of the weights decide. (Keys depend on all this, too, but only on samples of the
    weights: they need not differ below another root.)"""
    folder, emulated = model_folder(config), config.device == "emulated"
    numbers = dtype if config.quantization == "none" else f"{dtype} {config.quantization}"
    if emulated:
        identity = fingerprint(folder, described, weights=False)
    else:
        identity = whole_fingerprint(folder, described)
    name = config.model if is_hub_name(config.model) else name_of(folder)
    about = {"model": name, "dtype": numbers} | ({"device": "emulated"} if emulated else {})
    return Root(blake2b(identity + repr((numbers, emulated)).encode(), digest_size=16).digest(), about)


def _byte_s(shared: SharedStore) -> float:
    """Seconds per byte read, 0 if that is not known. Raises `StoreError`."""
    trial = try_out(shared)
    if trial.full:
        _log.warning("%s; nothing is written to the store until there is room", trial.full)
    return trial.byte_s
