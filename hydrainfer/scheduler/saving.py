"""Published blocks that are written to the shared store behind the steps.

    published ─queued─> saving: held, so that nobody overwrites them ─> saved

Blocks are saved in the order of their publication, those before them in their chain first. They are held only while
they are copied, and only few at a time. What is evicted before its turn is skipped, with all that would follow it.
What the device found of a prompt is touched in the store, so that it does not age there while it is hot here; what the
store has lost of it is saved again.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hydrainfer.cache import CacheSet, Lease, StoreJob, refs_of, stored_bytes

_SHARE = 16  # of each cache, one part in so many is held at most
_MOST_BYTES = 64 << 20  # held at most
_QUEUED = 1 << 16  # blocks that wait at most
_TOUCH_S = 60.0  # a chain is touched no more often
_CHAINS = 4096  # remembered to be touched


class _Item(NamedTuple):
    """Blocks of one cache that wait. `keys`: those of the request's blocks by number, at least up to the last of
    `numbers`."""

    spec: str
    keys: Sequence[bytes]
    numbers: Sequence[int]


@dataclass(slots=True, eq=False)
class Save:
    """Blocks being saved. `lease`: of all that must stay until then."""

    job: StoreJob
    owner: str
    n_bytes: int = 0
    lease: Lease | None = None


class Touch(NamedTuple):
    """Blocks being touched."""

    spec: str
    keys: Sequence[bytes]
    numbers: Sequence[int]
    job: StoreJob


@dataclass(slots=True)
class SaveCounts:
    """Blocks that were saved, those of them that the store had already, and those that were skipped because they were
    evicted before their turn or too many waited."""

    n_saved: int = 0
    n_bytes: int = 0
    n_skipped: int = 0


class Saving:
    """The saves of one instance. It does nothing until `begin`."""

    def __init__(self, caches: CacheSet) -> None:
        self.on = False
        self.counts = SaveCounts()
        self._caches = caches
        self._queue: deque[_Item] = deque()
        self._n_queued = self._n_saves = 0
        self._found: list[_Item] = []
        self._touched: OrderedDict[tuple[str, bytes], float] = OrderedDict()  # last key of a chain -> when

    # ---- what is told

    def published(self, spec: str, keys: Sequence[bytes], numbers: Sequence[int]) -> None:
        """Note that blocks were published. `keys`: see `_Item`."""
        if not self.on or not numbers:
            return
        if self._n_queued + len(numbers) > _QUEUED:
            self.counts.n_skipped += len(numbers)
            return
        self._n_queued += len(numbers)
        self._queue.append(_Item(spec, keys, numbers))

    def found(self, spec: str, keys: Sequence[bytes], numbers: Sequence[int]) -> None:
        """Note that a request found these blocks on the device."""
        if self.on and numbers:
            self._found.append(_Item(spec, keys, numbers))

    # ---- saves

    def next_save(self) -> Save | None:
        """The blocks to save now; None if there are none. Call `saved` when that is over."""
        self._n_saves += 1
        save = Save(StoreJob("save", {}), f"save {self._n_saves}")
        while self._queue and save.n_bytes < _MOST_BYTES:
            item = self._queue.popleft()
            self._n_queued -= len(item.numbers)
            rest = self._take(item, save)
            if rest:
                self._queue.appendleft(item._replace(numbers=rest))
                self._n_queued += len(rest)
                break
        return save if save.lease is not None else None

    def _take(self, item: _Item, save: Save) -> Sequence[int]:
        """Hold blocks of an item and add them to the save, as many as fit. Returns the numbers of those that do not."""
        name, numbers = item.spec, item.numbers
        spec, pool = self._caches.specs[name], self._caches.pools[name]
        size = stored_bytes(spec)
        there = pool.lookup_all([item.keys[i] for i in numbers])
        gone = [i for i, block in zip(numbers, there) if block is None]
        if gone and spec.chained:  # nothing behind it is of use
            numbers = numbers[: numbers.index(gone[0])]
        else:
            numbers = [i for i in numbers if i not in gone]
        self.counts.n_skipped += len(item.numbers) - len(numbers)
        n_most = max(1, pool.n_blocks // _SHARE) - len(save.job.blocks.get(name, ((), ()))[0])
        n = max(0, min(len(numbers), n_most, -(-(_MOST_BYTES - save.n_bytes) // size)))
        if n == 0:
            return numbers
        numbers, rest = numbers[:n], numbers[n:]
        before = range(numbers[0]) if spec.chained else ()
        blocks = pool.lookup_all([item.keys[i] for i in (*before, *numbers)])
        if None in blocks or pool.n_shared_of(b for b in blocks if b is not None) > pool.n_available:
            self.counts.n_skipped += len(numbers) + len(rest)
            return ()
        whole = [block for block in blocks if block is not None]
        save.lease = self._caches.hold(save.owner, name, whole)
        refs, ids = save.job.blocks.get(name, ([], []))
        ours = whole[len(before) :]
        blocks_of = {name: ([*refs, *refs_of(spec, item.keys, numbers)], [*ids, *ours])}
        save.job = save.job._replace(blocks={**save.job.blocks, **blocks_of})
        save.n_bytes += n * size
        return rest

    def saved(self, save: Save, there: Mapping[str, Sequence[bool]]) -> None:
        """Note that a save is over, and which of its blocks are in the store now. They are not read any more."""
        if save.lease is not None:
            self._caches.release(save.lease)
        self.counts.n_bytes += save.n_bytes if there else 0
        self.counts.n_saved += sum(sum(has) for has in there.values())

    # ---- touches

    def touches(self, now: float) -> list[Touch]:
        """What to touch in the store now; each chain at most once a minute."""
        found, self._found = self._found, []
        touches: list[Touch] = []
        for item in found:
            chain = item.spec, item.keys[item.numbers[-1]]
            if now - self._touched.get(chain, -_TOUCH_S) < _TOUCH_S:
                continue
            self._touched[chain] = now
            self._touched.move_to_end(chain)
            refs = refs_of(self._caches.specs[item.spec], item.keys, item.numbers)
            touches.append(Touch(*item, StoreJob("touch", {item.spec: (refs, ())})))
        while len(self._touched) > _CHAINS:
            self._touched.popitem(last=False)
        return touches

    def touched(self, touch: Touch, there: Sequence[bool]) -> None:
        """Note which of these the store still has. The others are saved again."""
        self.published(touch.spec, touch.keys, [i for i, has in zip(touch.numbers, there, strict=True) if not has])

    # ---- the end

    @property
    def waiting(self) -> bool:
        return bool(self._queue or self._found)

    def clear(self) -> None:
        """Forget what waits, because the store cannot be written now."""
        self.counts.n_skipped += self._n_queued
        self._queue.clear()
        self._found.clear()
        self._n_queued = 0
