"""Admission to an instance's caches, for requests that wait here and requests that arrive from other instances.

Room goes to all of them by rank. A request that finds none is not passed by requests of worse rank that want room in
the same caches, so neither text nor pictures can starve the other kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

from hydrainfer.cache import DEVICE, Hit, Pulls
from hydrainfer.core import Duties, Handoff, InvalidRequest, LiveSequence, Stage
from hydrainfer.scheduler.asking import Asking
from hydrainfer.scheduler.fair import Fair
from hydrainfer.scheduler.fetching import Fetching
from hydrainfer.scheduler.finding import Visit
from hydrainfer.scheduler.order import Rank
from hydrainfer.scheduler.parking import Parking
from hydrainfer.scheduler.places import Places
from hydrainfer.scheduler.policy import Budgets, Policy
from hydrainfer.scheduler.room import SequenceRoom
from hydrainfer.scheduler.waiting import Waiting

_MOST_PASSED = 64  # requests with pictures: each is looked at in every step


class Admission:
    """The admission of one instance. `running`: the requests of each stage, by id. `live`: all requests that are here.
    `arriving`: requests whose reserved room is being filled, which are not live before they have landed."""

    def __init__(
        self,
        duties: Duties,
        room: SequenceRoom,
        budgets: Budgets,
        policy: Policy,
        running: Mapping[Stage, Mapping[str, LiveSequence]],
        live: Mapping[str, LiveSequence],
        fair: Fair,
        parking: Parking,
        fetching: Fetching,
        asking: Asking,
    ) -> None:
        self._duties, self._room, self._budgets, self._policy = duties, room, budgets, policy
        self._finder = room.finder
        self._running, self._prefilling, self._live, self._fair = running, running[Stage.PREFILL], live, fair
        self._parking, self._fetching, self._asking = parking, fetching, asking
        self.waiting = Waiting(fair)
        self.arriving: dict[str, LiveSequence] = {}
        self.places = Places(budgets.running, running, self.arriving, fair)
        self._blocked: dict[str, LiveSequence] = {}  # by id, those that found no room
        self._being_encoded: dict[bytes, str] = {}  # picture key -> id of the sequence that encodes it
        self._unencoded: dict[str, LiveSequence] = {}  # wait for prefill, but skipped the encoder
        self._lent: dict[str, Rank] = {}  # by id of a request that others wait for: their best rank

    def visit(self, seq: LiveSequence, cursor: int | None = None) -> Visit:
        """The consecutive steps that a sequence can run here, from the present one or from `cursor` on."""
        return self._duties.visit(seq.plan, seq.cursor if cursor is None else cursor)

    # ---- requests that wait here

    def left_of(self, seq: LiveSequence) -> int:
        """How many of a sequence's tokens are still to be computed, given its blocks or what the caches hold now."""
        return len(seq.tokens) - seq.n_computed if seq.hold.blocks else self._finder.uncached(seq, self.visit(seq))[0]

    def skips_encoder(self, seq: LiveSequence) -> bool:
        """Whether a sequence can skip encoding, which runs elsewhere, because all it needs of its pictures is cached
        here."""
        if self._duties.runs(Stage.ENCODE) or not self._duties.runs(Stage.PREFILL):
            return False
        visit = self.visit(seq, seq.cursor + 1)
        try:
            self._room.check_fits_empty(seq.request, visit)
        except InvalidRequest:
            return False
        if not (needed := self._finder.needs_encode(seq, visit)):
            self._unencoded[seq.id] = seq
        return not needed

    def need_encoders(self) -> list[LiveSequence]:
        """The sequences that skipped the encoder and need one after all, because blocks that they found were evicted.
        They are moved back to the encode step and wait here no more."""
        found = []
        for seq in list(self._unencoded.values()) if self._unencoded else ():
            if seq.hold.blocks or seq.stage is not Stage.PREFILL:
                del self._unencoded[seq.id]
            elif self._finder.needs_encode(seq, self.visit(seq)):
                self.forget(seq)
                seq.go_to(Stage.ENCODE)
                found.append(seq)
        return found

    def to_prefill(self) -> Iterator[LiveSequence]:
        """Waiting requests that need no encoding (text, or pictures all in the cache), best first. Admit each one
        before asking for the next. Requests that wait for another's prefill are passed: they do not wait for room."""
        self._lend()
        self.places.update()
        while self.waiting and self._n_running() < self._budgets.running:
            first = self.waiting.first(self.repeats)
            seq = next((s for s in first if not self._finder.needs_encode(s, self.visit(s))), None)
            if seq is None:
                return
            yield seq

    def to_encode(self) -> Iterator[LiveSequence]:
        """Waiting picture requests, best first; as `to_prefill`. A picture that another request is encoding is waited
        for, not encoded twice. A request that waits so is not passed by a later one that would encode another of its
        pictures, or it might always find a picture to wait for."""
        self._lend()
        self.places.update()
        wanted: set[bytes] = set()
        n_passed = 0
        for seq in list(self.waiting.pictured):
            if n_passed == _MOST_PASSED:
                return
            keys = {m.key for m in seq.request.media}
            if self._asking.waits(seq.id):
                wanted |= keys
            elif there := keys & self._being_encoded.keys():
                wanted |= keys
                for key in there:
                    self._wait_for(self._being_encoded[key], seq)
            elif keys & wanted and self._finder.needs_encode(seq, self.visit(seq)):
                wanted |= keys
            elif not self.repeats(seq):
                yield seq
                continue
            n_passed += 1

    def repeats(self, seq: LiveSequence) -> bool:
        """Whether a sequence would compute what another is computing here now, or is about to, or waits for the store's
        answer. Then it waits and shares
        the result. No later sequence can pass it and compute the same, so it waits only for those that are here now.
        The sequence that is waited for gets the rank of the one that waits, if that is better."""
        if self._asking.waits(seq.id):
            return True
        if not seq.request.keys or seq.stage is Stage.DECODE:
            return False
        arriving = (s for s in self.arriving.values() if s.hold.blocks and s.stage is Stage.PREFILL)
        visit, n_tokens, will_have = self.visit(seq), self._policy.shared_tokens, self._finder.computed_by
        others = chain(self._prefilling.values(), arriving)
        other = next((o for o in others if will_have(o, seq, visit, n_tokens)), None)
        if other is None and self._fetching.live:
            fetching = (s for s in self._fetching.live.values() if s.stage is Stage.PREFILL)
            other = next((o for o in fetching if will_have(o, seq, visit, n_tokens, fetches=True)), None)
        if other is not None:
            self._wait_for(other.id, seq)
        return other is not None

    def _wait_for(self, request_id: str, seq: LiveSequence) -> None:
        self._lent[request_id] = min(self._lent.get(request_id, seq.rank), seq.rank)
        self._lend()

    def _lend(self) -> None:
        """Give sequences whose results others wait for the best rank of those others."""
        for request_id, rank in list(self._lent.items()) if self._lent else ():
            seq = self._live.get(request_id) or self.arriving.get(request_id)
            if seq is None or not seq.hold.blocks or seq.stage is Stage.DECODE:
                del self._lent[request_id]
            else:
                seq.improve(rank)

    def admit(self, seq: LiveSequence) -> bool:
        """Admit a waiting request if it finds room for its visit and passes no better one. Its pictures may then have
        to be encoded again: to make room for a request that is alone, all cached blocks may be evicted, even those it
        had found."""
        if self._full() or not self._may_pass(seq) or not self.places.may_enter(seq):
            return False
        if (hit := self._room.enter(seq, self.visit(seq))) is None:
            self._blocked[seq.id] = seq
            return False
        if hit.missing and seq.stage is Stage.PREFILL:
            self._room.release(seq)
            self._room.drop(hit.fetches)
            self._unencoded[seq.id] = seq  # `need_encoders` sends it there
            return False
        self._blocked.pop(seq.id, None)
        self.waiting.remove(seq)
        self._fair.admitted(seq)
        for i in seq.pending_media:
            self._being_encoded[seq.request.media[i].key] = seq.id
        if seq.stage is Stage.ENCODE and not seq.pending_media:
            seq.go_to(seq.plan[seq.cursor + 1])  # every picture was in the cache
        if hit.fetches:
            self._fetching.begin(seq, hit)
        return True

    def best_text(self) -> LiveSequence | None:
        """The best sequence that waits for prefill and needs no encoding, unless it is known to find no room now."""
        seq = self.waiting.ready.first
        if seq is None or self._full():
            return None
        return None if seq.id in self._blocked or self.repeats(seq) else seq

    def _n_running(self) -> int:
        return sum(map(len, self._running.values()))

    def _full(self) -> bool:
        n_coming = len(self.arriving) + self._parking.n_coming + len(self._fetching.live)
        return self._n_running() + n_coming >= self._budgets.running

    def _may_pass(self, seq: LiveSequence) -> bool:
        """Whether no better request waits for room in the same caches. (In other caches it may pass: a request that
        holds KV elsewhere must not wait for one that wants room for its embeddings, or both may wait for ever.)"""
        if not self._blocked:
            return True
        better = [b for b in self._blocked.values() if self._fair.turn_of(b) < self._fair.turn_of(seq)]
        return all(self._wanted(seq).isdisjoint(self._wanted(b)) for b in better)

    def _wanted(self, seq: LiveSequence) -> set[str]:
        return {spec.name for spec in self._finder.specs_of(seq.request, self.visit(seq))}

    # ---- requests that arrive

    def has(self, request_id: str) -> bool:
        """Whether a request is here, or its blocks still are."""
        held = self._room.holds(request_id) or self._parking.holds(request_id)
        return held or request_id in self._live or request_id in self.arriving

    def expect(self, seq: LiveSequence, handoff: Handoff) -> Pulls | None:
        """Reserve room, or else host memory, for an offered request. Returns the copies to make; None if there is
        neither now. A request that brings no blocks needs no room. One from abroad rather lands in host memory: others
        may run while its blocks cross the link."""
        if not handoff.blocks:
            if not self._may_pass(seq):
                return None
            self.arriving[seq.id] = seq
            return Pulls(DEVICE, {})
        pulls: Pulls | None = None
        if handoff.abroad:
            pulls = self._parking.land(seq, handoff)
        hit = self._reserve(seq) if pulls is None else None
        if hit is not None:
            pulls = self._room.pulls(seq, handoff.blocks, handoff.n_computed, hit)
            if hit.fetches:
                self._fetching.begin(seq, hit, arrives=True)
        elif pulls is None:
            pulls = self._parking.land(seq, handoff)
        if pulls is not None:
            self.arriving[seq.id] = seq
            self._fair.admitted(seq)
        return pulls

    def unpark(self) -> None:
        """Take back sequences that are parked in host memory, best first, while there is room and nobody is passed."""
        for seq in sorted(self._parking.parked.values(), key=self._fair.turn_of):
            hit = self._reserve(seq)
            if hit is None:
                return
            self._parking.enter(seq, hit)

    def _reserve(self, seq: LiveSequence) -> Hit | None:
        """Reserve room for the visit of a sequence that brings its blocks; None if there is none now."""
        if self._full() or not self._may_pass(seq) or not self.places.may_enter(seq):
            return None
        hit = self._room.enter(seq, self.visit(seq), tiers=seq.stage is not Stage.DECODE)
        if hit is None:
            self._blocked[seq.id] = seq
        else:
            self._blocked.pop(seq.id, None)
        return hit

    def taken_back(self, request_id: str) -> None:
        """Note that an offer that waited for room was withdrawn."""
        if request_id not in self.arriving:
            self._room.forget(request_id)
            self._asking.forget(request_id)
        self._blocked.pop(request_id, None)

    def dropped(self, request_id: str) -> None:
        """Note that an arriving request does not come. Nothing writes to its blocks any more."""
        seq = self.arriving.pop(request_id)
        self._asking.forget(request_id)
        if self._fetching.dropped(seq):
            self._room.release(seq, landed=False)
        self._parking.release(request_id)
        self._blocked.pop(request_id, None)

    # ---- requests that go

    def forget(self, seq: LiveSequence) -> None:
        """Note that a sequence asks for room no more."""
        self._blocked.pop(seq.id, None)
        self._unencoded.pop(seq.id, None)
        self.waiting.remove(seq)

    def encoded(self, seq: LiveSequence, index: int) -> None:
        """Note that picture `index` of a sequence is in the cache."""
        self._being_encoded.pop(seq.request.media[index].key, None)

    def free(self, seq: LiveSequence) -> None:
        """Give a sequence's room back. Others may now encode its pictures."""
        self._room.release(seq)
        self._lent.pop(seq.id, None)
        self._unencoded.pop(seq.id, None)
        for span in seq.request.media:
            if self._being_encoded.get(span.key) == seq.id:
                del self._being_encoded[span.key]

    def reorder(self) -> None:
        """Sort again, because all ranks have changed. Requests that found no room are forgotten here, and will ask
        again."""
        self._blocked.clear()
        self._lent.clear()
        self.waiting.sort()
