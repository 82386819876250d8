"""What a server holds of all models, for people: a summary, a check of all blocks, and their removal."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import redis

from hydrainfer.stores.address import server_address
from hydrainfer.stores.port import Contents, KindRow, Root, StoreError
from hydrainfer.stores.resp import RespStore
from hydrainfer.stores.resp_client import RespClient
from hydrainfer.stores.resp_values import HEADER_BYTES, PREFIX, contents_of, n_values, size_in, value_keys

_KEY = re.compile(rf"{PREFIX}:(?P<root>[0-9a-f]{{32}}):(?:about|(?P<kind>[^:]+):[0-9a-f]{{32}}(?P<part>:[0-9]+)?)")
_SCAN_KEYS = 500
_READ_BLOCKS = 8  # whose values are in memory together


def summary(
    url: str, environ: Mapping[str, str] = os.environ, connect: Callable[..., redis.Redis] = redis.Redis
) -> list[KindRow]:
    """What a server holds: a row per root and kind. Looking does not make blocks count as used, if the server knows how
    to. Raises `StoreError`."""
    tallies: dict[tuple[str, str], _Tally] = {}
    with _client(url, environ, connect) as client:
        with suppress(StoreError):  # Redis 7.2 and later
            client.ask([("CLIENT", "NO-TOUCH", "ON")])
        for keys in _scan(client):
            blocks = [match for match in keys if match["kind"]]
            idle = _idle_s(client, [match[0] for match in blocks])
            sizes = client.ask([("STRLEN", match[0]) for match in blocks])
            for match, size, idle_s in zip(blocks, sizes, idle, strict=True):
                tally = tallies.setdefault((match["root"], match["kind"]), _Tally())
                tally.n_bytes += size if isinstance(size, int) else 0
                if not match["part"]:
                    tally.n_blocks += 1
                    tally.idle_s += [idle_s] if isinstance(idle_s, int) else []
        rows = sorted(tallies)
        abouts = client.ask([("GET", f"{PREFIX}:{root}:about") for root, _ in rows])
    return [tallies[row].row(_about(about), row[1]) for row, about in zip(rows, abouts, strict=True)]


def contents(
    url: str, environ: Mapping[str, str] = os.environ, connect: Callable[..., redis.Redis] = redis.Redis
) -> Contents:
    """What a server says that it holds, other data included. Raises `StoreError`."""
    store = RespStore(url, Root(bytes(16), {}), environ, connect)
    try:
        return store.contents()
    finally:
        store.close()


def clear(
    url: str, environ: Mapping[str, str] = os.environ, connect: Callable[..., redis.Redis] = redis.Redis
) -> tuple[int, int]:
    """Remove all blocks, also while servers use them. Returns how many there were, and their bytes. Raises
    `StoreError`."""
    n_blocks = n_bytes = 0
    with _client(url, environ, connect) as client:
        for keys in _scan(client):
            sizes = client.ask([("STRLEN", match[0]) for match in keys])
            gone = client.ask([("UNLINK", match[0]) for match in keys])
            for match, size, n_gone in zip(keys, sizes, gone, strict=True):
                if not isinstance(n_gone, int):
                    raise client.unexpected(n_gone)
                if match["kind"] and n_gone:
                    n_blocks += not match["part"]
                    n_bytes += size if isinstance(size, int) else 0
    return n_blocks, n_bytes


def check(
    url: str, environ: Mapping[str, str] = os.environ, connect: Callable[..., redis.Redis] = redis.Redis
) -> tuple[int, int]:
    """Read all blocks, and remove those that are broken. Returns how many are whole, and how many were removed. Raises
    `StoreError`."""
    n_whole = n_broken = 0
    with _client(url, environ, connect) as client:
        for keys in _scan(client):
            blocks = [match[0] for match in keys if match["kind"] and not match["part"]]
            for start in range(0, len(blocks), _READ_BLOCKS):
                states = _check(client, blocks[start : start + _READ_BLOCKS])
                n_whole += states.count(True)
                n_broken += states.count(False)
    return n_whole, n_broken


def _check(client: RespClient, keys: Sequence[str]) -> list[bool | None]:
    """Whether each of these blocks is whole; None for one that is gone. Those that are broken are removed."""
    headers = client.ask([("GETRANGE", key, 0, HEADER_BYTES - 1) for key in keys])
    values = [value_keys(key, n_values(size_in(header) or 0)) for key, header in zip(keys, headers, strict=True)]
    replies = iter(client.ask([("GET", key) for one in values for key in one]))
    states: list[bool | None] = []
    for key, one in zip(keys, values, strict=True):
        parts = [next(replies) for _ in one]
        states.append(None if parts[0] is None else contents_of(key, parts) is not None)
    client.ask([("UNLINK", *one) for one, state in zip(values, states, strict=True) if state is False])
    return states


def _scan(client: RespClient) -> Iterator[list[re.Match[str]]]:
    """All keys of ours; one that comes or goes meanwhile may be missing or come twice."""
    cursor: Any = b"0"
    while True:
        (reply,) = client.ask([("SCAN", cursor, "MATCH", f"{PREFIX}:*", "COUNT", _SCAN_KEYS)])
        if not isinstance(reply, list) or len(reply) != 2 or not isinstance(reply[1], list):
            raise client.unexpected(reply)
        cursor, keys = reply
        texts = [key.decode("utf-8", "replace") for key in keys if isinstance(key, bytes)]
        yield [match for match in map(_KEY.fullmatch, texts) if match]
        if cursor in (b"0", 0):
            return


def _about(data: object) -> dict[str, str]:
    try:
        about = json.loads(data) if isinstance(data, bytes) else None
    except (ValueError, RecursionError):
        return {}
    return {str(key): str(value) for key, value in about.items()} if isinstance(about, dict) else {}


@dataclass(slots=True)
class _Tally:
    """What is known of the blocks of one kind below one root. `idle_s`: for how long each has not been used."""

    n_blocks: int = 0
    n_bytes: int = 0
    idle_s: list[int] = field(default_factory=list)

    def row(self, about: dict[str, str], kind: str) -> KindRow:
        oldest_s, newest_s = max(self.idle_s, default=None), min(self.idle_s, default=None)
        return KindRow(about, kind, self.n_blocks, self.n_bytes, oldest_s, newest_s)


def _idle_s(client: RespClient, keys: Sequence[str]) -> Sequence[object]:
    """For how many seconds each key has not been used. Not every server says it, and none that counts uses (LFU)."""
    try:
        return client.ask([("OBJECT", "IDLETIME", key) for key in keys])
    except StoreError:
        return [None] * len(keys)


@contextmanager
def _client(url: str, environ: Mapping[str, str], connect: Callable[..., redis.Redis]) -> Iterator[RespClient]:
    client = RespClient(server_address(url), environ, connect)
    try:
        yield client
    finally:
        client.close()
