"""Preemption: decodes that run out of blocks take those of other sequences, the youngest first; and tenants with more
places than their shares give them up to tenants that wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from hydrainfer.core import LiveSequence, Stage
from hydrainfer.scheduler.fetching import Fetching
from hydrainfer.scheduler.parking import Parking
from hydrainfer.scheduler.places import Places
from hydrainfer.scheduler.room import SequenceRoom


class Preemption:
    """`running`: the sequences of each stage, by id. `arriving`: those whose room is being filled. `places`: says which
    decodes must go. `restart(seq, now)` makes a sequence be computed again."""

    def __init__(
        self,
        running: Mapping[Stage, dict[str, LiveSequence]],
        arriving: Mapping[str, LiveSequence],
        places: Places,
        room: SequenceRoom,
        parking: Parking,
        fetching: Fetching,
        restart: Callable[[LiveSequence, float], None],
    ) -> None:
        self._running, self._arriving, self._places = running, arriving, places
        self._room, self._parking, self._fetching, self._restart = room, parking, fetching, restart

    def make_room(self, full: Iterable[LiveSequence], now: float) -> list[LiveSequence]:
        """Preempt those that must give up their places. Grow the others of these decoding sequences, which are full,
        oldest first; if there is no room, preempt the youngest sequences. Returns the preempted ones."""
        preempted = self._places.surplus()
        for seq in preempted:
            self._preempt(seq, now)
        for seq in sorted(full, key=lambda s: s.order):
            while seq.id in self._running[Stage.DECODE] and not self._room.grow(seq):
                victim = None if self._parking.leaving else self._youngest_idle(than=seq)
                if victim is None:
                    break  # wait for one that is leaving, or for a younger one that the other lane is executing
                self._preempt(victim, now)
                preempted.append(victim)
        return preempted

    def _youngest_idle(self, than: LiveSequence) -> LiveSequence | None:
        """The youngest running sequence that no lane is executing; `than` itself only if no younger one runs or is
        about to (an arriving one can be preempted once it has landed)."""
        younger = [s for group in self._running.values() for s in group.values() if s.order > than.order]
        if not younger:
            arrives = any(s.hold.blocks for s in self._arriving.values())
            coming = arrives or self._parking.entering or self._fetching.live
            return None if coming else than
        return max((s for s in younger if not s.in_flight), key=lambda s: s.order, default=None)

    def _preempt(self, seq: LiveSequence, now: float) -> None:
        """Take a sequence's room. Its age and tokens stay. Unless it can be parked, it is computed again."""
        del self._running[seq.stage][seq.id]
        seq.queue(now)
        if not self._parking.park(seq):
            self._restart(seq, now)
