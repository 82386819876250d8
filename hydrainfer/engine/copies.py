"""The scheduler's copies between the tiers of one instance, carried out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from hydrainfer.cache import DEVICE, HostTier, Lowering, Pulls
from hydrainfer.core import ExportHandle, LiveSequence, Stage, StoreStats
from hydrainfer.engine.ports import CopyTicket, Puller, WaitFor
from hydrainfer.engine.stored import Stored
from hydrainfer.scheduler import Scheduler, Shift

_NEVER = float("inf")


class Mover(Protocol):
    """Copies blocks from one tier."""

    def begin(self, source: str, pulls: Pulls, now: float, limit_s: float = _NEVER) -> CopyTicket | None:
        """Begin a copy from the tier `source`; None if nothing is to be copied. One that can be given up fails if it
        takes longer than `limit_s` by itself."""

    def close(self) -> None: ...


class TierMover:
    """A `Mover` between the memories of this instance. `puller` writes the caches of every tier; `exports`: by tier,
    the handles by which it reads them."""

    def __init__(self, puller: Puller, exports: Mapping[str, dict[str, ExportHandle]]) -> None:
        self._puller, self._exports = puller, exports

    def begin(
        self,
        source: str,
        pulls: Pulls,
        now: float,  # noqa: ARG002 - as all movers
        limit_s: float = _NEVER,  # noqa: ARG002
    ) -> CopyTicket | None:
        exports = self._exports[source]
        sources = {spec: exports[spec] for spec in pulls.blocks}
        return self._puller.pull(sources, pulls) if sources else None

    def close(self) -> None:
        self._puller.close()


def tier_movers(puller: Puller, exports: Mapping[str, dict[str, ExportHandle]]) -> dict[str, Mover]:
    """One `TierMover` for all tiers that are exported."""
    return dict.fromkeys(exports, TierMover(puller, exports))


@dataclass(slots=True)
class _Running:
    shift: Shift
    began_s: float
    completion: CopyTicket | None  # None: nothing is to be copied
    ahead: bool = False  # whether its sequence is computed meanwhile


class Copies:
    """One engine's copies between its own tiers; used on the engine's thread only. `movers`: by the tier that is copied
    from. `stored`: its work with the shared store, if there is one, which is one of them. `loading`: filled for the
    runner, by what a batch of a request waits, by the request's id."""

    def __init__(
        self,
        scheduler: Scheduler,
        movers: Mapping[str, Mover],
        stored: Stored | None = None,
        loading: dict[str, WaitFor] | None = None,
    ) -> None:
        self.stored = stored
        self._loading = {} if loading is None else loading
        self._scheduler, self._movers = scheduler, movers
        self._running: list[_Running] = []
        self._lowering: tuple[Lowering, CopyTicket | None] | None = None

    def turn(self, now: float) -> list[LiveSequence]:
        """Poll copies, and take back requests that find room. Returns the sequences that wait again,
        or go on elsewhere."""
        lost = self._poll(now) if self._running else []
        if self._lowering is not None:
            self._poll_lowering(self._lowering, now)
        if self.stored is not None:
            self.stored.turn(now)
        self.begin(now)
        return lost

    def _poll(self, now: float) -> list[LiveSequence]:
        running, self._running, lost = self._running, [], []
        for copy in running:
            ok = True if copy.completion is None else copy.completion.poll(now)
            if ok is None:
                self._running.append(copy)
                self._go_ahead(copy)
                continue
            if copy.ahead:
                del self._loading[copy.shift.seq.id]
            if self._scheduler.shifted(copy.shift, now - copy.began_s if ok else None, now):
                lost.append(copy.shift.seq)
        return lost

    def _go_ahead(self, copy: _Running) -> None:
        """Let a sequence be computed here whose copy is on its way, if batches can wait for it."""
        wait_for, seq = None if copy.completion is None else copy.completion.wait_for, copy.shift.seq
        if wait_for is None or copy.ahead or seq.id in self._loading or seq.stage is not Stage.PREFILL:
            return
        if self._scheduler.duties.runs(Stage.PREFILL) and self._scheduler.fetching.ahead(copy.shift):
            copy.ahead, self._loading[seq.id] = True, wait_for

    def _poll_lowering(self, running: tuple[Lowering, CopyTicket | None], now: float) -> None:
        lowering, ticket = running
        ok = True if ticket is None else ticket.poll(now)
        if ok is not None and self._scheduler.host is not None:
            self._lowering = None
            self._scheduler.host.lowered(lowering, ok=ok)

    def begin(self, now: float) -> None:
        """Start the copies of requests that can be taken back now, that were preempted, or that found some of their
        beginning in another tier, and what is to be done with the store."""
        if self.stored is not None:
            self.stored.start(now)
        for shift in self._scheduler.shifts():
            ticket = self._movers[shift.source].begin(shift.source, shift.pulls, now, shift.limit_s)
            self._running.append(_Running(shift, now, ticket))
        host = self._scheduler.host
        if host is not None and self._lowering is None:
            self._lower(host, now)

    def _lower(self, host: HostTier, now: float) -> None:
        """Begin to copy what was published to host memory, unless nobody could find it there, because this instance
        does not prefill."""
        if not self._scheduler.duties.runs(Stage.PREFILL):
            host.clear()
        elif (lowering := host.lower()) is not None:
            self._lowering = lowering, self._movers[DEVICE].begin(DEVICE, lowering.pulls, now)

    def wake_at(self) -> float:
        """The time at which the first copy is done or given up; infinity if it is not known before the engine is
        woken."""
        wake_at = _NEVER if self.stored is None else self.stored.wake_at()
        for copy in self._running:
            ready = float("-inf") if copy.completion is None else copy.completion.ready_at()
            wake_at = wake_at if ready is None else min(wake_at, ready)
        if self._lowering is not None and self._lowering[1] is not None:
            ready = self._lowering[1].ready_at()
            wake_at = wake_at if ready is None else min(wake_at, ready)
        return wake_at

    @property
    def copying(self) -> bool:
        """Whether a copy is running that a request waits for."""
        return bool(self._running)

    @property
    def holding(self) -> bool:
        """Whether blocks are held for copies that no request waits for."""
        return bool(self._running or self._lowering) or (self.stored is not None and self.stored.saving)

    def store_stats(self) -> StoreStats | None:
        return None if self.stored is None else self.stored.stats()

    def close(self) -> None:
        for mover in {id(mover): mover for mover in self._movers.values()}.values():
            mover.close()
