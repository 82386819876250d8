"""Who gets room at an instance: requests that wait here and requests that arrive from other instances.

Room is first come, first served over all of them: once the oldest finds none, no younger one that wants room in the
same caches is admitted before it, so neither text nor pictures can be starved by the other kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain, takewhile

from hydrainfer.core import Handoff, Role, Sequence, Stage
from hydrainfer.scheduler.policy import Budgets, Policy
from hydrainfer.scheduler.room import Pulls, SequenceRoom, Visit
from hydrainfer.scheduler.waiting import Waiting


class Admission:
    """`n_running`: how many requests run here now. `prefilling`: by id, those of them that compute their prompt.
    `arriving`: those whose room is reserved and being filled; they are not live before they have landed."""

    def __init__(
        self,
        role: Role,
        room: SequenceRoom,
        budgets: Budgets,
        policy: Policy,
        n_running: Callable[[], int],
        prefilling: Mapping[str, Sequence],
    ) -> None:
        self._role, self._room, self._budgets, self._policy = role, room, budgets, policy
        self._n_running, self._prefilling = n_running, prefilling
        self.waiting = Waiting()
        self.arriving: dict[str, Sequence] = {}
        self._blocked: Sequence | None = None  # the oldest that found no room
        self._being_encoded: dict[bytes, str] = {}  # picture key -> id of the sequence that encodes it

    def visit(self, seq: Sequence, cursor: int | None = None) -> Visit:
        """The steps that it can run here, one after the other, from the present one or from `cursor` on."""
        return tuple(takewhile(self._role.runs, seq.plan[seq.cursor if cursor is None else cursor :]))

    # ---- requests that wait here

    def to_prefill(self) -> Sequence | None:
        """The oldest waiting request that needs no encoding (text, or pictures all in the cache), if it finds room. Who
        waits for another's prefill is passed: it does not wait for room."""
        if self._n_running() >= self._budgets.running:
            return None
        for seq in self.waiting.oldest(self.repeats):
            if self._room.needs_encode(seq, self.visit(seq)):
                continue
            return seq if self._admit(seq) else None
        return None

    def to_encode(self) -> Iterator[Sequence]:
        """Waiting picture requests, oldest first, that find room. A picture that another request is encoding right now
        is waited for, not encoded twice; and who waits so is not passed by a younger one that would encode another of
        its pictures, or there might always be one to wait for."""
        wanted: set[bytes] = set()
        for seq in list(self.waiting.pictured):
            if self.repeats(seq):
                continue
            keys = {m.key for m in seq.request.media}
            if keys & self._being_encoded.keys() or (keys & wanted and self._room.needs_encode(seq, self.visit(seq))):
                wanted |= keys
                continue
            if not self._admit(seq):
                return
            yield seq

    def repeats(self, seq: Sequence) -> bool:
        """Whether it would compute what another is computing here now, or is about to: then it waits and shares it. No
        younger one can pass it and compute the same, so it waits for no more than those who are here."""
        if not seq.request.keys or seq.stage is Stage.DECODE:
            return False
        arriving = (s for s in self.arriving.values() if s.blocks and s.stage is Stage.PREFILL)
        others, visit = chain(self._prefilling.values(), arriving), self.visit(seq)
        return any(self._room.computed_by(other, seq, visit, self._policy.shared_tokens) for other in others)

    def _admit(self, seq: Sequence) -> bool:
        if self._full() or not self._may_pass(seq):
            return False
        n_computed, visit = seq.n_computed, self.visit(seq)
        if not self._room.reserve(seq, self._room.match(seq, visit), visit):
            self._blocked = seq
            return False
        self._unblock(seq.id)
        self.waiting.remove(seq, n_computed)
        for i in seq.pending_media:
            self._being_encoded[seq.request.media[i].key] = seq.id
        if seq.stage is Stage.ENCODE and not seq.pending_media:
            seq.cursor += 1  # every picture was in the cache
        return True

    def _full(self) -> bool:
        return self._n_running() + len(self.arriving) >= self._budgets.running

    def _may_pass(self, seq: Sequence) -> bool:
        """Not before an older one that waits for room in the same caches. (In other caches it may: who already holds KV
        elsewhere must not wait for one that wants room for its embeddings, or both may wait for ever.)"""
        blocked = self._blocked
        if blocked is None or blocked.order >= seq.order:
            return True
        wanted = self._room.specs_of(blocked.request, self.visit(blocked))
        return not any(spec in wanted for spec in self._room.specs_of(seq.request, self.visit(seq)))

    # ---- requests that arrive

    def expect(self, seq: Sequence, handoff: Handoff) -> Pulls | None:
        """Reserve room for what has been offered and say what to copy into it; None if there is no room now. A request
        that brings nothing needs none."""
        if not self._may_pass(seq):
            return None
        if not handoff.blocks:
            self.arriving[seq.id] = seq
            return {}
        if self._full():
            return None
        visit = self.visit(seq)
        hit = self._room.match(seq, visit)
        if not self._room.reserve(seq, hit, visit):
            self._blocked = seq
            return None
        self._unblock(seq.id)
        self.arriving[seq.id] = seq
        return self._room.pulls(seq, handoff, hit)

    def taken_back(self, request_id: str) -> None:
        """An offer that waited for room is there no more."""
        if request_id not in self.arriving:
            self._room.forget(request_id)
        self._unblock(request_id)

    # ---- requests that go

    def forget(self, seq: Sequence) -> None:
        """It asks for room no more."""
        self._unblock(seq.id)
        self.waiting.remove(seq)

    def encoded(self, seq: Sequence, index: int) -> None:
        """Its picture `index` is in the cache."""
        self._being_encoded.pop(seq.request.media[index].key, None)

    def free(self, seq: Sequence) -> None:
        """Give its room back; others may encode its pictures."""
        self._room.release(seq)
        for span in seq.request.media:
            if self._being_encoded.get(span.key) == seq.id:
                del self._being_encoded[span.key]

    def _unblock(self, request_id: str) -> None:
        if self._blocked is not None and self._blocked.id == request_id:
            self._blocked = None
