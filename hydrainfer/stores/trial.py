"""A trial of a store: a few blocks are written to it and read, to see whether it works and how fast it is."""

from __future__ import annotations

import os
import time
from hashlib import blake2b
from typing import NamedTuple

from hydrainfer.cache import BlockName
from hydrainfer.stores.port import SharedStore, StoreFull

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


def remove_trial(store: SharedStore) -> None:
    """Remove the blocks of a trial: a store removes a block that has another size than its reader expects. Raises
    `StoreError`."""
    store.read(_NAMES, [memoryview(bytearray(1)) for _ in _NAMES])
