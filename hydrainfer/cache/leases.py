"""Reservations over all caches of an instance: all or nothing, grown as a request decodes, released per spec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hydrainfer.cache.pool import BlockPool
from hydrainfer.cache.spec import CacheSpec


class Hit(NamedTuple):
    """`keys[spec][i]` is the key of the i-th block wanted of that spec; `blocks[spec][i]` the block that has it, or
    None."""

    keys: Mapping[str, Sequence[bytes]]
    blocks: Mapping[str, Sequence[int | None]]

    def complete(self, spec: str) -> bool:
        return all(b is not None for b in self.blocks.get(spec, ()))


NO_HIT = Hit({}, {})


class Lease:
    """The blocks one request holds, by spec, in token order. Made and changed only by `CacheSet`."""

    __slots__ = ("blocks", "owner")

    def __init__(self, owner: str, blocks: dict[str, list[int]]) -> None:
        self.owner = owner
        self.blocks = blocks


class CacheSet:
    """The caches of one instance behind one interface. "No room" is a return value, never an exception."""

    def __init__(self, sizes: Mapping[CacheSpec, int]) -> None:
        self.specs = {spec.name: spec for spec in sizes}
        self.pools = {spec.name: BlockPool(n) for spec, n in sizes.items()}
        self._leases: dict[str, Lease] = {}

    def match(self, keys: Mapping[str, Sequence[bytes]]) -> Hit:
        """Which of the wanted blocks are already here. Nothing is held until `reserve`."""
        return Hit(keys, {spec: [self.pools[spec].lookup(k) for k in ks] for spec, ks in keys.items()})

    def fits_empty(self, need: Mapping[str, int]) -> bool:
        """Whether `need` blocks per spec could ever be reserved."""
        return all(n <= self.pools[spec].n_blocks for spec, n in need.items())

    def reserve(self, owner: str, need: Mapping[str, int], hit: Hit = NO_HIT) -> Lease | None:
        """`need[spec]` blocks of every spec, or None and nothing changed. Blocks found by `hit` are shared; blocks
        with equal keys inside one request are one block. `hit` must be of this very moment."""
        assert owner not in self._leases, f"{owner} already holds a lease"
        n_fresh: dict[str, int] = {}
        for spec, n in need.items():
            pool, keys, found = self.pools[spec], hit.keys.get(spec, ()), hit.blocks.get(spec, ())
            revived = {b for b in found if b is not None and pool.is_cached(b)}
            n_fresh[spec] = n - len(found) + len({k for k, b in zip(keys, found) if b is None})
            if n_fresh[spec] + len(revived) > pool.n_available:
                return None
        lease = Lease(owner, {})
        for spec, n in n_fresh.items():
            keys, found = hit.keys.get(spec, ()), hit.blocks.get(spec, ())
            lease.blocks[spec] = self._collect(self.pools[spec], n, keys, found)
        self._leases[owner] = lease
        return lease

    @staticmethod
    def _collect(pool: BlockPool, n_fresh: int, keys: Sequence[bytes], found: Sequence[int | None]) -> list[int]:
        """The blocks of one spec in order: those found, a fresh one for each missing key, then the keyless."""
        for block in found:  # share first: what is held cannot be evicted by `take`
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

    def rename(self, lease: Lease, owner: str) -> None:
        """The lease goes on under another name, so that its old owner may reserve anew."""
        assert owner not in self._leases, f"{owner} already holds a lease"
        self._leases[owner] = self._leases.pop(lease.owner)
        lease.owner = owner

    def grow(self, lease: Lease, spec: str, n: int) -> bool:
        """`n` more blocks of `spec` at the end of the lease, or False and nothing changed."""
        pool = self.pools[spec]
        if n > pool.n_available:
            return False
        lease.blocks[spec] += pool.take(n)
        return True

    def commit(self, lease: Lease, spec: str, first: int, keys: Sequence[bytes]) -> None:
        """The bytes of blocks `first ..` of the lease are written: publish them under `keys`."""
        for block, key in zip(lease.blocks[spec][first:], keys, strict=False):
            self.pools[spec].publish(block, key)

    def release(self, lease: Lease, spec: str | None = None) -> None:
        """Give back the blocks of one spec, or all of them and the lease itself. Safe to repeat."""
        for name in [spec] if spec is not None else list(lease.blocks):
            self.pools[name].drop(lease.blocks.pop(name, ()))
        if spec is None:
            self._leases.pop(lease.owner, None)

    def usage(self) -> dict[str, tuple[int, int, int]]:
        """Per spec: blocks in all, leased, cached."""
        return {name: (p.n_blocks, p.n_blocks - p.n_available, p.n_cached) for name, p in self.pools.items()}

    def check(self, idle: bool = False) -> None:
        """Every pool is consistent with the leases; with `idle`, no lease is left. Raises `AssertionError`."""
        assert not (idle and self._leases), f"leases left behind: {sorted(self._leases)}"
        for name, pool in self.pools.items():
            pool.check(b for lease in self._leases.values() for b in lease.blocks.get(name, ()))
