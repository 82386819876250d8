"""Sequences whose beginning is copied back from other tiers before the rest is computed.

waiting ─admitted: room on the device, and a copy from each tier that has some of it─> fetching ─> its stage
                                                               a copy fails ─> computed again
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hydrainfer.cache import DEVICE, Fetch, Pulls
from hydrainfer.core import LiveSequence
from hydrainfer.scheduler.parking import Shift
from hydrainfer.scheduler.room import SequenceRoom


@dataclass(slots=True)
class _Running:
    fetches: Sequence[Fetch]
    shifts: list[Shift]  # those that are not done
    ok: bool = True


class Fetching:
    """`live`: the sequences by id. `enter(seq)` lets one enter the stage its cursor names, and returns whether that
    runs here; `restart(seq, now)` makes it be computed again; `free(seq)` gives everything of a cancelled one back."""

    def __init__(
        self,
        room: SequenceRoom,
        enter: Callable[[LiveSequence], bool],
        restart: Callable[[LiveSequence, float], None],
        free: Callable[[LiveSequence], None],
    ) -> None:
        self.live: dict[str, LiveSequence] = {}
        self._room, self._enter, self._restart, self._free = room, enter, restart, free
        self._running: dict[str, _Running] = {}
        self._shifts: list[Shift] = []

    def begin(self, seq: LiveSequence, fetches: Sequence[Fetch]) -> None:
        """Copy blocks into the room that a sequence has got."""
        by_tier: dict[str, Pulls] = {}
        for fetch in fetches:
            pulls = by_tier.setdefault(fetch.tier, Pulls(DEVICE, {}))
            pulls.blocks[fetch.spec] = fetch.blocks, self._room.blocks_of(seq, fetch)
        shifts = [Shift(seq, tier, pulls, 0) for tier, pulls in by_tier.items()]
        for _ in shifts:
            seq.pin()
        self.live[seq.id] = seq
        self._running[seq.id] = _Running(fetches, shifts[:])
        self._shifts += shifts

    def shifts(self) -> list[Shift]:
        """The copies to begin; each is returned once."""
        shifts, self._shifts = self._shifts, []
        return shifts

    def has(self, shift: Shift) -> bool:
        running = self._running.get(shift.seq.id)
        return running is not None and shift in running.shifts

    def done(self, shift: Shift, ok: bool, now: float) -> bool:
        """Note that a copy has ended, or failed. Returns whether its sequence waits again, or goes on elsewhere."""
        seq, running = shift.seq, self._running[shift.seq.id]
        seq.unpin()
        running.shifts.remove(shift)
        running.ok = running.ok and ok
        if running.shifts:
            return False
        del self._running[seq.id]
        self.live.pop(seq.id, None)
        self._room.drop(running.fetches)
        if seq.cancelled or not running.ok:
            self._room.release(seq, landed=False)
        if seq.cancelled:
            self._free(seq)
            return False
        if not running.ok:
            self._restart(seq, now)
            return True
        self._room.fetched(seq, running.fetches)
        return not self._enter(seq)

    def forget(self, seq: LiveSequence) -> None:
        """Note that a sequence is cancelled. Its blocks are given back when its copies are over."""
        self.live.pop(seq.id, None)
