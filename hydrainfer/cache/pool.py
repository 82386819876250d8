"""A pool of equal blocks: their holders, which of them can be reused, and the order of eviction.

free ──take──> leased (refcount ≥ 1) ──last drop──> free            if it has no key
                  ^                  └─last drop──> cached          if it has one
                  └───────share─────────────────────┘ │
free <────────────────── evicted, least recently used first
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol


class Free(Protocol):
    """The free blocks of a pool."""

    def draw(self, n: int) -> list[int]:
        """Take out `n` free blocks. The caller has checked that there are as many."""

    def append(self, block: int, /) -> None: ...

    def extend(self, blocks: Iterable[int], /) -> None: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]: ...


class _Stack(list[int]):
    """The free blocks as a stack: the last one added is drawn first."""

    def draw(self, n: int) -> list[int]:
        split = len(self) - n
        blocks = self[split:]
        del self[split:]
        return blocks


class BlockPool:
    """The bookkeeping of blocks `0 .. n_blocks-1`, without their bytes."""

    def __init__(self, n_blocks: int) -> None:
        self.n_blocks = n_blocks
        self._free: Free = _Stack(range(n_blocks - 1, -1, -1))
        self._refs = [0] * n_blocks
        self._key_of: list[bytes | None] = [None] * n_blocks
        self._index: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # refcount 0 and indexed, oldest first
        self.version = 0  # changes with the results of `lookup_all`
        self.news: dict[bytes, bool] | None = None  # keys added (True) or evicted (False), if recorded
        self.on_evict: Callable[[list[bytes], list[int]], None] | None = None  # called before blocks become free

    @property
    def n_available(self) -> int:
        """The number of blocks that `take` can return: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def n_cached(self) -> int:
        return len(self._cached)

    def take(self, n: int) -> list[int]:
        """Take `n` fresh blocks, evicting cached ones if necessary. The caller has checked `n_available`."""
        assert n <= self.n_available, f"took {n} of {self.n_available} blocks"
        free, refs = self._free, self._refs
        if len(free) < n:
            self._evict(n - len(free))
        blocks = free.draw(n)
        for b in blocks:
            refs[b] = 1
        return blocks

    def _evict(self, n: int) -> None:
        """Free the `n` cached blocks that were dropped first."""
        self.version += 1
        key_of, index, pop = self._key_of, self._index, self._cached.popitem
        blocks = [pop(last=False)[0] for _ in range(n)]
        keys: list[bytes] = [key_of[block] for block in blocks]  # type: ignore[misc]  # a cached block has a key
        for block, key in zip(blocks, keys):
            key_of[block] = None
            del index[key]
        if self.news is not None:
            self.news.update(dict.fromkeys(keys, False))
        if self.on_evict is not None:
            self.on_evict(keys, blocks)
        self._free.extend(blocks)

    def forget_all(self) -> int:
        """Forget all keys, so that nothing that is here now is found any more. Cached blocks become free at once,
        leased ones once they are dropped. Returns the number of cached blocks."""
        n_cached = len(self._cached)
        if n_cached:
            self._evict(n_cached)
        if self._index:
            self.version += 1
            if self.news is not None:
                self.news.update(dict.fromkeys(self._index, False))
            for block in self._index.values():
                self._key_of[block] = None
            self._index.clear()
        return n_cached

    def lookup_all(self, keys: Iterable[bytes]) -> list[int | None]:
        return list(map(self._index.get, keys))

    def __contains__(self, key: bytes) -> bool:
        return key in self._index

    def is_cached(self, block: int) -> bool:
        return block in self._cached

    def n_shared_of(self, blocks: Iterable[int]) -> int:
        """The number of blocks that stop being available once these are shared."""
        return len({b for b in blocks if b in self._cached})

    def share(self, block: int) -> None:
        """Add a holder to a cached or leased block."""
        if self._refs[block] == 0:
            del self._cached[block]
        self._refs[block] += 1

    def drop(self, blocks: Iterable[int]) -> None:
        """Remove a holder from each block. Without holders a block is cached if it was published, else free."""
        refs, key_of, free = self._refs, self._key_of, self._free
        for block in blocks:
            n = refs[block] = refs[block] - 1
            if n:
                assert n > 0, f"block {block} dropped twice"
            elif key_of[block] is None:
                free.append(block)
            else:
                self._cached[block] = None

    def publish(self, blocks: list[int], first: int, keys: Iterable[bytes]) -> bool:
        """Publish the blocks from index `first` on under `keys`. Called after their bytes are written, so that the
        index never points to missing content. If another block already has a key, the holder drops its own block and
        adopts that one. Returns whether it adopted any."""
        refs, key_of, put, news = self._refs, self._key_of, self._index.setdefault, self.news
        n_before, adopted = len(self._index), False
        for i, key in enumerate(keys, first):
            mine = blocks[i]
            assert refs[mine] > 0, f"block {mine} published while nobody holds it"
            known = put(key, mine)
            if known != mine:
                self.share(known)
                self.drop((mine,))
                blocks[i] = known
                adopted = True
            elif key_of[mine] is None:
                key_of[mine] = key
                if news is not None:
                    news[key] = True
            else:
                assert key_of[mine] == key, f"block {mine} published under two keys"
        self.version += len(self._index) - n_before
        return adopted

    def check(self, held: Iterable[int]) -> None:
        """Check that every block is in exactly one state and that `held` (the blocks of all leases, with repeats)
        explains every reference. Raises `AssertionError`."""
        refs = Counter(held)
        assert all(n == refs.get(b, 0) for b, n in enumerate(self._refs)), "references not explained by leases"
        leased = {b for b, n in enumerate(self._refs) if n}
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert free | cached | leased == set(self._all()), "a block is lost"
        assert not (free & cached or free & leased or cached & leased), "a block is in two states"
        keyed = {b: key for b, key in enumerate(self._key_of) if key is not None}
        assert {self._index[k]: k for k in self._index} == keyed, "index and keys disagree"
        assert not free & keyed.keys() and cached <= keyed.keys(), "a free block is indexed"

    def _all(self) -> Iterable[int]:
        return range(self.n_blocks)


class SlidingPool(BlockPool):
    """A pool for leases that slide: they give blocks back and take as many others. A block counts once for each of its
    holders, so that a holder that drops a block, which others may still hold, can always take another one."""

    def __init__(self, n_blocks: int) -> None:
        super().__init__(n_blocks)
        self._n_more = 0  # holders of blocks, without the first of each

    @property
    def n_available(self) -> int:
        return super().n_available - self._n_more

    def n_shared_of(self, blocks: Iterable[int]) -> int:
        return len(list(blocks))

    def share(self, block: int) -> None:
        self._n_more += self._refs[block] > 0
        super().share(block)

    def drop(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._n_more -= self._refs[block] > 1
            super().drop((block,))

    def check(self, held: Iterable[int]) -> None:
        super().check(held)
        assert self._n_more == sum(refs - 1 for refs in self._refs if refs), "holders miscounted"
        assert self.n_available >= 0, "more blocks are spoken for than there are"
