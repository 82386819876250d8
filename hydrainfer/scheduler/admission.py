"""Who gets room at an instance: requests that wait here and requests that arrive from other instances.

Room goes by rank over all of them: who finds none is not passed by anyone of worse rank that wants room in the same
caches, so neither text nor pictures can be starved by the other kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain, takewhile

from hydrainfer.cache import Hit
from hydrainfer.core import Handoff, InvalidRequest, LiveSequence, Role, Stage
from hydrainfer.scheduler.fair import Fair
from hydrainfer.scheduler.order import Rank
from hydrainfer.scheduler.parking import Parking
from hydrainfer.scheduler.policy import Budgets, Policy
from hydrainfer.scheduler.room import Pulls, SequenceRoom, Visit
from hydrainfer.scheduler.waiting import Waiting

_MOST_PASSED = 64  # of those with pictures: each is looked at in every step


class Admission:
    """`n_running`: how many requests run here now. `prefilling`: by id, those of them that compute their prompt;
    `live`: by id, all that are here. `arriving`: those whose room is reserved and being filled; they are not live
    before they have landed."""

    def __init__(
        self,
        role: Role,
        room: SequenceRoom,
        budgets: Budgets,
        policy: Policy,
        n_running: Callable[[], int],
        prefilling: Mapping[str, LiveSequence],
        live: Mapping[str, LiveSequence],
        fair: Fair,
        parking: Parking,
    ) -> None:
        self._role, self._room, self._budgets, self._policy = role, room, budgets, policy
        self._n_running, self._prefilling, self._live, self._fair = n_running, prefilling, live, fair
        self._parking = parking
        self.waiting = Waiting(fair)
        self.arriving: dict[str, LiveSequence] = {}
        self._blocked: dict[str, LiveSequence] = {}  # by id, those that found no room
        self._being_encoded: dict[bytes, str] = {}  # picture key -> id of the sequence that encodes it
        self._visits: dict[tuple[tuple[Stage, ...], int], Visit] = {}  # by plan and cursor
        self._unencoded: dict[str, LiveSequence] = {}  # wait for prefill though no encoder has seen them
        self._lent: dict[str, Rank] = {}  # by id of those whose work is waited for, the best rank of who waits

    def visit(self, seq: LiveSequence, cursor: int | None = None) -> Visit:
        """The steps that it can run here, one after the other, from the present one or from `cursor` on."""
        key = seq.plan, seq.cursor if cursor is None else cursor
        if (visit := self._visits.get(key)) is None:
            visit = self._visits[key] = tuple(takewhile(self._role.runs, seq.plan[key[1] :]))
        return visit

    # ---- requests that wait here

    def left_of(self, seq: LiveSequence) -> int:
        """How many of its tokens are to be computed, by what it has or the caches hold now."""
        return len(seq.tokens) - seq.n_computed if seq.blocks else self._room.uncached(seq, self.visit(seq))[0]

    def skips_encoder(self, seq: LiveSequence) -> bool:
        """Whether it can go on here though pictures are encoded elsewhere: what it would want of them is here."""
        if self._role.runs(Stage.ENCODE) or not self._role.runs(Stage.PREFILL):
            return False
        visit = self.visit(seq, seq.cursor + 1)
        try:
            self._room.check_fits_empty(seq.request, visit)
        except InvalidRequest:
            return False
        if not (needed := self._room.needs_encode(seq, visit)):
            self._unencoded[seq.id] = seq
        return not needed

    def need_encoders(self) -> list[LiveSequence]:
        """Those that skipped the encoder and need one after all, for blocks that they found were evicted. They are
        back at that step and wait here no more."""
        found = []
        for seq in list(self._unencoded.values()) if self._unencoded else ():
            if seq.blocks or seq.stage is not Stage.PREFILL:
                del self._unencoded[seq.id]
            elif self._room.needs_encode(seq, self.visit(seq)):
                self.forget(seq)
                seq.cursor -= 1
                found.append(seq)
        return found

    def to_prefill(self) -> Iterator[LiveSequence]:
        """Waiting requests that need no encoding (text, or pictures all in the cache), best first. Each is to be
        admitted before the next one is asked for. Who waits for another's prefill is passed: it does not wait for
        room."""
        self._lend()
        while self.waiting and self._n_running() < self._budgets.running:
            first = self.waiting.first(self.repeats)
            seq = next((s for s in first if not self._room.needs_encode(s, self.visit(s))), None)
            if seq is None:
                return
            yield seq

    def to_encode(self) -> Iterator[LiveSequence]:
        """Waiting picture requests, best first; as `to_prefill`. A picture that another request is encoding right now
        is waited for, not encoded twice; and who waits so is not passed by a later one that would encode another of
        its pictures, or there might always be one to wait for."""
        self._lend()
        wanted: set[bytes] = set()
        n_passed = 0
        for seq in list(self.waiting.pictured):
            if n_passed == _MOST_PASSED:
                return
            keys = {m.key for m in seq.request.media}
            if there := keys & self._being_encoded.keys():
                wanted |= keys
                for key in there:
                    self._wait_for(self._being_encoded[key], seq)
            elif keys & wanted and self._room.needs_encode(seq, self.visit(seq)):
                wanted |= keys
            elif not self.repeats(seq):
                yield seq
                continue
            n_passed += 1

    def repeats(self, seq: LiveSequence) -> bool:
        """Whether it would compute what another is computing here now, or is about to: then it waits and shares it. No
        later one can pass it and compute the same, so it waits for no more than those who are here; and who is waited
        for goes before all whom it would go before."""
        if not seq.request.keys or seq.stage is Stage.DECODE:
            return False
        arriving = (s for s in self.arriving.values() if s.blocks and s.stage is Stage.PREFILL)
        others, visit = chain(self._prefilling.values(), arriving), self.visit(seq)
        n_tokens = self._policy.shared_tokens
        other = next((o for o in others if self._room.computed_by(o, seq, visit, n_tokens)), None)
        if other is not None:
            self._wait_for(other.id, seq)
        return other is not None

    def _wait_for(self, request_id: str, seq: LiveSequence) -> None:
        self._lent[request_id] = min(self._lent.get(request_id, seq.rank), seq.rank)
        self._lend()

    def _lend(self) -> None:
        """Let those who compute what others wait for have the best rank of these."""
        for request_id, rank in list(self._lent.items()) if self._lent else ():
            seq = self._live.get(request_id) or self.arriving.get(request_id)
            if seq is None or not seq.blocks or seq.stage is Stage.DECODE:
                del self._lent[request_id]
            elif rank < seq.rank:
                seq.rank = rank

    def admit(self, seq: LiveSequence) -> bool:
        """Take a waiting request in, if it finds room for its visit and nobody is passed. Pictures of it may have to be
        encoded then: room for one that is alone is made of all that is cached, also of what it had found."""
        if self._full() or not self._may_pass(seq):
            return False
        if (hit := self._room.enter(seq, self.visit(seq))) is None:
            self._blocked[seq.id] = seq
            return False
        if hit.missing and seq.stage is Stage.PREFILL:
            self._room.release(seq)
            self._unencoded[seq.id] = seq  # `need_encoders` has it go there
            return False
        self._blocked.pop(seq.id, None)
        self.waiting.remove(seq)
        self._fair.admitted(seq)
        for i in seq.pending_media:
            self._being_encoded[seq.request.media[i].key] = seq.id
        if seq.stage is Stage.ENCODE and not seq.pending_media:
            seq.cursor += 1  # every picture was in the cache
        return True

    def best_text(self) -> LiveSequence | None:
        """The best of those that wait for prefill alone, unless it is known to find no room now."""
        seq = self.waiting.ready.first
        if seq is None or self._full():
            return None
        return None if seq.id in self._blocked or self.repeats(seq) else seq

    def _full(self) -> bool:
        return self._n_running() + len(self.arriving) + self._parking.n_coming >= self._budgets.running

    def _may_pass(self, seq: LiveSequence) -> bool:
        """Whether nobody better waits for room in the same caches. (In other caches it may pass: who already holds KV
        elsewhere must not wait for one that wants room for its embeddings, or both may wait for ever.)"""
        if not self._blocked:
            return True
        better = [b for b in self._blocked.values() if self._fair.turn_of(b) < self._fair.turn_of(seq)]
        return all(self._wanted(seq).isdisjoint(self._wanted(b)) for b in better)

    def _wanted(self, seq: LiveSequence) -> set[str]:
        return {spec.name for spec in self._room.specs_of(seq.request, self.visit(seq))}

    # ---- requests that arrive

    def has(self, request_id: str) -> bool:
        """Whether it is here, or its blocks still are."""
        held = self._room.holds(request_id) or self._parking.holds(request_id)
        return held or request_id in self._live or request_id in self.arriving

    def expect(self, seq: LiveSequence, handoff: Handoff) -> Pulls | None:
        """Reserve room for what has been offered, or else host memory, and say what to copy into it; None if there is
        neither now. A request that brings nothing needs none."""
        if not handoff.blocks:
            if not self._may_pass(seq):
                return None
            self.arriving[seq.id] = seq
            return {}
        hit = self._reserve(seq)
        if hit is not None:
            pulls: Pulls | None = self._room.pulls(seq, handoff.blocks, handoff.n_computed, hit)
        else:
            pulls = self._parking.land(seq, handoff)
        if pulls is not None:
            self.arriving[seq.id] = seq
            self._fair.admitted(seq)
        return pulls

    def unpark(self) -> None:
        """Take those back who are parked in host memory, best first, while there is room and nobody is passed."""
        for seq in sorted(self._parking.parked.values(), key=self._fair.turn_of):
            hit = self._reserve(seq)
            if hit is None:
                return
            self._parking.enter(seq, hit)

    def _reserve(self, seq: LiveSequence) -> Hit | None:
        """Room for the visit of one that brings its blocks; None if there is none now."""
        if self._full() or not self._may_pass(seq):
            return None
        hit = self._room.enter(seq, self.visit(seq))
        if hit is None:
            self._blocked[seq.id] = seq
        else:
            self._blocked.pop(seq.id, None)
        return hit

    def taken_back(self, request_id: str) -> None:
        """An offer that waited for room is there no more."""
        if request_id not in self.arriving:
            self._room.forget(request_id)
        self._blocked.pop(request_id, None)

    def dropped(self, request_id: str) -> None:
        """It does not come; nothing writes to its blocks any more."""
        self._room.release(self.arriving.pop(request_id), landed=False)
        self._parking.release(request_id)
        self._blocked.pop(request_id, None)

    # ---- requests that go

    def forget(self, seq: LiveSequence) -> None:
        """It asks for room no more."""
        self._blocked.pop(seq.id, None)
        self._unencoded.pop(seq.id, None)
        self.waiting.remove(seq)

    def encoded(self, seq: LiveSequence, index: int) -> None:
        """Its picture `index` is in the cache."""
        self._being_encoded.pop(seq.request.media[index].key, None)

    def free(self, seq: LiveSequence) -> None:
        """Give its room back; others may encode its pictures."""
        self._room.release(seq)
        self._lent.pop(seq.id, None)
        self._unencoded.pop(seq.id, None)
        for span in seq.request.media:
            if self._being_encoded.get(span.key) == seq.id:
                del self._being_encoded[span.key]

    def reorder(self) -> None:
        """All ranks have changed. Who found no room will say so again."""
        self._blocked.clear()
        self._lent.clear()
        self.waiting.sort()
