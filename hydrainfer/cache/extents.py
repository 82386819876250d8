"""Pools of blocks in extents, which are ranges of memory that can move from one pool to another."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

from hydrainfer.cache.pool import BlockPool, SlidingPool


class Extents:
    """The free blocks of a pool that has the extents `owned`, each of `size` blocks: extent number e has those from e *
    `size` on. Blocks are drawn from the lowest extents, so that the others become empty."""

    def __init__(self, size: int, owned: Iterable[int]) -> None:
        self.size = size
        self.free: dict[int, list[int]] = {}
        self._open: list[int] = []  # extents with free blocks, in order
        self._n = 0
        for extent in owned:
            self.add(extent)

    def add(self, extent: int) -> None:
        """Add an extent, all of whose blocks are free."""
        self.free[extent] = list(range((extent + 1) * self.size - 1, extent * self.size - 1, -1))
        insort(self._open, extent)
        self._n += self.size

    def remove(self, extent: int) -> None:
        """Give up an extent, all of whose blocks are free."""
        assert len(self.free.pop(extent)) == self.size, f"extent {extent} is in use"
        self._open.remove(extent)
        self._n -= self.size

    def draw(self, n: int) -> list[int]:
        drawn: list[int] = []
        self._n -= n
        while len(drawn) < n:
            free = self.free[self._open[0]]
            split = max(0, len(free) - n + len(drawn))
            drawn += free[split:]
            del free[split:]
            if not free:
                del self._open[0]
        return drawn

    def append(self, block: int, /) -> None:
        extent = block // self.size
        free = self.free[extent]
        if not free:
            insort(self._open, extent)
        free.append(block)
        self._n += 1

    def extend(self, blocks: Iterable[int], /) -> None:
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return self._n

    def __iter__(self) -> Iterator[int]:
        return (block for free in self.free.values() for block in free)


class ElasticPool(BlockPool):
    """A pool of the blocks in its extents. It may give away an extent without leased blocks, and receive others.
    `n_extents`: those of all pools that share the memory; `n_blocks`: the blocks that the pool has now."""

    def __init__(self, size: int, owned: Iterable[int], n_extents: int) -> None:
        super().__init__(size * n_extents)
        self._free = self._extents = Extents(size, owned)
        self.n_blocks = len(self._free)
        self._leased = [0] * n_extents  # the number of leased blocks by extent

    def take(self, n: int) -> list[int]:
        blocks = super().take(n)
        for block in blocks:
            self._leased[block // self.extent_blocks] += 1
        return blocks

    def share(self, block: int) -> None:
        self._leased[block // self.extent_blocks] += not self._refs[block]
        super().share(block)

    def drop(self, blocks: Iterable[int]) -> None:
        blocks = list(blocks)
        super().drop(blocks)
        for block in set(blocks):
            self._leased[block // self.extent_blocks] -= not self._refs[block]

    # ---- extents

    @property
    def extent_blocks(self) -> int:
        return self._extents.size

    @property
    def extents(self) -> Collection[int]:
        return self._extents.free.keys()

    @property
    def n_idle(self) -> int:
        """The number of extents without leased blocks."""
        return sum(not self._leased[extent] for extent in self._extents.free)

    def give(self, kept: Sequence[int]) -> int | None:
        """Give away the extent that is missed least: an empty one, else the one whose blocks have been unused for the
        longest time. All blocks that are cached for as long are evicted with it, so that no block is evicted before
        those that continue it. None if that is impossible without evicting blocks that are `kept`, which are in the
        order of their numbers."""
        empty = (e for e, free in self._extents.free.items() if len(free) == self.extent_blocks)
        given = max(empty, default=None)
        if given is None and self.n_idle:
            given = self._emptied(kept)
        if given is not None:
            self._extents.remove(given)
            self.n_blocks -= self.extent_blocks
        return given

    def _emptied(self, kept: Sequence[int]) -> int | None:
        for block in reversed(kept):  # they will be used soon
            if block in self._cached:
                self._cached.move_to_end(block)
        n_kept = len(self._cached.keys() & set(kept))
        n_free = Counter({extent: len(blocks) for extent, blocks in self._extents.free.items()})
        for n, block in enumerate(self._cached, 1):
            if n > len(self._cached) - n_kept:
                break
            extent = block // self.extent_blocks
            n_free[extent] += 1
            if n_free[extent] == self.extent_blocks:
                self._evict(n)
                return extent
        return None

    def receive(self, extent: int) -> None:
        self._extents.add(extent)
        self.n_blocks += self.extent_blocks

    def check(self, held: Iterable[int]) -> None:
        super().check(held)
        leased = Counter(block // self.extent_blocks for block, refs in enumerate(self._refs) if refs)
        assert all(n == leased[extent] for extent, n in enumerate(self._leased)), "leased blocks miscounted"
        assert len(self._free) == len(list(self._free)), "free blocks miscounted"
        assert self.n_blocks == len(self.extents) * self.extent_blocks

    def _all(self) -> Iterable[int]:
        size = self.extent_blocks
        return (block for extent in self._extents.free for block in range(extent * size, (extent + 1) * size))


class ElasticSlidingPool(ElasticPool, SlidingPool):
    """An `ElasticPool` for leases that slide."""
