"""The prefixes that instances have cached, as last reported, and the point of a prompt from which each can go on."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hydrainfer.core import Cached, CachedKeys, Request, split_chain


class _Keys(NamedTuple):
    """The published keys of one cache. The rest as in `CachedKeys`."""

    resume_blocks: int
    chained: bool
    there: set[bytes]

    def last_point(self, keys: Sequence[bytes], most: int) -> int:
        """The largest number of blocks, at most `most`, after which a request with these keys can go on."""
        there = self.there
        if self.chained:
            return bisect_left(range(most), True, key=lambda i: keys[i] not in there)
        if self.resume_blocks and not there:
            return 0
        stop = most
        for i in range(most - 1, -1, -1):
            if i < stop - self.resume_blocks:
                break
            if keys[i] not in there:
                stop = i
        return stop


class Prefixes:
    """What each instance has cached. A request can go on from a point only if every cache of the instance has what it
    needs there."""

    def __init__(self) -> None:
        self._caches: dict[str, list[_Keys]] = {}  # by instance
        self._block_tokens = 1
        self._keys: tuple[bytes, list[bytes]] = b"", []  # those of the last request, joined and split
        self._found: dict[str, int] = {}  # its points, by instance: several are asked for in a row

    def __bool__(self) -> bool:
        return bool(self._caches)

    def learn(self, name: str, cached: Cached) -> None:
        """Note what the caches of an instance have gained and lost."""
        caches = self._caches.setdefault(name, [_Keys(c.resume_blocks, c.chained, set()) for c in cached.caches])
        for keys, news in zip(caches, cached.caches, strict=True):
            keys.there.update(news.added)
            keys.there.difference_update(news.dropped)
        self._block_tokens = cached.block_tokens
        self._found.clear()

    def forget(self, name: str) -> None:
        self._caches.pop(name, None)
        self._found.clear()

    def learned(self) -> Iterator[tuple[str, Cached]]:
        """What each instance has."""
        for name, caches in self._caches.items():
            news = (CachedKeys(c.resume_blocks, c.chained, tuple(c.there)) for c in caches)
            yield name, Cached(self._block_tokens, tuple(news))

    def found(self, request: Request, name: str) -> int:
        """The number of tokens of the prompt that an instance need not compute. The last token of a prompt is always
        computed anew, so it never counts."""
        caches = self._caches.get(name)
        if not caches or not request.keys:
            return 0
        if self._keys[0] is not request.keys:
            self._keys = request.keys, split_chain(request.keys)[1:]
            self._found.clear()
        if name not in self._found:
            n_most = (request.n_prompt - 1) // self._block_tokens
            self._found[name] = _common_point(caches, self._keys[1], n_most) * self._block_tokens
        return self._found[name]


def _common_point(caches: Sequence[_Keys], keys: Sequence[bytes], n_most: int) -> int:
    """The largest number of blocks after which all of these caches let a request go on."""
    n_blocks = min(len(keys), n_most)
    while n_blocks:
        before = n_blocks
        for cache in caches:
            n_blocks = cache.last_point(keys, n_blocks)
        if n_blocks == before:
            break
    return n_blocks
