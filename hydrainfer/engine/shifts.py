"""The scheduler's copies between the device's caches and those in host memory, carried out."""

from __future__ import annotations

from typing import NamedTuple

from hydrainfer.cache import counterpart
from hydrainfer.core import LiveSequence
from hydrainfer.engine.ports import CopyTicket, Puller
from hydrainfer.scheduler import Scheduler, Shift

_NEVER = float("inf")


class _Copy(NamedTuple):
    shift: Shift
    began_s: float
    completion: CopyTicket | None  # None: nothing is to be copied


class Shifts:
    """One engine's copies; used on the engine's thread only. `puller` reaches the caches of this instance. Those in
    host memory have the names given by `cache.landing_of`."""

    def __init__(self, scheduler: Scheduler, puller: Puller) -> None:
        self._scheduler, self._puller = scheduler, puller
        self._copies: list[_Copy] = []

    def turn(self, now: float) -> list[LiveSequence]:
        """Poll copies, and take back requests that find room. Returns the sequences that must be computed again."""
        lost = self._poll(now) if self._copies else []
        self.begin(now)
        return lost

    def _poll(self, now: float) -> list[LiveSequence]:
        copies, self._copies, lost = self._copies, [], []
        for copy in copies:
            ok = True if copy.completion is None else copy.completion.poll(now)
            if ok is None:
                self._copies.append(copy)
            elif self._scheduler.parking.done(copy.shift, now - copy.began_s if ok else None, now):
                lost.append(copy.shift.seq)
        return lost

    def begin(self, now: float) -> None:
        """Start the copies of requests that can be taken back now, and of those that were preempted."""
        self._scheduler.unpark()
        for shift in self._scheduler.parking.shifts():
            exports = self._puller.exports
            sources = {name: exports[counterpart(name)] for name in shift.pulls}
            self._copies.append(_Copy(shift, now, self._puller.pull(sources, shift.pulls) if sources else None))

    def wake_at(self) -> float:
        """The time at which the first copy is done; infinity if it is not known before the engine is woken."""
        times = (float("-inf") if c.completion is None else c.completion.ready_at() for c in self._copies)
        return min((t for t in times if t is not None), default=_NEVER)

    @property
    def copying(self) -> bool:
        return bool(self._copies)

    def close(self) -> None:
        self._puller.close()
