"""Host memory as a tier of prefixes: what the device published is copied down, and found when it is gone above.

    device ─published─> lowered: a copy in host memory, cached there ─found by a later request: copied back─> device

The blocks are those of the caches in which sequences without room on the device are parked. Parked ones go first:
they evict what is cached.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hydrainfer.cache.leases import CacheSet, Lease
from hydrainfer.cache.tiers import HOST, Pulls

_SHARE = 16  # of each cache of the device, one part in so many is held at most while it is copied
_QUEUED = 1 << 16  # blocks that wait at most
_NEWEST = 0.2  # weight of the newest measurement


class _Item(NamedTuple):
    spec: str
    keys: Sequence[bytes]
    numbers: Sequence[int]


class Lowering(NamedTuple):
    """A copy of published blocks to host memory. `keys`: of its blocks, by cache; `above`, `below`: what is held until
    it is over, on the device and in host memory."""

    pulls: Pulls
    keys: Mapping[str, Sequence[bytes]]
    above: Lease
    below: Lease


class HostTier:
    """A `Tier`. `device`: the caches of the device; `host`: those in host memory, which have some of its specs."""

    name = HOST

    def __init__(self, device: CacheSet, host: CacheSet) -> None:
        self.n_skipped = 0
        self._device, self._host = device, host
        self._byte_s = 0.0
        self._held: Lease | None = None
        self._queue: deque[_Item] = deque()
        self._n_queued = self._n_made = 0

    # ---- as a tier

    @property
    def version(self) -> int:
        return self._host.version

    def evicted(self, spec: str, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Nothing: blocks were copied when they were published."""

    def find(self, spec: str, keys: Sequence[bytes]) -> list[int | None]:
        pool = self._host.pools.get(spec)
        return [None] * len(keys) if pool is None else pool.lookup_all(keys)

    def hold(self, spec: str, blocks: Sequence[int]) -> None:
        self._held = self._host.hold("fetched", spec, blocks)

    def drop(self, spec: str, blocks: Sequence[int]) -> None:
        assert self._held is not None
        self._host.drop(self._held, spec, blocks)
        if not any(self._held.blocks.values()):
            self._host.release(self._held)
            self._held = None

    def load_s(self, n_bytes: int) -> float:
        return n_bytes * self._byte_s

    def loaded(self, n_bytes: int, seconds: float) -> None:
        self._byte_s += _NEWEST * (seconds / n_bytes - self._byte_s)

    # ---- copies to it

    def published(self, spec: str, keys: Sequence[bytes], numbers: Sequence[int]) -> None:
        """Note that the device has published blocks. `keys`: those of the request's blocks by number."""
        if spec not in self._host.pools:
            return
        if self._n_queued + len(numbers) > _QUEUED:
            self.n_skipped += len(numbers)
            return
        self._n_queued += len(numbers)
        self._queue.append(_Item(spec, keys, numbers))

    def lower(self) -> Lowering | None:
        """The copy to begin now; None if there is none. Call `lowered` when it is over."""
        while self._queue:
            item = self._queue[0]
            n = max(1, self._device.pools[item.spec].n_blocks // _SHARE)
            numbers, rest = item.numbers[:n], item.numbers[n:]
            self._n_queued -= len(numbers)
            if rest:
                self._queue[0] = item._replace(numbers=rest)
            else:
                self._queue.popleft()
            if (lowering := self._begin(item, numbers)) is not None:
                return lowering
        return None

    def _begin(self, item: _Item, numbers: Sequence[int]) -> Lowering | None:
        """Hold blocks on the device, and as many in host memory, evicting what was used least recently there."""
        name = item.spec
        above, below = self._device.pools[name], self._host.pools[name]
        wanted = [item.keys[i] for i in numbers if item.keys[i] not in below]
        pairs = [(key, block) for key, block in zip(wanted, above.lookup_all(wanted)) if block is not None]
        n = min(len(pairs), below.n_available)
        if self._device.specs[name].chained:  # with all before them, or what continues them could be evicted later
            chain = above.lookup_all(item.keys[: numbers[-1] + 1])
            held = [block for block in chain if block is not None] if None not in chain else []
        else:
            held = [block for _, block in pairs]
        self.n_skipped += len(wanted) - n
        if n == 0 or not held or above.n_shared_of(held) > above.n_available:
            return None
        self._n_made += 1
        owner, pairs = f"lowered {self._n_made}", pairs[:n]
        lease = self._host.reserve(owner, {name: range(n)})
        if lease is None:
            return None
        pulls = Pulls(HOST, {name: ([block for _, block in pairs], list(lease.blocks[name]))})
        return Lowering(pulls, {name: [key for key, _ in pairs]}, self._device.hold(owner, name, held), lease)

    def lowered(self, lowering: Lowering, *, ok: bool) -> None:
        """Note that a copy is over. If it is `ok`, its blocks are found from now on, unless they were forgotten."""
        for name, keys in lowering.keys.items() if ok else ():
            self._host.commit(lowering.below, name, 0, keys)
        self._host.release(lowering.below)
        self._device.release(lowering.above)

    def clear(self) -> None:
        """Forget what waits."""
        self._queue.clear()
        self._n_queued = 0

    def forget(self) -> dict[str, int]:
        """Forget what host memory has and what is being copied there. Returns as `CacheSet.forget`."""
        self.clear()
        return self._host.forget()

    @property
    def waiting(self) -> bool:
        return bool(self._queue)
