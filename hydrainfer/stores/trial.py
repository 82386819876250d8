"""A trial of a store: a few blocks are written to it and read, to see whether it works and how fast it is."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import closing
from hashlib import blake2b
from typing import NamedTuple

from hydrainfer.cache import BlockName
from hydrainfer.stores.places import Place, check_folder, open_places
from hydrainfer.stores.port import Contents, Root, SharedStore, StoreFull

TRIAL_KIND = "probe"
"""The kind of these blocks. They stay in the store, and the next trial finds them there."""
_BLOCKS, _BLOCK_BYTES = 8, 1 << 20


def _name(i: int) -> BlockName:
    key = blake2b(b"%d" % i, digest_size=16).digest()
    return BlockName(key, TRIAL_KIND, i, group=key)  # so that each place of a store gets some


_NAMES = [_name(i) for i in range(_BLOCKS)]


class Trial(NamedTuple):
    """The result of a trial. `byte_s`: seconds per byte read, 0 if nothing could be read. `full`: why nothing can be
    written now, in one line; empty if that can be done."""

    byte_s: float
    full: str


def try_out(store: SharedStore) -> Trial:
    """Write blocks and read them. What was just written is mostly read from memory, so the time is the least that a
    read takes. Raises `StoreError` if the store cannot be used at all."""
    full = ""
    try:
        store.write(_NAMES, [memoryview(os.urandom(_BLOCK_BYTES)) for _ in _NAMES])
    except StoreFull as e:
        full = str(e)
    into = [memoryview(bytearray(_BLOCK_BYTES)) for _ in _NAMES]
    start_s = time.perf_counter()
    there = store.read(_NAMES, into)
    took_s = time.perf_counter() - start_s
    byte_s = took_s / (sum(there) * _BLOCK_BYTES) if any(there) else 0.0
    return Trial(byte_s, full)


def try_places(places: Sequence[Place], who: str) -> tuple[Contents, Trial]:
    """Open places as one store, as a server does, try it out, and remove what was written. `who` tries it. Returns what
    the store held before, and the result. Raises `ConfigError` if a folder cannot be used, `StoreError` if a server
    cannot be used now."""
    for place in places:
        check_folder(place)
    with closing(open_places(places, Root(bytes(16), {"model": who}))) as store:
        contents = store.contents()
        trial = try_out(store)
        remove_trial(store)
    return contents, trial


def remove_trial(store: SharedStore) -> None:
    """Remove the blocks of a trial: a store removes a block that has another size than its reader expects. Raises
    `StoreError`."""
    store.read(_NAMES, [memoryview(bytearray(1)) for _ in _NAMES])
