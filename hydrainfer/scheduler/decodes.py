"""The decodes of a language batch: one token of each sequence that has room for it."""

from __future__ import annotations

from collections.abc import Mapping

from hydrainfer.core import LiveSequence, TokenWork
from hydrainfer.scheduler.places import Places
from hydrainfer.scheduler.preemption import Preemption
from hydrainfer.scheduler.room import SequenceRoom


class Decodes:
    """`decoding`: the sequences that decode, by id."""

    def __init__(
        self, decoding: Mapping[str, LiveSequence], places: Places, preemption: Preemption, room: SequenceRoom
    ) -> None:
        self._decoding, self._places, self._preemption, self._room = decoding, places, preemption, room

    def next(self, now: float, preempted: list[LiveSequence]) -> list[TokenWork]:
        """The decodes of the next batch, for which others may have to leave: they are added to `preempted`."""
        decoding = self._decoding.values()
        full = [seq for seq in decoding if len(seq.tokens) > seq.hold.capacity]
        if full or self._places.short:
            preempted += self._preemption.make_room(full, now)
            full = [seq for seq in full if seq.id in self._decoding and len(seq.tokens) > seq.hold.capacity]
        if full:
            decoding = [seq for seq in decoding if seq not in full]  # type: ignore[assignment]
        return [TokenWork(seq, seq.n_computed, 1, True) for seq in decoding]

    def ahead(self) -> list[TokenWork] | None:
        """`next` for the batch after one of decodes that is still being computed. A sequence in that batch continues
        with the token sampled there. A sequence waits for that token if it will be its last, or if blocks are then
        published or given back, because blocks in a running batch must stay in place. None if nobody may continue yet:
        a tenant waits for a place, a grammar or bad words need to know its token, or there is no room, for which others
        may have to leave."""
        if self._places.short:
            return None
        work: list[TokenWork] = []
        for seq in self._decoding.values():
            at = seq.n_computed + seq.in_flight
            if seq.in_flight:
                if seq.request.sampling.grammar is not None or seq.request.sampling.bad_ids:
                    return None
                if at + 1 >= seq.n_most or at >= seq.hold.due:
                    continue
            if at >= seq.hold.capacity and not self._room.grow(seq, at + 1):
                return None
            work.append(TokenWork(seq, at, 1, True))
        return work
