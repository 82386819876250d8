"""Caches that share one range of memory. The range is cut into extents, each owned by one cache at a time. A cache that
is short of blocks gets extents of others, down to the floor that each of them keeps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import msgspec

from hydrainfer.cache.extents import ElasticPool, ElasticSlidingPool
from hydrainfer.cache.spec import CacheSpec, Found, Wishes

_ALIGNED = 16  # bytes
_UNITS = 8  # largest blocks that the padding is computed over, at most: more waste less memory on smaller blocks
_LOSS = 0.02  # the share of a block that may be padding; less is not worth larger units
_EXTENTS = 256  # about as many are enough


class Split(msgspec.Struct, frozen=True):
    """The way caches share memory. By cache name, `blocks`: how many of its blocks fill an extent; `owned`: how many
    extents it has at first; `floors`: how many it never lends."""

    extent_bytes: int
    blocks: dict[str, int]
    owned: dict[str, int]
    floors: dict[str, int]

    @property
    def n_extents(self) -> int:
        return sum(self.owned.values())

    def numbered(self, name: str) -> int:
        """The number of block ids of a cache, which is as if it owned all extents."""
        return self.n_extents * self.blocks[name]

    def most(self, name: str) -> int:
        """The blocks that a cache has when all others have lent what they can."""
        return (self.n_extents - sum(self.floors.values()) + self.floors[name]) * self.blocks[name]


def padded(specs: Iterable[CacheSpec]) -> list[CacheSpec]:
    """The same caches with the blocks of those that share memory padded a little, so that an extent holds a whole
    number of each kind of block."""
    specs = list(specs)
    sharing = [spec for spec in specs if spec.takes_the_rest]
    if len(sharing) < 2:
        return specs
    sizes = [spec.block_bytes for spec in sharing]
    most = [_strides(sizes, n) for n in range(1, _UNITS + 1)]
    strides = min(most, key=lambda strides: max(_LOSS, *(1 - b / stride for b, stride in zip(sizes, strides))))
    wide = {spec.name: stride for spec, stride in zip(sharing, strides)}
    return [
        msgspec.structs.replace(spec, padded_bytes=wide[spec.name]) if spec.name in wide else spec for spec in specs
    ]


def _strides(sizes: list[int], n: int) -> list[int]:
    """The padded bytes of each kind of block, so that whole numbers of each fill the space of `n` of the largest."""
    counts = [n * max(sizes) // size for size in sizes]
    step = _ALIGNED * math.lcm(*counts)
    unit = -(-n * max(sizes) // step) * step
    return [unit // count for count in counts]


class CacheSizes(NamedTuple):
    """The number of blocks of each cache, and how caches share memory, if any do."""

    blocks: dict[CacheSpec, int]
    split: Split | None = None

    @property
    def most(self) -> dict[CacheSpec, int]:
        """The number of blocks of each cache that a request can have if it is alone."""
        split = self.split
        if split is None:
            return self.blocks
        return {spec: split.most(spec.name) if spec.name in split.blocks else n for spec, n in self.blocks.items()}


def share_memory(sizes: Mapping[CacheSpec, int], wishes: Wishes) -> CacheSizes:
    """Caches with the same total memory, shared by those that have no fixed size. A cache's floor is the least it
    needs. Nothing is shared if there are fewer than two such caches, or too little memory."""
    wide = padded(sizes)
    blocks = {spec: n * old.block_bytes // spec.block_bytes for spec, (old, n) in zip(wide, sizes.items(), strict=True)}
    split = _split(blocks, wishes)
    if split is None:
        return CacheSizes(dict(zip(wide, sizes.values(), strict=True)))
    owned = {name: n * split.blocks[name] for name, n in split.owned.items()}
    return CacheSizes({spec: owned.get(spec.name, n) for spec, n in blocks.items()}, split)


def _split(sizes: Mapping[CacheSpec, int], wishes: Wishes) -> Split | None:
    sharing = {spec: n for spec, n in sizes.items() if spec.takes_the_rest}
    if len(sharing) < 2:
        return None
    total = sum(spec.block_bytes * n for spec, n in sharing.items())
    unit = math.lcm(*(spec.block_bytes for spec in sharing))
    extent_bytes = unit * max(1, total // unit // _EXTENTS)
    blocks = {spec.name: extent_bytes // spec.block_bytes for spec in sharing}
    floors = {spec.name: -(-spec.least(wishes) // blocks[spec.name]) for spec in sharing}
    n_left = total // extent_bytes - sum(floors.values())
    if n_left < 0:
        return None
    owned = dict(floors)
    shares = {spec.name: n / blocks[spec.name] for spec, n in sharing.items()}
    for _ in range(n_left):
        owned[max(owned, key=lambda name: shares[name] - owned[name])] += 1
    return Split(extent_bytes, blocks, owned, floors)


class Arena:
    """Lends the extents of pools to each other. `moved(extent)` is called for each extent that has a new owner, before
    anything is written there."""

    def __init__(self, split: Split, sliding: Iterable[str], moved: Callable[[int], None] | None = None) -> None:
        self.split, self._moved = split, moved
        self.pools: dict[str, ElasticPool] = {}
        self.n_lent = 0
        first, sliding = 0, set(sliding)
        for name, n in split.owned.items():
            kind = ElasticSlidingPool if name in sliding else ElasticPool
            self.pools[name] = kind(split.blocks[name], range(first, first + n), split.n_extents)
            first += n

    def lend(self, wanted: Mapping[str, int], kept: Mapping[str, Found]) -> bool:
        """Make as many blocks of each pool available as are `wanted`, without evicting the `kept` ones. Returns False
        if that is impossible; extents that were moved before that was known stay moved."""
        spare, lacks = dict[str, int](), dict[str, int]()
        for name, pool in self.pools.items():
            beyond = (pool.n_available - wanted.get(name, 0)) // pool.extent_blocks
            lacks[name] = max(0, -beyond)
            spare[name] = max(0, min(beyond, pool.n_idle, len(pool.extents) - self.split.floors[name]))
        if sum(lacks.values()) > sum(spare.values()):
            return False
        for name, n in lacks.items():
            for _ in range(n):
                if not self._move(name, spare, kept):
                    return False
        return True

    def _move(self, to: str, spare: dict[str, int], kept: Mapping[str, Found]) -> bool:
        """Move one extent to pool `to`, from the pool that can spare most. Returns False if no pool can spare one."""
        while spare[giver := max(spare, key=lambda name: spare[name])] > 0:
            extent = self.pools[giver].give([block for block in kept.get(giver, ()) if block is not None])
            if extent is None:
                spare[giver] = 0
                continue
            spare[giver] -= 1
            if self._moved is not None:
                self._moved(extent)
            self.pools[to].receive(extent)
            self.n_lent += 1
            return True
        return False

    def check(self) -> None:
        """Check that every extent belongs to one pool and that floors hold. Raises `AssertionError`."""
        owned = sorted(extent for pool in self.pools.values() for extent in pool.extents)
        assert owned == list(range(self.split.n_extents)), "an extent is lost, or two pools have it"
        assert all(len(pool.extents) >= self.split.floors[name] for name, pool in self.pools.items()), (
            "a floor was lent"
        )
