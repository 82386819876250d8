"""The scheduler's copies between the tiers of one instance, carried out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from hydrainfer.core import ExportHandle, LiveSequence
from hydrainfer.engine.ports import CopyTicket, Puller
from hydrainfer.scheduler import Scheduler, Shift

_NEVER = float("inf")


class _Running(NamedTuple):
    shift: Shift
    began_s: float
    completion: CopyTicket | None  # None: nothing is to be copied


class Copies:
    """One engine's copies between its own tiers; used on the engine's thread only. `puller` writes the caches of every
    tier; `exports`: by tier, the handles by which it reads them."""

    def __init__(self, scheduler: Scheduler, puller: Puller, exports: Mapping[str, dict[str, ExportHandle]]) -> None:
        self._scheduler, self._puller, self._exports = scheduler, puller, exports
        self._running: list[_Running] = []

    def turn(self, now: float) -> list[LiveSequence]:
        """Poll copies, and take back requests that find room. Returns the sequences that wait again,
        or go on elsewhere."""
        lost = self._poll(now) if self._running else []
        self.begin(now)
        return lost

    def _poll(self, now: float) -> list[LiveSequence]:
        running, self._running, lost = self._running, [], []
        for copy in running:
            ok = True if copy.completion is None else copy.completion.poll(now)
            if ok is None:
                self._running.append(copy)
            elif self._scheduler.shifted(copy.shift, now - copy.began_s if ok else None, now):
                lost.append(copy.shift.seq)
        return lost

    def begin(self, now: float) -> None:
        """Start the copies of requests that can be taken back now, that were preempted, or that found some of their
        beginning in another tier."""
        for shift in self._scheduler.shifts():
            exports = self._exports[shift.source]
            sources = {spec: exports[spec] for spec in shift.pulls.blocks}
            self._running.append(_Running(shift, now, self._puller.pull(sources, shift.pulls) if sources else None))

    def wake_at(self) -> float:
        """The time at which the first copy is done; infinity if it is not known before the engine is woken."""
        times = (float("-inf") if c.completion is None else c.completion.ready_at() for c in self._running)
        return min((t for t in times if t is not None), default=_NEVER)

    @property
    def copying(self) -> bool:
        return bool(self._running)

    def close(self) -> None:
        self._puller.close()
