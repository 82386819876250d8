"""Reservations of blocks over all caches of an instance: all or nothing, grown as a request decodes, released per
spec."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from hydrainfer.cache.arena import Arena, Split
from hydrainfer.cache.pool import BlockPool, SlidingPool
from hydrainfer.cache.spec import CacheSpec, Found
from hydrainfer.cache.tiers import Fetch, Tier
from hydrainfer.core import Cached, CachedKeys


class Hit(NamedTuple):
    """The cached blocks that a request may share. `keys[spec][i]` is the key of its block number `i`; `blocks[spec][i]`
    is the cached block with that key, or None, as for all numbers beyond. `n_tokens`: how many tokens count as computed
    once those blocks are shared; `n_chained`: how many the caches of all tokens have, which may be more than other
    caches allow. `missing`: the request's pictures that are then still to be encoded. `fetches`: blocks that count as
    there, though another tier has them; `worth_s`: how long it would take to compute these. `n_here`: how many of
    `n_tokens` are found without other tiers; `n_away`: how many more each of these adds, None if none was asked."""

    keys: Mapping[str, Sequence[bytes]]
    blocks: Mapping[str, Found]
    n_tokens: int = 0
    n_chained: int = 0
    missing: Sequence[int] = ()
    fetches: Sequence[Fetch] = ()
    worth_s: float = 0.0
    n_here: int = 0
    n_away: Mapping[str, int] | None = None


NO_HIT = Hit({}, {})


class Lease:
    """The blocks that one request holds, by spec: `blocks[spec][i]` is its block number `first[spec] + i`. `private`:
    they are from before `CacheSet.forget`, and are not published. Only `CacheSet` makes and changes leases."""

    __slots__ = ("blocks", "first", "owner", "private")

    def __init__(self, owner: str, blocks: dict[str, list[int]], first: dict[str, int]) -> None:
        self.owner = owner
        self.blocks = blocks
        self.first = first
        self.private = False


class CacheSet:
    """The caches of one instance behind one interface. "No room" is a return value, never an exception. `split`: how
    some of them share their memory; `moved`: see `Arena`."""

    def __init__(
        self,
        sizes: Mapping[CacheSpec, int],
        split: Split | None = None,
        moved: Callable[[int], None] | None = None,
    ) -> None:
        self.specs = {spec.name: spec for spec in sizes}
        self.arena = None if split is None else Arena(split, (s.name for s in sizes if s.slides), moved)
        elastic = {} if self.arena is None else self.arena.pools
        self.pools: dict[str, BlockPool] = {
            spec.name: elastic.get(spec.name) or (SlidingPool if spec.slides else BlockPool)(n)
            for spec, n in sizes.items()
        }
        self._leases: dict[str, Lease] = {}

    def most(self, spec: str) -> int:
        """The number of this cache's blocks that a request can have if it is alone."""
        if self.arena is not None and spec in self.arena.pools:
            return self.arena.split.most(spec)
        return self.pools[spec].n_blocks

    def has_room(self, wanted: Mapping[str, int], hit: Hit = NO_HIT) -> bool:
        """Whether the `wanted` number of blocks of each spec is available. Caches that share memory lend each other
        what is missing, but keep the blocks in `hit`."""
        short = [spec for spec, n in wanted.items() if n > self.pools[spec].n_available]
        if not short or self.arena is None:
            return not short
        return all(spec in self.arena.pools for spec in short) and self.arena.lend(wanted, hit.blocks)

    def forget(self) -> dict[str, int]:
        """Forget what all caches have, so that no request finds it any more. Leases keep their blocks, but publish none
        from now on: a chain of theirs would begin in the middle. Returns how many other blocks had content, by
        spec."""
        for lease in self._leases.values():
            lease.private = True
        return {name: pool.forget_all() for name, pool in self.pools.items()}

    def free_shared(self) -> bool:
        """Evict all cached blocks in shared memory, if no lease is held: one request's blocks may be scattered so that
        no extent can be lent. Returns whether there were any."""
        if self.arena is None or self._leases:
            return False
        return sum(pool.forget_all() for pool in self.arena.pools.values()) > 0

    @property
    def version(self) -> int:
        """A number that changes whenever the result of `find` may change."""
        return sum([pool.version for pool in self.pools.values()])

    def find(self, spec: str, keys: Sequence[bytes]) -> list[int | None]:
        """The cached blocks with these keys, None where there is none. For a `chained` spec the list ends before the
        first missing key. Nothing is held until `reserve`."""
        pool = self.pools[spec]
        if keys and self.specs[spec].chained:
            keys = keys[: bisect_left(range(len(keys)), True, key=lambda i: keys[i] not in pool)]
        return pool.lookup_all(keys)

    def keep_evicted(self, tiers: Sequence[Tier]) -> None:
        """Offer the blocks that are evicted from now on to these tiers."""

        def tell(spec: str, keys: list[bytes], blocks: list[int]) -> None:
            for tier in tiers:
                tier.evicted(spec, keys, blocks)

        for name, pool in self.pools.items():
            pool.on_evict = partial(tell, name) if tiers else None

    def reserve(self, owner: str, need: Mapping[str, range], hit: Hit = NO_HIT) -> Lease | None:
        """Lease the blocks with the numbers `need[spec]` of every spec. Returns None, with nothing changed, if there is
        no room. Blocks in `hit` are shared; blocks with equal keys in one request are one block. `hit` must be up to
        date."""
        assert owner not in self._leases, f"{owner} already holds a lease"
        wanted: list[tuple[str, int, Sequence[bytes], Found]] = []
        total: dict[str, int] = {}
        for spec, numbers in need.items():
            pool, keyed = self.pools[spec], slice(numbers.start, numbers.stop)
            keys, found = hit.keys.get(spec, ())[keyed], hit.blocks.get(spec, ())[keyed]
            n_fresh, n_shared = len(numbers), 0
            if found:
                n_shared = pool.n_shared_of(b for b in found if b is not None)
                n_fresh += len({k for k, b in zip(keys, found) if b is None}) - len(found)
            total[spec] = n_fresh + n_shared
            wanted.append((spec, n_fresh, keys, found))
        if not self.has_room(total, hit):
            return None
        lease = self._leases[owner] = Lease(owner, {}, {spec: numbers.start for spec, numbers in need.items()})
        for spec, n_fresh, keys, found in wanted:
            pool, new = self.pools[spec], n_fresh == len(need[spec])
            lease.blocks[spec] = pool.take(n_fresh) if new else self._collect(pool, n_fresh, keys, found)
        return lease

    @staticmethod
    def _collect(pool: BlockPool, n_fresh: int, keys: Sequence[bytes], found: Found) -> list[int]:
        """The blocks of one spec in order: the found ones, a fresh one for each missing key, then those without
        keys."""
        for block in found:  # share first: `take` cannot evict held blocks
            if block is not None:
                pool.share(block)
        fresh = iter(pool.take(n_fresh))
        blocks: list[int] = []
        mine: dict[bytes, int] = {}
        for key, block in zip(keys, found):
            if block is None and key in mine:
                block = mine[key]
                pool.share(block)
            elif block is None:
                block = mine[key] = next(fresh)
            blocks.append(block)
        blocks += fresh
        return blocks

    def hold(self, owner: str, spec: str, blocks: Sequence[int]) -> Lease:
        """Add cached or leased blocks to the lease of `owner`, which is made if there is none. For a `chained` spec,
        all that are before them in their chain must be among `blocks`, in order."""
        lease = self._leases.setdefault(owner, Lease(owner, {}, {}))
        for block in blocks:
            self.pools[spec].share(block)
        lease.blocks.setdefault(spec, []).extend(blocks)
        return lease

    def drop(self, lease: Lease, spec: str, blocks: Sequence[int]) -> None:
        """Give some blocks of a lease back."""
        held = lease.blocks[spec]
        for block in blocks:
            held.remove(block)
        self.pools[spec].drop(blocks)

    def rename(self, lease: Lease, owner: str) -> None:
        """Give the lease another owner, so that the old one may reserve again."""
        assert owner not in self._leases, f"{owner} already holds a lease"
        self._leases[owner] = self._leases.pop(lease.owner)
        lease.owner = owner

    def grow(self, lease: Lease, wanted: Mapping[str, int]) -> bool:
        """Add the `wanted` number of blocks of each spec at the end of the lease. Returns False, with nothing changed,
        if there is no room."""
        if not self.has_room(wanted):
            return False
        for spec, n in wanted.items():
            lease.blocks[spec] += self.pools[spec].take(n)
        return True

    def slide(self, lease: Lease, spec: str, first: int, most: float) -> None:
        """Give back the blocks numbered below `first`, and take as many at the end, so that there are at most `most`;
        surplus ones at the end are given back, too. In a `SlidingPool` this cannot fail. For a spec that `jumps`, only
        the first block is given back."""
        pool, blocks, n_stale = self.pools[spec], lease.blocks[spec], first - lease.first[spec]
        n = int(min(len(blocks), most))
        gone = blocks[: min(n_stale, 1) if self.specs[spec].jumps else n_stale]
        pool.drop([*gone, *blocks[len(gone) + n :]])
        blocks[:] = blocks[len(gone) : len(gone) + n]
        blocks += pool.take(n - len(blocks))
        lease.first[spec] = first

    def keep(self, lease: Lease, spec: str, kept: Sequence[int]) -> None:
        """Give back all blocks of one spec but those with these indices in the lease, which stay in order."""
        blocks = lease.blocks[spec]
        self.pools[spec].drop(block for i, block in enumerate(blocks) if i not in kept)
        blocks[:] = [blocks[i] for i in kept]

    def commit(self, lease: Lease, spec: str, first: int, keys: Sequence[bytes]) -> bool:
        """Publish the blocks from number `first` on, whose bytes are written, under `keys`, unless the lease is
        `private`. If other blocks were published under these keys before, the lease adopts them. Returns whether it
        adopted any.

        So a lease with a block of a chain also holds the published blocks before it, and drops them later (`release`).
        Therefore no block is evicted before those that continue it, and `find` may bisect.
        """
        if lease.private:
            return False
        return self.pools[spec].publish(lease.blocks[spec], first - lease.first[spec], keys)

    def release(self, lease: Lease, spec: str | None = None) -> None:
        """Give back the blocks of one spec, or all of them and the lease itself. Safe to repeat."""
        for name in [spec] if spec is not None else list(lease.blocks):
            self.pools[name].drop(reversed(lease.blocks.pop(name, ())))
        if spec is None:
            self._leases.pop(lease.owner, None)

    def news(self) -> Cached | None:
        """The keys published and evicted since the last call, of every cache that limits where a request can go on;
        None if there are none. The first call begins the recording."""
        specs = [spec for spec in self.specs.values() if spec.resume_blocks is not None]
        news = [self.pools[spec.name].news for spec in specs]
        for spec, keys in zip(specs, news):
            if keys is None or keys:
                self.pools[spec.name].news = {}
        if not any(news):
            return None
        return Cached(specs[0].block_tokens, tuple(_news_of(spec, keys or {}) for spec, keys in zip(specs, news)))

    def usage(self) -> dict[str, tuple[int, int, int]]:
        """The numbers of blocks of each spec: total, leased, cached."""
        return {name: (p.n_blocks, p.n_blocks - p.n_available, p.n_cached) for name, p in self.pools.items()}

    def check(self, idle: bool = False) -> None:
        """Check that every pool is consistent with the leases and, with `idle`, that no lease is left. Raises
        `AssertionError`."""
        assert not (idle and self._leases), f"leases left behind: {sorted(self._leases)}"
        if self.arena is not None:
            self.arena.check()
        for name, pool in self.pools.items():
            pool.check(b for lease in self._leases.values() for b in lease.blocks.get(name, ()))


def _news_of(spec: CacheSpec, news: Mapping[bytes, bool]) -> CachedKeys:
    """`BlockPool.news` of one cache as a part of a report."""
    assert spec.resume_blocks is not None
    added = tuple(key for key, is_there in news.items() if is_there)
    return CachedKeys(spec.resume_blocks, spec.chained, added, tuple(key for key in news if not news[key]))
