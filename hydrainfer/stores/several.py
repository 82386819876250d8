"""One store of several places: each group of blocks lies in the place that a hash of the group gives.

The same places, in whatever order, give the same hash in every process. When a place is added or lost, most groups stay
where they are.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

from hydrainfer.cache import BlockName
from hydrainfer.core import ring_of
from hydrainfer.stores.port import Contents, SharedStore, StoreError, StoreFull

T = TypeVar("T")

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
_THREADS = 4  # so many calls to one place can run beside those to others


class SeveralStores:
    """A `SharedStore` made of stores in different places.

    A place that fails is left alone for a while, which is longer each time: until then its blocks are absent, and none
    are written there. Calls raise `StoreError` only when all places are left alone, and `write` raises `StoreFull` when
    none can be written to. Calls to several places run at the same time; `wanted` is asked by their threads, by one
    after the other. `counts` is up to date after each call."""

    def __init__(self, stores: Sequence[SharedStore], clock: Callable[[], float] = time.monotonic) -> None:
        self._places = {store.place: _Place(store, clock) for store in stores}
        assert stores, "a store has a place"
        assert len(self._places) == len(stores), "places differ"
        self._ring = ring_of(tuple(sorted(self._places)))
        self.place = ",".join(self._places)
        self.counts: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"SeveralStores({self.place!r})"

    def has(self, names: Sequence[BlockName]) -> list[bool]:
        return self._flags(names, lambda store, mine: store.has([names[i] for i in mine]))

    def touch(self, names: Sequence[BlockName]) -> list[bool]:
        return self._flags(names, lambda store, mine: store.touch([names[i] for i in mine]))

    def read(self, names: Sequence[BlockName], into: Sequence[memoryview]) -> list[bool]:
        return self._flags(names, lambda store, mine: store.read([names[i] for i in mine], [into[i] for i in mine]))

    def write(
        self, names: Sequence[BlockName], blocks: Sequence[memoryview], wanted: Callable[[], bool] = lambda: True
    ) -> int:
        shares = self._shares(names)
        wish = _Wish(wanted)

        def write(store: SharedStore) -> int:
            mine = shares[store.place]
            return store.write([names[i] for i in mine], [blocks[i] for i in mine], wish)

        there: set[int] = set()
        for place, n in self._all(shares, write, writing=True).items():
            there.update(shares[place][:n])
        return next((i for i in range(len(names)) if i not in there), len(names))

    def contents(self) -> Contents:
        """The sums of the places that answer."""
        every = self._all(self._places, lambda store: store.contents()).values()
        limits = [one.limit_bytes for one in every if one.limit_bytes is not None]
        limit_bytes = sum(limits) if len(limits) == len(every) else None
        return Contents(sum(one.n_blocks for one in every), sum(one.n_bytes for one in every), limit_bytes)

    def close(self) -> None:
        for place in self._places.values():
            place.close()

    def _shares(self, names: Sequence[BlockName]) -> dict[str, list[int]]:
        """The indices of the names that lie in each place."""
        shares: dict[str, list[int]] = {}
        owners: dict[bytes, str | None] = {}
        for i, name in enumerate(names):
            if name.group not in owners:
                owners[name.group] = self._ring.owner(name.group, self._places)
            owner = owners[name.group]
            assert owner is not None
            shares.setdefault(owner, []).append(i)
        return shares

    def _flags(self, names: Sequence[BlockName], call: Callable[[SharedStore, list[int]], list[bool]]) -> list[bool]:
        shares = self._shares(names)
        flags = [False] * len(names)
        for place, some in self._all(shares, lambda store: call(store, shares[store.place])).items():
            for i, flag in zip(shares[place], some, strict=True):
                flags[i] = flag
        return flags

    def _all(self, names: Collection[str], call: Callable[[SharedStore], T], writing: bool = False) -> dict[str, T]:
        """The answers of those of these places that work. Nobody uses a caller's buffer any more when it returns."""
        if not names:
            return {}
        *others, last = (self._places[name] for name in names)
        futures = {place: place.submit(call, writing) for place in others}
        try:
            answers = {last: last.call(call, writing)}
        finally:
            wait(futures.values())
        answers |= {place: future.result() for place, future in futures.items()}
        self.counts = sum((place.store.counts for place in self._places.values()), Counter())
        working = {place.store.place: answer for place, answer in answers.items() if answer is not None}
        if not working:
            self._check_left(writing)
        return working

    def _check_left(self, writing: bool) -> None:
        """Raise the error of one place if none is left that can be used."""
        places = list(self._places.values())
        if any(place.works(writing) for place in places):
            return
        readable = [place for place in places if place.works(False)]
        if readable:
            raise StoreFull(f"no place of the store takes blocks now; {readable[0].fullness.error}")
        raise StoreError(f"no place of the store can be used now; {places[0].failure.error}")


