"""Blocks in a server that speaks Redis's protocol, such as Redis, Valkey or Kvrocks.

The server makes room itself: by its `maxmemory-policy`, or because each block has a time to live that uses renew. A
block can lose a part of its values so; it counts as absent then, and what is left of it is removed.
"""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

import redis

from hydrainfer.cache import BlockName
from hydrainfer.stores.address import server_address
from hydrainfer.stores.port import Contents, Root, StoreError
from hydrainfer.stores.resp_client import Command, RespClient
from hydrainfer.stores.resp_values import (
    HEADER_BYTES,
    block_key,
    n_values,
    pack,
    root_key,
    size_in,
    unpack,
    value_keys,
)

_BATCH_BYTES = 4 << 20  # of the blocks of a pipeline, of which as many bytes are in memory once more


class RespStore:
    """A `SharedStore` at `url`, with the password of the environment. It connects at the first call, so that a server
    that is away is no error before. `has` makes blocks count as used for the server's own eviction."""

    def __init__(
        self,
        url: str,
        root: Root,
        environ: Mapping[str, str] = os.environ,
        connect: Callable[..., redis.Redis] = redis.Redis,
    ) -> None:
        address = server_address(url)
        self.place = address.name
        self.counts: Counter[str] = Counter()
        self._client = RespClient(address, environ, connect)
        self._root = root
        self._life: Command = ("EX", address.ttl_s) if address.ttl_s else ()
        self._ttl_s = address.ttl_s
        self._counting = threading.Lock()

    def __repr__(self) -> str:
        return f"RespStore({self.place!r})"

    def has(self, names: Sequence[BlockName]) -> list[bool]:
        return [n > 0 for n in self._n_values(self._keys(names))]

    def touch(self, names: Sequence[BlockName]) -> list[bool]:
        keys = self._keys(names)
        counts = self._n_values(keys)
        there = [n > 0 for n in counts]
        if self._ttl_s is None:
            return there  # looking has touched them
        values = [(i, key) for i, n in enumerate(counts) for key in value_keys(keys[i], n) if n]
        replies = self._client.ask([("EXPIRE", key, self._ttl_s) for _, key in values])
        for (i, _), reply in zip(values, replies, strict=True):
            there[i] = there[i] and reply == 1
        return there

    def read(self, names: Sequence[BlockName], into: Sequence[memoryview]) -> list[bool]:
        keys, buffers = self._keys(names), [buffer.cast("B") for buffer in into]
        arrived: list[bool] = []
        for batch in _batches(range(len(keys)), [len(buffer) for buffer in buffers]):
            values = [value_keys(keys[i], n_values(len(buffers[i]))) for i in batch]
            replies = iter(self._client.ask([("GET", key) for one in values for key in one]))
            for i, one in zip(batch, values, strict=True):
                arrived.append(self._take(keys[i], [next(replies) for _ in one], buffers[i]))
        return arrived

    def write(
        self, names: Sequence[BlockName], blocks: Sequence[memoryview], wanted: Callable[[], bool] = lambda: True
    ) -> int:
        keys, contents = self._keys(names), [block.cast("B") for block in blocks]
        there = self.touch(names)
        absent = [i for i, found in enumerate(there) if not found]
        for batch in _batches(absent, [len(block) for block in contents]):
            some = list(takewhile(lambda _: wanted(), batch))
            self._send([keys[i] for i in some], [contents[i] for i in some])
            for i in some:
                there[i] = True
            if len(some) < len(batch):
                break
        return there.index(False) if False in there else len(there)

    def contents(self) -> Contents:
        """The server's own numbers, of all that it holds: a block with several values counts as several."""
        (n_keys,) = self._client.ask([("DBSIZE",)])
        try:
            facts = _facts_in(*self._client.ask([("INFO", "memory")]))
        except StoreError:  # not every server has this command, or lets everybody use it
            facts = {}
        return Contents(_number(n_keys), _number(facts.get("used_memory")), _number(facts.get("maxmemory")) or None)

    def close(self) -> None:
        self._client.close()

    def _keys(self, names: Sequence[BlockName]) -> list[str]:
        return [block_key(self._root, name) for name in names]

    def _n_values(self, keys: Sequence[str]) -> list[int]:
        """The number of values of each block; 0 if one of them is not there."""
        headers = self._client.ask([("GETRANGE", key, 0, HEADER_BYTES - 1) for key in keys])
        sizes = [size_in(header) for header in headers]
        counts = [0 if size is None else n_values(size) for size in sizes]
        further = [(i, key) for i, n in enumerate(counts) for key in value_keys(keys[i], n)[1:]]
        replies = self._client.ask([("GETRANGE", key, 0, 0) for _, key in further])
        for (i, _), reply in zip(further, replies, strict=True):
            if not isinstance(reply, bytes) or not reply:
                counts[i] = 0
        return counts

    def _take(self, key: str, values: list[Any], into: memoryview) -> bool:
        """Copy a block of these values; if they are not a whole one, remove it. Returns whether it is whole."""
        if values[0] is None:
            return False
        if unpack(key, values, into):
            return True
        announced = n_values(size_in(values[0]) or 0)
        lost = announced == len(values) and None in values
        with self._counting:
            self.counts["evicted" if lost else "corrupt"] += 1
        self._client.ask([("UNLINK", *value_keys(key, max(announced, len(values))))])
        return False

    def _send(self, keys: list[str], blocks: list[memoryview]) -> None:
        """Write blocks, each with its header last. Raises `StoreFull` if the server refuses one; then neither that one
        nor a later one is left."""
        if not keys:
            return
        commands: list[Command] = [self._set(f"{root_key(self._root)}:about", json.dumps(self._root.about))]
        owners = [-1]
        for i, (key, block) in enumerate(zip(keys, blocks, strict=True)):
            values = pack(key, block)
            pairs = list(zip(value_keys(key, len(values)), values, strict=True))
            commands += [self._set(*pair) for pair in reversed(pairs)]
            owners += [i] * len(pairs)
        replies = self._client.ask(commands)
        for owner, reply in zip(owners, replies, strict=True):
            if owner >= 0 and reply != b"OK":
                self._take_back(keys[owner:], blocks[owner:])
                raise self._client.unexpected(reply)

    def _set(self, key: str, value: str | bytes | memoryview) -> Command:
        return ("SET", key, value, *self._life)

    def _take_back(self, keys: list[str], blocks: list[memoryview]) -> None:
        try:
            self._client.ask([("UNLINK", *value_keys(k, n_values(len(b)))) for k, b in zip(keys, blocks, strict=True)])
        except StoreError:
            return  # what is left are blocks that nobody looks for, until the server makes room


def _facts_in(info: object) -> dict[str, str]:
    """The values of a reply to INFO by name."""
    if not isinstance(info, bytes):
        return {}
    lines = info.decode("utf-8", "replace").splitlines()
    return {name: value for name, _, value in (line.partition(":") for line in lines)}


def _number(value: object) -> int:
    """The number that a server said; 0 if it said something else."""
    if isinstance(value, int):
        return value
    return int(value) if isinstance(value, str) and value.isdecimal() else 0


def _batches(indices: Sequence[int], sizes: Sequence[int]) -> Iterator[list[int]]:
    """These indices, in this order, in batches whose sizes are at most `_BATCH_BYTES` together, or of one."""
    batch: list[int] = []
    n_bytes = 0
    for i in indices:
        if batch and n_bytes + sizes[i] > _BATCH_BYTES:
            yield batch
            batch, n_bytes = [], 0
        batch.append(i)
        n_bytes += sizes[i]
    if batch:
        yield batch
