"""Consistent hashing: most keys keep their owner when owners come or go, so what is cached there is found."""

from __future__ import annotations

import hashlib
from bisect import bisect
from collections.abc import Collection, Iterable
from functools import lru_cache

_POINTS = 64  # per name: shares differ by about 1/sqrt(64)


class HashRing:
    """Names on a ring. A key belongs to the first name clockwise of it."""

    def __init__(self, names: Iterable[str]) -> None:
        points = sorted((_place(f"{name}#{i}".encode()), name) for name in names for i in range(_POINTS))
        self._places = [place for place, _ in points]
        self._names = [name for _, name in points]

    def owner(self, key: bytes, among: Collection[str]) -> str | None:
        """The first name clockwise of `key` that is in `among`, or None."""
        first = bisect(self._places, _place(key))
        for i in range(len(self._names)):
            name = self._names[(first + i) % len(self._names)]
            if name in among:
                return name
        return None


@lru_cache(maxsize=16)
def ring_of(names: tuple[str, ...]) -> HashRing:
    """The ring of these names; the same in every process."""
    return HashRing(names)


def _place(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest())
