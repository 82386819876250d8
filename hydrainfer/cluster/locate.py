"""Where prefixes of prompts are cached: the port `Locator`, and an index of what the instances have reported."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from hydrainfer.core import Cached, CachedKeys, Request, split_chain


class Locator(Protocol):
    """Knows which instances have computed the beginning of a prompt."""

    def learn(self, name: str, cached: Cached) -> None:
        """Note what the caches of an instance have gained and lost."""

    def forget(self, name: str) -> None:
        """The caches of an instance are gone."""

    def learned(self) -> Iterator[tuple[str, Cached]]:
        """What each instance has, for somebody who has heard nothing yet."""

    def locate(self, request: Request) -> Mapping[str, int]:
        """The number of tokens of the prompt that an instance need not compute, for all where it is not 0. The last
        token of a prompt is always computed anew, so it never counts."""


class _CacheIndex:
    """The published keys of one cache of many instances. `bits`: the numbers of these instances, one bit each;
    `holders`: the bits of those that have a key. The rest as in `CachedKeys`."""

    def __init__(self, resume_blocks: int, chained: bool) -> None:
        self.resume_blocks = resume_blocks
        self.chained = chained
        self.bits = 0
        self.holders: dict[bytes, int] = {}

    def add(self, keys: Sequence[bytes], bit: int) -> None:
        for key in keys:
            self.holders[key] = self.holders.get(key, 0) | bit

    def drop(self, keys: Sequence[bytes], bit: int) -> None:
        for key in keys:
            left = self.holders.get(key, 0) & ~bit
            if left:
                self.holders[key] = left
            else:
                self.holders.pop(key, None)

    def keys_of(self, bit: int) -> tuple[bytes, ...]:
        return tuple(key for key, bits in self.holders.items() if bits & bit)

    def last_point(self, bit: int, keys: Sequence[bytes], most: int) -> int:
        """The largest number of blocks, at most `most`, after which a request with these keys can go on there."""
        holders = self.holders
        if self.chained:
            return bisect_left(range(most), True, key=lambda i: not holders.get(keys[i], 0) & bit)
        stop = most
        for i in range(most - 1, -1, -1):
            if i < stop - self.resume_blocks:
                break
            if not holders.get(keys[i], 0) & bit:
                stop = i
        return stop

    def points(self, keys: Sequence[bytes], most: int) -> Iterator[tuple[int, int]]:
        """Upper bounds of the last points: numbers of blocks, each with the bits of the instances it is for. Those
        without the first block of a `chained` cache are left out."""
        if not self.chained:
            yield most, self.bits
            return
        last, stride, holders = 0, 1, self.holders
        bits = holders.get(keys[0], 0) if most else 0  # those that have block `last`
        while bits and last + 1 < most:
            ahead = last + stride
            if ahead >= most:
                ahead = most - 1
            there = holders.get(keys[ahead], 0) & bits
            if there == bits:
                last, stride = ahead, stride * 2
            elif ahead > last + 1:
                stride = (ahead - last) // 2
            else:
                yield last + 1, bits ^ there
                last, stride, bits = ahead, 1, there
        if bits:
            yield last + 1, bits


class _Holder(NamedTuple):
    """An instance: the bit of its number, and the indices of its caches."""

    bit: int
    caches: list[_CacheIndex]

    def last_point(self, keys: Sequence[bytes], most: int) -> int:
        """The largest number of blocks, at most `most`, after which all its caches let a request go on."""
        n_blocks = most
        while n_blocks:
            before = n_blocks
            for cache in self.caches:
                n_blocks = cache.last_point(self.bit, keys, n_blocks)
            if n_blocks == before:
                break
        return n_blocks


class PrefixIndex:
    """What each instance has cached, by key, as last reported. A request can go on from a point only if every cache of
    the instance has what it needs there."""

    def __init__(self) -> None:
        self._block_tokens = 1
        self._holders: dict[str, _Holder] = {}
        self._names: dict[int, str] = {}  # by bit
        self._free: list[int] = []  # bits of instances that are gone
        self._indices: dict[tuple[int, int, bool], _CacheIndex] = {}  # by place among an instance's caches, and kind
        self._asked: tuple[bytes, int] = b"", 0  # keys and tokens of the request that was located last
        self._located: dict[str, int] = {}

    def learn(self, name: str, cached: Cached) -> None:
        if name not in self._holders:
            self._holders[name] = self._holder(cached)
            self._names[self._holders[name].bit] = name
        holder = self._holders[name]
        for cache, news in zip(holder.caches, cached.caches, strict=True):
            cache.add(news.added, holder.bit)
            cache.drop(news.dropped, holder.bit)
        self._block_tokens = cached.block_tokens
        self._asked = b"", 0

    def forget(self, name: str) -> None:
        holder = self._holders.pop(name, None)
        if holder is None:
            return
        for cache in holder.caches:
            cache.drop(cache.keys_of(holder.bit), holder.bit)
            cache.bits ^= holder.bit
        del self._names[holder.bit]
        self._free.append(holder.bit)
        self._asked = b"", 0

    def learned(self) -> Iterator[tuple[str, Cached]]:
        for name, (bit, caches) in self._holders.items():
            news = (CachedKeys(cache.resume_blocks, cache.chained, cache.keys_of(bit)) for cache in caches)
            yield name, Cached(self._block_tokens, tuple(news))

    def locate(self, request: Request) -> Mapping[str, int]:
        if not request.keys or not self._holders:
            return {}
        asked = request.keys, request.n_prompt
        if asked != self._asked:  # the same is asked for several stages in a row
            self._asked = asked
            self._located = self._tokens(split_chain(request.keys)[1:], request.n_prompt)
        return self._located

    def _holder(self, cached: Cached) -> _Holder:
        bit = self._free.pop() if self._free else 1 << len(self._names)
        kinds = [(place, news.resume_blocks, news.chained) for place, news in enumerate(cached.caches)]
        caches = [self._indices.setdefault(kind, _CacheIndex(*kind[1:])) for kind in kinds]
        for cache in caches:
            cache.bits |= bit
        return _Holder(bit, caches)

    def _tokens(self, keys: Sequence[bytes], n_prompt: int) -> dict[str, int]:
        n_most = min(len(keys), (n_prompt - 1) // self._block_tokens)
        located: dict[str, int] = {}
        exact = all(place == 0 and chained for place, _, chained in self._indices)  # then the bounds are the points
        for (place, *_), index in self._indices.items():
            for n_blocks, bits in index.points(keys, n_most) if place == 0 else ():
                while bits:
                    bit = bits & -bits
                    bits ^= bit
                    name = self._names[bit]
                    n_there = n_blocks if exact else self._holders[name].last_point(keys, n_blocks)
                    if n_there:
                        located[name] = n_there * self._block_tokens
        return located
