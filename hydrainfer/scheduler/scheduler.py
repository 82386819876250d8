"""Stage-level batching (paper, Algorithm 1) for one instance of any role.

    add ─> waiting ──reserve──> encoding ─> prefilling ─> decoding ─> out
              ^                    │             │            │
              └──── preempted (youngest first, rewound, keeps its tokens and its age)

    expect ─reserve─> arriving ─land─> the stage its cursor names; the next stage runs elsewhere ─> migrating

Order of a language batch: all decodes, then continuing prefill chunks, then new prefills within the token budget
(`Policy.batching` has the baseline in which prefills come without decodes).
A vision batch is filled within the image budget while the encode gate is open. Each lane asks for itself.

Room is first come, first served over all waiting requests: once the oldest of them finds no room, no younger one is
admitted before it, so neither a text nor a picture request can be starved by the other kind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import takewhile

from hydrainfer.cache import CacheSet
from hydrainfer.core import (
    EncodeWork,
    Handoff,
    HydraError,
    Lane,
    Request,
    Role,
    Sequence,
    Stage,
    StepBatch,
    StepResult,
    TokenLogprobs,
    TokenWork,
)
from hydrainfer.scheduler.outcome import Outcome
from hydrainfer.scheduler.policy import Budgets, Policy
from hydrainfer.scheduler.room import Pulls, SequenceRoom, Visit


class Scheduler:
    """Owns every live `Sequence` of the instance. Pure: no clock, no tensors; `next` and `apply` are the whole loop."""

    def __init__(self, role: Role, caches: CacheSet, budgets: Budgets, policy: Policy | None = None) -> None:
        self.role = role
        self.budgets = budgets
        self.policy = policy or Policy()
        self.room = SequenceRoom(caches, self.policy.headroom_tokens)
        self._pictured: deque[Sequence] = deque()
        self._ready: deque[Sequence] = deque()
        self.waiting = {Stage.ENCODE: self._pictured, Stage.PREFILL: self._ready}
        self.encoding: dict[str, Sequence] = {}
        self.prefilling: dict[str, Sequence] = {}
        self.decoding: dict[str, Sequence] = {}
        self._running = {Stage.ENCODE: self.encoding, Stage.PREFILL: self.prefilling, Stage.DECODE: self.decoding}
        self.migrating: dict[str, Sequence] = {}  # live, hold their blocks, wait for an instance of their next stage
        self.arriving: dict[str, Sequence] = {}  # room is reserved and being filled; not live before `land`
        self._live: dict[str, Sequence] = {}
        self._blocked: Sequence | None = None
        self._being_encoded: dict[bytes, str] = {}  # picture key -> id of the sequence that encodes it
        self.waiting_pictures = self.waiting_tokens = 0  # of all that waits
        self._n_added = 0
        self.n_batches = 0
        self.n_preemptions = 0
        self.started: list[tuple[Sequence, Stage]] = []  # first batch of a stage, since the engine last looked
        self.preempted: list[Sequence] = []
        self.departing: list[Sequence] = []  # began to migrate since the engine last looked

    # ---- requests come and go

    def add(self, request: Request, now: float, produced: tuple[int, ...] = ()) -> Sequence:
        """Queue it, with the tokens it already has. Raises `InvalidRequest` if it could never fit the caches, even
        alone."""
        assert request.id not in self._live, f"request {request.id} is already here"
        order = (now if request.arrival_s is None else request.arrival_s, self._n_added)
        seq = Sequence(request, order, now, produced)
        self.room.check_fits_empty(request, self._visit(seq))
        self._n_added += 1
        self._live[seq.id] = seq
        self._wait(seq)
        return seq

    def _wait(self, seq: Sequence) -> None:
        """Into the queue of its stage, by age; or out of here, if another instance runs that stage."""
        if not self.role.runs(seq.stage):
            self._depart(seq)
            return
        queue = self.waiting[seq.stage]
        place = len(queue)
        while place and queue[place - 1].order > seq.order:
            place -= 1
        queue.insert(place, seq)
        self._count_waiting(seq, 1)

    def _count_waiting(self, seq: Sequence, by: int) -> None:
        self.waiting_tokens += by * (len(seq.tokens) - seq.n_computed)
        if seq.stage is Stage.ENCODE:
            self.waiting_pictures += by * len(seq.request.media)

    def _depart(self, seq: Sequence) -> None:
        self.migrating[seq.id] = seq
        self.departing.append(seq)

    def _visit(self, seq: Sequence) -> Visit:
        return tuple(takewhile(self.role.runs, seq.plan[seq.cursor :]))

    def cancel(self, request_id: str) -> bool:
        """Forget it and free its blocks, at once or, if a lane is executing it, when that batch is applied. False if it
        is not here."""
        seq = self._live.pop(request_id, None)
        if seq is None:
            return False
        seq.cancelled = True
        if self._blocked is seq:
            self._blocked = None
        queue = self.waiting.get(seq.stage)
        if queue and seq in queue:
            queue.remove(seq)
            self._count_waiting(seq, -1)
        self._running[seq.stage].pop(seq.id, None)
        self.migrating.pop(seq.id, None)
        if not seq.in_flight:
            self._free(seq)
        return True

    @property
    def n_waiting(self) -> int:
        return len(self._pictured) + len(self._ready)

    @property
    def n_running(self) -> int:
        return len(self.encoding) + len(self.prefilling) + len(self.decoding)

    def get(self, request_id: str) -> Sequence | None:
        return self._live.get(request_id)

    # ---- arrivals from other instances

    def expect(self, handoff: Handoff, now: float) -> Pulls | None:
        """Reserve room for its visit here and say what to copy into it; None if there is no room now. A request that
        brings nothing needs none. Raises `InvalidRequest` if there could never be enough."""
        seq = handoff.sequence(now)
        visit = self._visit(seq)
        self.room.check_fits_empty(seq.request, visit)
        if seq.id in self._live or seq.id in self.arriving or self.room.holds(seq.id) or not self._may_pass(seq):
            return None  # the first three: a late copy of an old offer
        if not handoff.blocks:
            self.arriving[seq.id] = seq
            return {}
        if self.n_running + len(self.arriving) >= self.budgets.running:
            return None
        hit = self.room.match(seq)
        if not self.room.reserve(seq, hit, visit):
            self._blocked = seq
            return None
        if self._blocked is not None and self._blocked.id == seq.id:
            self._blocked = None
        self.arriving[seq.id] = seq
        return self.room.pulls(seq, handoff, hit)

    def land(self, request_id: str, now: float) -> Sequence:
        """Its blocks are written and it is ours."""
        seq = self.arriving.pop(request_id)
        seq.queued_s = now
        self._live[seq.id] = seq
        if seq.blocks:
            self.room.publish_all(seq)
            self._running[seq.stage][seq.id] = seq
        else:
            self._wait(seq)
        return seq

    def drop_arrival(self, request_id: str) -> None:
        """It does not come; nothing writes to its blocks any more."""
        self.room.release(self.arriving.pop(request_id))

    def forget_blocked(self, request_id: str) -> None:
        """An offer that waited for room was taken back."""
        if request_id not in self._live and request_id not in self.arriving:
            self.room.forget(request_id)
        if self._blocked is not None and self._blocked.id == request_id and request_id not in self._live:
            self._blocked = None

    # ---- batches

    def next(self, now: float, lane: Lane) -> StepBatch | None:
        """The next batch of a lane that is free, or None if it has nothing to do."""
        if not (self.decoding or self.prefilling or self.encoding or self._pictured or self._ready):
            return None
        if lane is Lane.VISION:
            work: list = self._fill_vision(now)
            n = len(work)
        else:
            work, n = self._fill_language(now)
        if not work:
            return None
        for item in work:
            seq = item[0]
            seq.in_flight += 1
            if not seq.started:
                seq.started = True
                self.started.append((seq, seq.stage))
        self.n_batches += 1
        return StepBatch(self.n_batches, lane, work, n)

    def _fill_language(self, now: float) -> tuple[list[TokenWork], int]:
        budget = self.budgets.tokens
        decodes = self._decodes()
        if len(decodes) < len(self.decoding):  # some are full
            self._make_room(now)
            decodes = self._decodes()
        work = decodes if self.policy.batching == "stage-level" else []
        n = len(work)
        for seq in self.prefilling.values():
            if n >= budget:
                break
            n += self._add_chunk(work, seq, budget - n)
        if (self._ready or self._pictured) and self.role.runs(Stage.PREFILL):
            while n < budget and (new := self._admit_prefill()) is not None:
                n += self._add_chunk(work, new, budget - n)
        return (work, n) if work else (decodes, len(decodes))

    def _decodes(self) -> list[TokenWork]:
        """Of all that have room for their next token."""
        return [TokenWork(s, s.n_computed, 1, True) for s in self.decoding.values() if len(s.tokens) <= s.capacity]

    @staticmethod
    def _add_chunk(work: list[TokenWork], seq: Sequence, budget: int) -> int:
        left = len(seq.tokens) - seq.n_computed
        count = min(left, budget)
        work.append(TokenWork(seq, seq.n_computed, count, count == left))
        return count

    def _fill_vision(self, now: float) -> list[EncodeWork]:
        if not (self.encoding or self._pictured) or not self._gate_open(now):
            return []
        work: list[EncodeWork] = []
        left = self.budgets.image_tokens
        for seq in self.encoding.values():
            left = self._add_pictures(work, seq, left)
        admitted = self._admit_encode()
        while len(work) < self.budgets.images and left > 0 and (new := next(admitted, None)) is not None:
            left = self._add_pictures(work, new, left)
        return work

    def _add_pictures(self, work: list[EncodeWork], seq: Sequence, left: int) -> int:
        """Its pictures, in order, until one does not fit; a batch takes at least one. What is then `left` of the
        tokens."""
        for i in seq.pending_media[: max(self.budgets.images - len(work), 0)]:
            n = seq.request.media[i].n_tokens
            if work and n > left:
                return 0
            work.append(EncodeWork(seq, i))
            left -= n
        return left

    def _gate_open(self, now: float) -> bool:
        return not self.prefilling or now >= self.gate_opens_at()

    def gate_opens_at(self) -> float:
        """When the oldest picture that waits behind the gate will have waited `encode_wait_s`; inf if none waits or the
        gate does not age."""
        if not (self.encoding or self._pictured) or self.policy.encode_gate == "paper":
            return float("inf")
        queued = [s.queued_s for s in self.encoding.values()]
        queued += [q[0].queued_s for q in (self.waiting[Stage.ENCODE],) if q]
        return min(queued, default=float("inf")) + self.policy.encode_wait_s

    # ---- admission

    def _admit_prefill(self) -> Sequence | None:
        """The oldest waiting request that needs no encoding (text, or pictures all in the cache) and finds room."""
        if self.n_running >= self.budgets.running:
            return None
        heads = [q[0] for q in self.waiting.values() if q]
        for seq in sorted(heads, key=lambda s: s.order):
            if self.room.needs_encode(seq):
                continue
            return seq if self._admit(seq) else None
        return None

    def _admit_encode(self) -> Iterator[Sequence]:
        """Waiting picture requests, oldest first, that find room. A picture that another request is encoding right now
        is waited for, not encoded twice; and who waits so is not passed by a younger one that would encode another of
        its pictures, or there might always be one to wait for."""
        wanted: set[bytes] = set()
        for seq in list(self.waiting[Stage.ENCODE]):
            keys = {m.key for m in seq.request.media}
            if keys & self._being_encoded.keys() or (keys & wanted and self.room.needs_encode(seq)):
                wanted |= keys
                continue
            if not self._admit(seq):
                return
            yield seq

    def _admit(self, seq: Sequence) -> bool:
        if self.n_running + len(self.arriving) >= self.budgets.running:
            return False
        if not self._may_pass(seq):
            return False
        if not self.room.reserve(seq, self.room.match(seq), self._visit(seq)):
            self._blocked = seq
            return False
        if self._blocked is seq:
            self._blocked = None
        self.waiting[seq.stage].remove(seq)
        self._count_waiting(seq, -1)
        for i in seq.pending_media:
            self._being_encoded[seq.request.media[i].key] = seq.id
        if seq.stage is Stage.ENCODE and not seq.pending_media:
            seq.cursor += 1  # every picture was in the cache
        self._enter(seq)
        return True

    def _may_pass(self, seq: Sequence) -> bool:
        """Not before an older one that waits for room in the same caches. (In other caches it may: who already holds KV
        elsewhere must not wait for one that wants room for its embeddings, or both may wait for ever.)"""
        blocked = self._blocked
        if blocked is None or blocked.order >= seq.order:
            return True
        wanted = self.room.specs_of(blocked.request, self._visit(blocked))
        return not any(spec in wanted for spec in self.room.specs_of(seq.request, self._visit(seq)))

    def _enter(self, seq: Sequence) -> None:
        """Among those that run the stage its cursor names, here or elsewhere."""
        if self.role.runs(seq.stage):
            self._running[seq.stage][seq.id] = seq
        else:
            self._depart(seq)

    def _advance(self, seq: Sequence, now: float) -> None:
        """To the next step of its plan."""
        del self._running[seq.stage][seq.id]
        seq.cursor += 1
        seq.started = False
        seq.queued_s = now
        self._enter(seq)

    # ---- when blocks run out

    def _make_room(self, now: float) -> None:
        """Grow every decoding sequence that is full, oldest first; where there is no room, preempt the youngest."""
        full = [s for s in self.decoding.values() if len(s.tokens) > s.capacity]
        for seq in sorted(full, key=lambda s: s.order):
            while seq.id in self.decoding and not self.room.grow(seq):
                victim = self._youngest_idle(than=seq)
                if victim is None:
                    break  # a younger one is executing on the other lane: wait for it to land
                self._preempt(victim, now)

    def _youngest_idle(self, than: Sequence) -> Sequence | None:
        """The youngest running sequence that no lane is executing; `than` itself only if nobody younger runs at all or
        is about to (who arrives can be preempted once it has landed)."""
        running = [*self.encoding.values(), *self.prefilling.values(), *self.decoding.values()]
        younger = [s for s in running if s.order > than.order]
        if not younger:
            return None if self.arriving else than
        return max((s for s in younger if not s.in_flight), key=lambda s: s.order, default=None)

    def _preempt(self, seq: Sequence, now: float) -> None:
        """The failure path: release, rewind, wait again at its old age. Its produced tokens stay."""
        del self._running[seq.stage][seq.id]
        self._free(seq)
        seq.rewind()
        seq.queued_s = now
        self._wait(seq)
        self.n_preemptions += 1
        self.preempted.append(seq)

    def _free(self, seq: Sequence) -> None:
        self.room.release(seq)
        for span in seq.request.media:
            if self._being_encoded.get(span.key) == seq.id:
                del self._being_encoded[span.key]

    # ---- results

    def apply(self, result: StepResult, now: float) -> list[Outcome]:
        """Commit what a batch did. Sequences cancelled meanwhile are freed here and yield no outcome."""
        outcomes: list[Outcome] = []
        sampled = 0
        encoded, logprobs = result.batch.lane is Lane.VISION, result.logprobs
        for item in result.batch.work:
            seq = item.seq
            seq.in_flight -= 1
            index = sampled
            if not encoded and item.sample:
                sampled += 1
            error = result.error or (result.failed.get(seq.id) if result.failed else None)
            if seq.cancelled:
                if encoded and error is None:
                    self.room.publish(seq, item.index)  # the work is done: let others find it
                if not seq.in_flight:
                    self._free(seq)
                continue
            if error is not None:
                outcomes.append(self._fail(seq, error))
            elif encoded:
                outcomes += self._encoded(item, now)
            else:
                seq.n_computed += item.count
                if item.sample:
                    said = logprobs.get(index) if logprobs else None
                    outcomes.append(self._sampled(seq, result.tokens[index], said, now))
        return outcomes

    def _fail(self, seq: Sequence, error: HydraError) -> Outcome:
        self.cancel(seq.id)
        return Outcome(seq, finish="error", error=error)

    def _encoded(self, item: EncodeWork, now: float) -> list[Outcome]:
        seq, index = item
        self.room.publish(seq, index)
        seq.pending_media.remove(index)
        self._being_encoded.pop(seq.request.media[index].key, None)
        if seq.pending_media:
            return []
        self._advance(seq, now)
        return [Outcome(seq, ended=Stage.ENCODE)]

    def _sampled(self, seq: Sequence, token: int, logprobs: TokenLogprobs | None, now: float) -> Outcome:
        seq.tokens.append(token)
        stage, finish = seq.plan[seq.cursor], seq.finish_reason(token)
        if finish is None and stage is Stage.DECODE:
            return Outcome(seq, token, logprobs)
        if finish is not None:
            self.cancel(seq.id)
        elif stage is Stage.PREFILL:
            self.room.release_embeddings(seq)
            self._advance(seq, now)
        ended = stage if finish is not None or stage is Stage.PREFILL else None
        return Outcome(seq, token, logprobs, ended, finish)

    def check(self) -> None:
        """Every live sequence is in exactly one place and the caches agree with the leases. For tests. (That no lease
        is left at the end is the caller's to check, after the last batch was applied.)"""
        queued, running = [s for q in self.waiting.values() for s in q], self._running.values()
        places = [*queued, *(s for group in running for s in group.values()), *self.migrating.values()]
        assert not self.arriving.keys() & self._live.keys(), "seen before it landed"
        assert not any(self.role.runs(s.stage) for s in self.migrating.values()), "migrates though it could stay"
        assert len(places) == len({s.id for s in places}) == len(self._live), "a sequence is lost or doubled"
        for stage, group in self._running.items():
            assert all(s.stage is stage for s in group.values()), f"a sequence is not in {stage.value}"
        assert self.waiting_tokens == sum(len(s.tokens) - s.n_computed for s in queued)
        assert self.waiting_pictures == sum(len(s.pending_media) for s in self.waiting[Stage.ENCODE])
        for queue in self.waiting.values():
            assert sorted(queue, key=lambda s: s.order) == list(queue), "a queue is out of order"
        self.room.caches.check()