class _Place:
    """A store, its threads, and what it cannot do now. `failure`: of all calls; `fullness`: of writing alone."""

    def __init__(self, store: SharedStore, clock: Callable[[], float]) -> None:
        self.store = store
        self.failure, self.fullness = _Pause(clock), _Pause(clock)
        self._clock = clock
        self._threads = ThreadPoolExecutor(
            _THREADS, "hydrainfer-store"
        )  # their own: a slow place keeps no other's busy

    def submit(self, call: Callable[[SharedStore], T], writing: bool) -> Future[T | None]:
        return self._threads.submit(self.call, call, writing)

    def call(self, call: Callable[[SharedStore], T], writing: bool) -> T | None:
        """The answer of the store; None if it fails or is left alone."""
        pauses = [self.failure, self.fullness] if writing else [self.failure]
        if not all(pause.is_over() for pause in pauses):
            return None
        start_s = self._clock()
        try:
            answer = call(self.store)
        except StoreFull as e:
            self.fullness.failed(start_s, str(e))
            self.failure.worked()
        except StoreError as e:
            self.failure.failed(start_s, str(e))
        else:
            for pause in pauses:
                pause.worked()
            return answer
        return None

    def works(self, writing: bool) -> bool:
        return not self.failure.error and not (writing and self.fullness.error)

    def close(self) -> None:
        self._threads.shutdown()
        self.store.close()


class _Pause:
    """How long to do without something that failed: 1 s, and twice as long after each attempt that fails again.
    `error`: of the last attempt; empty if that did not fail. Any thread may call it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.error = ""
        self._clock = clock
        self._lock = threading.Lock()
        self._length_s = 0.0
        self._failed_s = self._end_s = -float("inf")

    def is_over(self) -> bool:
        """Whether to try. After a pause only one thread does, and the others wait for another pause."""
        with self._lock:
            if not self.error:
                return True
            now_s = self._clock()
            if now_s < self._end_s:
                return False
            self._end_s = now_s + self._length_s
            return True

    def failed(self, start_s: float, error: str) -> None:
        """Note the failure of an attempt that began at `start_s`. Of attempts that ran at the same time, one counts."""
        with self._lock:
            if self.error and start_s < self._failed_s:
                return
            self._length_s = min(_LONGEST_PAUSE_S, 2 * self._length_s or _FIRST_PAUSE_S)
            self._failed_s = self._clock()
            self._end_s = self._failed_s + self._length_s
            self.error = error

    def worked(self) -> None:
        with self._lock:
            self.error = ""
            self._length_s = 0.0


class _Wish:
    """Asks `wanted` from several threads, one after the other. Once it says no, the answer stays no."""

    def __init__(self, wanted: Callable[[], bool]) -> None:
        self._wanted = wanted
        self._lock = threading.Lock()
        self._stands = True

    def __call__(self) -> bool:
        with self._lock:
            self._stands = self._stands and self._wanted()
            return self._stands
