"""Sequences whose beginning is copied back from other tiers before the rest is computed.

waiting ─admitted: room on the device, and a copy from each tier that has some of it─> fetching ─> its stage
                                             a copy fails, or takes too long ─> computed again
             the device orders its copy and what reads it ─> its stage, before the copy is over
arriving ─reserved: the same, beside what it brings─> landed, and all copies are over ─> its stage
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hydrainfer.cache import DEVICE, STORE, Fetch, Hit, Lease, Pulls
from hydrainfer.core import LiveSequence, StepResult
from hydrainfer.scheduler.parking import Shift
from hydrainfer.scheduler.room import SequenceRoom

_LEAST_S = 0.05


@dataclass(slots=True)
class _Running:
    """`shifts`: those that are not done. `arrives`: the sequence has not landed, so it is not live. `came`: it has
    landed, and brought something. `gone`: it does not come."""

    fetches: Sequence[Fetch]
    shifts: list[Shift]
    arrives: bool = False
    came: bool = False
    gone: bool = False
    ok: bool = True


@dataclass(slots=True)
class _Ahead:
    """A sequence that is computed while its beginning is on its way. `room`: what it has; `held`: what is written to
    until the copy is over, whatever becomes of the sequence; None once that is known to be over."""

    fetches: Sequence[Fetch]
    shift: Shift
    room: Lease
    held: Lease | None


class Fetching:
    """`live`: the sequences by id. `enter(seq)` lets one enter the stage its cursor names, and returns whether that
    runs here; `restart(seq, now)` makes it be computed again; `free(seq)` gives everything of a cancelled one back.
    `least_s`: a load from a store may take so long in any case."""

    def __init__(
        self,
        room: SequenceRoom,
        enter: Callable[[LiveSequence], bool],
        restart: Callable[[LiveSequence, float], None],
        free: Callable[[LiveSequence], None],
    ) -> None:
        self.live: dict[str, LiveSequence] = {}
        self.n_failed = 0
        self.least_s = _LEAST_S
        self._room, self._enter, self._restart, self._free = room, enter, restart, free
        self._running: dict[str, _Running] = {}
        self._ahead: list[_Ahead] = []
        self._n_ahead = 0
        self._shifts: list[Shift] = []

    def begin(self, seq: LiveSequence, hit: Hit, *, arrives: bool = False) -> None:
        """Copy blocks that a sequence has found in other tiers into the room that it has got."""
        specs, by_tier = self._room.caches.specs, dict[str, Pulls]()
        for fetch in hit.fetches:
            pulls = by_tier.setdefault(fetch.tier, Pulls(DEVICE, {}))
            pulls.blocks[fetch.spec] = fetch.blocks, self._room.blocks_of(seq, fetch)
        shifts = []
        for tier, pulls in by_tier.items():
            n_bytes = sum(len(ids) * specs[spec].block_bytes for spec, (_, ids) in pulls.blocks.items())
            limit_s = max(self.least_s, hit.worth_s) if tier == STORE else float("inf")
            shifts.append(Shift(seq, tier, pulls, n_bytes, limit_s))
        for _ in shifts:
            seq.pin()
        if not arrives:
            self.live[seq.id] = seq
        self._running[seq.id] = _Running(hit.fetches, shifts[:], arrives)
        self._shifts += shifts

    def shifts(self) -> list[Shift]:
        """The copies to begin; each is returned once."""
        shifts, self._shifts = self._shifts, []
        return shifts

    def has(self, shift: Shift) -> bool:
        running = self._running.get(shift.seq.id)
        return (running is not None and shift in running.shifts) or any(one.shift is shift for one in self._ahead)

    def done(self, shift: Shift, seconds: float | None, now: float) -> bool:
        """Note that a copy has ended after `seconds`, or failed (None). Returns whether its sequence waits again, or
        goes on elsewhere."""
        for one in self._ahead:
            if one.shift is shift:
                self._ahead.remove(one)
                if seconds is not None and shift.n_bytes:
                    self._room.finder.tiers[shift.source].loaded(shift.n_bytes, seconds)
                self._came(one, ok=seconds is not None)
                return False
        seq, running = shift.seq, self._running[shift.seq.id]
        seq.unpin()
        running.shifts.remove(shift)
        if seconds is None:
            running.ok = False
        elif shift.n_bytes:
            self._room.finder.tiers[shift.source].loaded(shift.n_bytes, seconds)
        if running.shifts or (running.arrives and not running.gone):
            return False
        return self._end(seq, running, now)

    def _end(self, seq: LiveSequence, running: _Running, now: float) -> bool:
        """Let a sequence go on whose copies are over. Returns as `done`."""
        del self._running[seq.id]
        self.live.pop(seq.id, None)
        self._room.drop(running.fetches)
        ends = seq.cancelled or running.gone
        if ends or not running.ok:
            self._room.release(seq, landed=False)
        if ends:
            self._free(seq)
            return False
        if not running.ok:
            self._lose(seq, now)
            return True
        self._room.fetched(seq, running.fetches)
        if running.came:
            self._room.landed(seq)
        return not self._enter(seq)

    # ---- before a copy is over

    def ahead(self, shift: Shift) -> bool:
        """Let a sequence enter its stage though this copy, its last, is not over: the device computes nothing that
        reads it before. Returns whether it may. Others find what is copied when it is over."""
        seq, running = shift.seq, self._running.get(shift.seq.id)
        if running is None or seq.id not in self.live or running.shifts != [shift] or running.came or not running.ok:
            return False
        self._n_ahead += 1
        held = self._room.hold_fetched(seq, running.fetches, f"ahead {self._n_ahead}")
        if held is None:
            return False
        del self._running[seq.id], self.live[seq.id]
        seq.unpin()
        self._ahead.append(_Ahead(running.fetches, shift, self._room.lease_of(seq), held))
        self._enter(seq)
        return True

    def computed(self, result: StepResult) -> None:
        """Note that a batch has been computed, so that what it waited for has come. Call this before what it computed
        is published: others find no block without all that are before it."""
        if not self._ahead or result.error is not None:
            return
        seqs = [item.seq for item in result.batch.work]
        for one in [one for one in self._ahead if one.shift.seq in seqs]:
            self._came(one, ok=True)

    def _came(self, one: _Ahead, *, ok: bool) -> None:
        """Let others find what has been copied, unless that is not `ok`, or its sequence has left. Safe to repeat."""
        seq = one.shift.seq
        if one.held is None:
            return
        if ok and self._room.holds(seq.id) and self._room.lease_of(seq) is one.room:
            self._room.fetched(seq, one.fetches)
        self._room.caches.release(one.held)
        self._room.drop(one.fetches)
        one.held = None

    def _lose(self, seq: LiveSequence, now: float) -> None:
        lost = self._room.finder.lost
        self.n_failed += 1
        lost[seq.id] = lost.get(seq.id, 0) + 1
        seq.lost()
        self._restart(seq, now)

    # ---- arrivals, and the end

    def landed(self, seq: LiveSequence, now: float) -> bool:
        """Note that an arrival is live now. Returns whether it may go on: it has nothing to wait for."""
        running = self._running.get(seq.id)
        if running is None:
            return True
        running.arrives, running.came = False, True
        if running.shifts:
            self.live[seq.id] = seq
        else:
            self._end(seq, running, now)
        return False

    def dropped(self, seq: LiveSequence) -> bool:
        """Note that an arrival does not come. Returns whether its room may be given back now; otherwise it is when its
        copies are over."""
        running = self._running.get(seq.id)
        if running is None:
            return True
        if not running.shifts:
            del self._running[seq.id]
            self._room.drop(running.fetches)
            return True
        running.gone = True
        return False

    def forget(self, seq: LiveSequence) -> None:
        """Note that a sequence is cancelled. Its blocks are given back when its copies are over."""
        self.live.pop(seq.id, None)
