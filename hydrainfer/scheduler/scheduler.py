"""Stage-level batching (paper, Algorithm 1) for one instance of any role.

    add ─> waiting ──reserve──> encoding ─> prefilling ─> decoding ─> out
              ^                    │             │            │
              └──── preempted (youngest first, rewound, keeps its tokens and its age)

    expect ─reserve─> arriving ─land─> the stage its cursor names, or parked; the next stage runs elsewhere ─> migrating

A language batch has all decodes, then prefill chunks within the token budget, of begun and waiting requests alike, by
rank (`order.py`; with FCFS, begun ones first. `Policy.batching` has a baseline in which prefills come without decodes).
A vision batch is filled likewise, within the image budget, while the encode gate is open. Each lane asks by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from hydrainfer.cache import CacheSet, HostTier, Pulls, StoreTier, Tier
from hydrainfer.core import (
    Duties,
    EncodeWork,
    Handoff,
    Lane,
    LiveSequence,
    Request,
    Role,
    Stage,
    StepBatch,
    StepResult,
    TokenLogprobs,
    TokenWork,
)
from hydrainfer.scheduler.admission import Admission
from hydrainfer.scheduler.asking import Asking
from hydrainfer.scheduler.check import check_places
from hydrainfer.scheduler.decodes import Decodes
from hydrainfer.scheduler.drafts import Drafting, Drafts
from hydrainfer.scheduler.fetching import Fetching
from hydrainfer.scheduler.filling import add_pictures, rest_of
from hydrainfer.scheduler.finding import Finder
from hydrainfer.scheduler.gap import Gap
from hydrainfer.scheduler.gate import Gate
from hydrainfer.scheduler.order import LAST, Order, Rank, best_in_flight
from hydrainfer.scheduler.outcome import Outcome, Turn
from hydrainfer.scheduler.parking import Parking, Shift
from hydrainfer.scheduler.policy import Budgets, Policy
from hydrainfer.scheduler.preemption import Preemption
from hydrainfer.scheduler.prompts import Prompts
from hydrainfer.scheduler.room import SequenceRoom

_IDLE = Turn()


class Scheduler:
    """Owns every `LiveSequence` of the instance. Pure: no clock, no tensors; `next` and `apply` are the whole loop.
    `duties` may change while the instance is idle."""

    def __init__(
        self,
        role: Role,
        caches: CacheSet,
        budgets: Budgets,
        policy: Policy | None = None,
        host: CacheSet | None = None,
        tiers: Sequence[Tier] = (),
        store: StoreTier | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        """`host`: the caches of the host tier. `tiers`: those that keep what the device evicts. `store`: the shared
        one, if there is one."""
        self.duties = Duties(role)
        self.budgets = budgets
        self.policy = policy or Policy()
        self._order = Order(self.duties, self.policy)
        self.host = HostTier(caches, host) if host is not None and host.specs else None
        others = [tier for tier in (self.host, *tiers, store) if tier is not None]
        finder = Finder(caches, others, self._order.pace.seconds)
        self.room = SequenceRoom(caches, self.policy.headroom_tokens, finder)
        self.room.saving.on, self.room.host = store is not None, self.host
        self.asking = Asking(finder, store)
        self.drafts = Drafts(self.room, drafting or Drafting())
        self.encoding: dict[str, LiveSequence] = {}
        self.prefilling: dict[str, LiveSequence] = {}
        self.decoding: dict[str, LiveSequence] = {}
        self._running = {Stage.ENCODE: self.encoding, Stage.PREFILL: self.prefilling, Stage.DECODE: self.decoding}
        self.migrating: dict[str, LiveSequence] = {}  # keep their blocks and wait for an instance of their next stage
        self._live: dict[str, LiveSequence] = {}
        self.fair, running = self._order.fair, (self._running, self._live)
        self.parking = Parking(host, self.room, self.decoding, self._order.pace, self._restart)
        self.fetching = Fetching(self.room, self._enter, self._restart, lambda seq: self._admission.free(seq))
        away = self.parking, self.fetching
        self._admission = Admission(
            self.duties, self.room, budgets, self.policy, *running, self.fair, *away, self.asking
        )
        self.waiting, self.arriving = self._admission.waiting, self._admission.arriving
        places = self._admission.places
        preemption = Preemption(self._running, self.arriving, places, self.room, *away, self._restart)
        self._decodes = Decodes(self.decoding, places, preemption, self.room)
        self.gate = Gate(self.duties, self.policy, self._order, self._admission, self._running)
        begun = (self.encoding, self.prefilling)
        self.gap = Gap(budgets, self.decoding, self.waiting, begun, self._order.pace)
        self._prompts = Prompts(
            budgets, self.policy, self._order, self.gap, self._admission, self.prefilling, self._enter
        )
        self._n_added = self.n_batches = self.n_preemptions = 0

    # ---- requests come and go

    def add(self, request: Request, now: float, produced: tuple[int, ...] = ()) -> LiveSequence:
        """Queue a request with the tokens it has, or let it migrate if its stage runs elsewhere. Raises
        `InvalidRequest` if it could never fit the caches, even alone."""
        assert request.id not in self._live, f"request {request.id} is already here"
        order = (now if request.arrival_s is None else request.arrival_s, self._n_added)
        seq = LiveSequence(request, order, now, produced)
        self.room.check_fits_empty(request, self._admission.visit(seq))
        self._n_added += 1
        self._live[seq.id] = seq
        if request.keys and self.duties.only_continues and self.room.recall(seq, (Stage.DECODE,)):
            seq.go_to(Stage.PREFILL)  # it takes along what is kept here of the prompt
        self._wait(seq, now)
        return seq

    def take_back(self, seq: LiveSequence, now: float) -> bool:
        """Restart a migrating sequence, without what was kept of it. Returns whether it starts here."""
        seq.rewind()
        self.room.let_go(seq)
        if not self.duties.runs(seq.stage):
            return False
        seq.queue(now)
        del self.migrating[seq.id]
        self._wait(seq, now)
        return True

    def _wait(self, seq: LiveSequence, now: float) -> None:
        """Put the sequence into the queue of its stage, by rank, or let it migrate if that stage runs elsewhere."""
        if seq.stage is Stage.ENCODE and self._admission.skips_encoder(seq):
            seq.go_to(Stage.PREFILL)
        if self.duties.runs(seq.stage):
            visit = self._admission.visit(seq)
            self._order.place(seq, *self.room.finder.uncached(seq, visit))
            self.waiting.add(seq)
            self.asking.arrived(seq, visit, now)
        else:
            self.migrating[seq.id] = seq

    def cancel(self, request_id: str) -> bool:
        """Forget a request and free its blocks, at once or when its batch in flight is applied. False if it is not
        here."""
        seq = self._live.pop(request_id, None)
        if seq is None:
            return False
        self.asking.forget(seq.id)
        seq.cancelled = True
        if self._running[seq.stage].pop(seq.id, None) is None and self.migrating.pop(seq.id, None) is None:
            self.parking.forget(seq)
            self.fetching.forget(seq)
            self._admission.forget(seq)
        if not seq.in_flight:
            self._admission.free(seq)
        return True

    @property
    def n_waiting(self) -> int:
        return len(self.waiting)

    @property
    def n_running(self) -> int:
        return len(self.encoding) + len(self.prefilling) + len(self.decoding)

    def get(self, request_id: str) -> LiveSequence | None:
        return self._live.get(request_id)

    def latest_s(self, seq: LiveSequence) -> float:
        """The latest start with which a waiting request may meet its deadline; later if others compute some of it
        meanwhile."""
        rest = self.room.finder.uncached(seq, self._admission.visit(seq))
        return seq.request.deadline_s - self._order.pace.least_s(*rest)

    # ---- arrivals from other instances

    def expect(self, handoff: Handoff, now: float) -> Pulls | None:
        """Reserve room for an offered request, here or in host memory; returns the copies to make, None if there is no
        room. One that brings no blocks needs no room. Raises `InvalidRequest` if there could never be enough."""
        seq = handoff.sequence(now)
        self.room.check_fits_empty(seq.request, self._admission.visit(seq))
        if self._admission.has(seq.id):
            return None
        self._order.place(seq, *rest_of(handoff))
        return self._admission.expect(seq, handoff)

    def rank_of(self, handoff: Handoff) -> Rank:
        """The rank by which an offer waits for room."""
        return self._order.rank(handoff.request, handoff.order, *rest_of(handoff))

    def repeats(self, handoff: Handoff, now: float) -> bool:
        """Whether an offer is a late copy or repeats work in progress here. It waits; those after it do not."""
        if self._admission.has(handoff.request.id):
            return True
        if handoff.stage is Stage.DECODE:
            return False
        if self.asking.store is None and not (handoff.request.keys and (self.prefilling or self.arriving)):
            return False
        seq = handoff.sequence(now)
        self.asking.arrived(seq, self._admission.visit(seq), now)
        self._order.place(seq, *rest_of(handoff))
        return self._admission.repeats(seq)

    def land(self, request_id: str, now: float) -> LiveSequence:
        """Take over an arrived request, whose blocks are written."""
        seq = self.arriving.pop(request_id)
        seq.queue(now)
        self._live[seq.id] = seq
        if self.parking.landed(seq):
            pass
        elif not seq.hold.blocks:
            self._wait(seq, now)
        elif self.fetching.landed(seq, now):
            self.room.landed(seq)
            self._running[seq.stage][seq.id] = seq
        return seq

    def drop_arrival(self, request_id: str) -> None:
        """Note that an arriving request does not come. Nothing writes to its blocks any more."""
        self._admission.dropped(request_id)

    def forget_blocked(self, request_id: str) -> None:
        """Note that an offer that waited for room was withdrawn."""
        if request_id not in self._live:
            self._admission.taken_back(request_id)

    # ---- departures to other instances

    def offered(self, seq: LiveSequence, again: bool, abroad: bool) -> dict[str, tuple[int, ...]]:
        """The blocks that its next instance, which may be `abroad`, has to copy. `again`: it was offered before."""
        seq.attempt += again
        return self.room.offered(seq, abroad=abroad)

    def shifts(self) -> list[Shift]:
        """The copies between tiers to begin now; each is returned once. Parked sequences that find room are taken back,
        once decoding ones have it."""
        if self.parking.parked and all(len(s.tokens) <= s.hold.capacity for s in self.decoding.values()):
            self._admission.unpark()
        return [*self.parking.shifts(), *self.fetching.shifts()]

    def shifted(self, shift: Shift, seconds: float | None, now: float) -> bool:
        """Note that a copy between tiers took so long, or failed (None). Returns whether its sequence waits again, or
        goes on elsewhere."""
        if self.fetching.has(shift):
            return self.fetching.done(shift, seconds, now)
        return self.parking.done(shift, seconds, now)

    # ---- batches

    def next(self, now: float, lane: Lane, interrupts: bool = False, ahead: bool = False) -> Turn:
        """The next batch of a lane, and what choosing it changed. `interrupts`: pictures being encoded wait for it, so
        it prefills only requests that go before all of them. `ahead`: the lane still computes a batch of decodes."""
        if not (self.decoding or self.prefilling or self.encoding or self.waiting):
            return _IDLE
        after_s, preempted, departed, started = 0.0, list[LiveSequence](), list[LiveSequence](), list[LiveSequence]()
        if lane is Lane.VISION:
            work: list = self._fill_vision(now, departed)
            n, n_decodes = len(work), 0
        else:
            departed = self._admission.need_encoders()
            ready = self._decodes.ahead() if ahead else self._decodes.next(now, preempted)
            self.n_preemptions += len(preempted)
            work, n, n_decodes = self._fill_language(now, interrupts, ready)
            if self.drafts.expected and not ahead and len(work) == n_decodes:
                work, n = self.drafts.extend(work, self.budgets.tokens)
            departed += self._admission.need_encoders()  # those that lost what they had found when they got room
            self.migrating |= {seq.id: seq for seq in departed}
            if interrupts and len(work) == n_decodes:
                work, after_s = ([], 0.0) if self.gap.may_pause(now) else (work, self.gap.pictures_s(n, now))
        if not work:
            return Turn(None, (), preempted, departed) if preempted or departed else _IDLE
        for item in work:
            seq = item.seq
            seq.in_flight += 1
            if not seq.started:
                seq.started = True
                started.append(seq)
        self.n_batches += 1
        n_drafts = n - n_decodes if n_decodes == len(work) else 0
        n_guesses = self.drafts.wanted(work) if lane is Lane.LANGUAGE else 0
        batch = StepBatch(self.n_batches, lane, work, n, n_decodes, after_s, n_drafts, n_guesses)
        return Turn(batch, started, preempted, departed)

    def _fill_language(
        self, now: float, interrupts: bool, ready: list[TokenWork] | None
    ) -> tuple[list[TokenWork], int, int]:
        """The work, its number of tokens, and how many of its first items decode: those that are `ready`."""
        if ready is None:
            return [], 0, 0
        budget = self.budgets.tokens
        together = self.policy.batching == "stage-level" and not self.gap.pauses_for_prompts(now)
        work, n = (ready[:], len(ready)) if together else ([], 0)
        n_decodes = len(work)
        if n < budget and self.duties.runs(Stage.PREFILL) and (self.prefilling or self.waiting):
            before = best_in_flight(self.encoding.values()) if interrupts else LAST
            n = self._prompts.fill(now, work, n, before)
        return (work, n, n_decodes) if work else (ready, len(ready), len(ready))

    def _fill_vision(self, now: float, departed: list[LiveSequence]) -> list[EncodeWork]:
        if not (self.encoding or self.waiting.pictured) or not self.gate.is_open(now):
            return []
        work, left = list[EncodeWork](), self.budgets.image_tokens
        most, most_s = self.budgets.images, min(self.budgets.step_s, self.budgets.enough_s)

        def admit(new: LiveSequence) -> bool:
            if not self._admission.admit(new):
                return False
            entered = self._enter(new)
            if not entered and new.id not in self.fetching.live:
                departed.append(new)
            return new.id not in self.fetching.live

        for seq in self._order.turns(self.encoding.values(), self._admission.to_encode(), admit):
            most = min(most, self._order.pace.pictures_in(self.fair.time_for(seq, most_s, 0.0)))
            left = add_pictures(work, seq, left, most)
            if len(work) >= most or left <= 0:
                break
        return work

    # ---- from stage to stage

    def _restart(self, seq: LiveSequence, now: float) -> None:
        """Release and rewind a sequence, which then waits again at its old age and keeps its tokens."""
        self._admission.free(seq)
        seq.rewind()
        seq.queue(now)
        self._wait(seq, now)

    def _enter(self, seq: LiveSequence) -> bool:
        """Put a sequence into the stage its cursor names. False if that runs elsewhere: then it migrates; or if some of
        it is still being fetched."""
        if seq.id in self.fetching.live:
            return False
        here = self.duties.runs(seq.stage)
        (self._running[seq.stage] if here else self.migrating)[seq.id] = seq
        return here

    def _advance(self, seq: LiveSequence, now: float) -> None:
        """Let a sequence enter the next step of its plan."""
        self.room.leave_stage(seq)
        del self._running[seq.stage][seq.id]
        seq.cursor += 1
        seq.queue(now)
        if self._enter(seq) and seq.stage is Stage.PREFILL:
            self._order.place(seq, len(seq.tokens) - seq.n_computed, 0)

    # ---- results

    def apply(self, result: StepResult, now: float) -> list[Outcome]:
        """Commit the results of a batch. Sequences cancelled meanwhile are freed and yield no outcome. Those whose next
        stage runs elsewhere migrate from now on."""
        if result.batch.lane is Lane.VISION:
            return [outcome for item in result.batch.work for outcome in self._encoded(item, result, now)]
        self.gap.landed(result.batch, now)
        self.fetching.computed(result)
        outcomes: list[Outcome] = []
        failed, sampled, logprobs = result.error is not None or bool(result.failed), result.tokens, result.logprobs
        guesses, limited, row = result.drafts, self.gap.limited, 0
        for place, item in enumerate(result.batch.work):
            seq, drafts, first = item.seq, item.drafts, row
            seq.in_flight -= 1
            row += item.sample + len(drafts)
            if seq.cancelled or (failed and result.error_of(seq) is not None):
                outcomes += self._lost(seq, result)
                continue
            tokens = self.drafts.verified(seq, drafts, sampled[first:row]) if drafts else ()
            n_computed = seq.n_computed = len(seq.tokens) if item.sample else seq.n_computed + item.count
            if n_computed >= seq.hold.due:
                self.room.settle(seq)
            if result.prompt_logprobs:
                seq.prompt_logprobs += result.prompt_logprobs.get(place, ())
            if not item.sample:
                self._order.place(seq, len(seq.tokens) - n_computed, 0)
                continue
            token = tokens[-1] if drafts else sampled[first]
            tokens = tokens or (token,)
            if limited:
                self.gap.made(seq, len(tokens), now)
            entries = tuple(logprobs[first + i] for i in range(len(tokens))) if first in logprobs else ()
            seq.tokens.append(token)
            if guesses and place in guesses:
                self.drafts.keep(seq, guesses[place])
            if n_computed + 1 < seq.n_most and token not in seq.ends and seq.plan[seq.cursor] is Stage.DECODE:
                outcomes.append(Outcome(seq, tokens, entries, n_drafted=len(drafts)))  # nearly always
            else:
                outcomes.append(self._sampled(seq, tokens, entries, len(drafts), now))
        return outcomes

    def _lost(self, seq: LiveSequence, result: StepResult) -> list[Outcome]:
        """Drop the results of a sequence that was cancelled meanwhile, or fails."""
        if not seq.cancelled:
            self.cancel(seq.id)
            return [Outcome(seq, finish="error", error=result.error_of(seq))]
        if not seq.in_flight:
            self._admission.free(seq)
        return []

    def _encoded(self, item: EncodeWork, result: StepResult, now: float) -> list[Outcome]:
        seq, index = item.seq, item.index
        seq.in_flight -= 1
        ok = result.error_of(seq) is None
        if ok:
            self.room.encoded(seq, index)  # even if it was cancelled: others may find the result
        if seq.cancelled or not ok:
            return self._lost(seq, result)
        seq.encoded(index)
        self._admission.encoded(seq, index)
        if seq.pending_media:
            self._order.place(seq, len(seq.tokens) - seq.n_computed, len(seq.pending_media))
            return []
        self._advance(seq, now)
        return [Outcome(seq, ended=Stage.ENCODE)]

    def _sampled(
        self, seq: LiveSequence, tokens: tuple[int, ...], entries: tuple[TokenLogprobs, ...], n_drafted: int, now: float
    ) -> Outcome:
        """The outcome of new `tokens`, which may end the sequence's stage or the sequence."""
        stage, finish = seq.plan[seq.cursor], seq.finish_reason(tokens[-1])
        if finish is not None:
            self.cancel(seq.id)
            self.gap.ended(seq.n_produced)
        elif stage is Stage.PREFILL:
            self._advance(seq, now)
        ended = stage if finish is not None or stage is Stage.PREFILL else None
        return Outcome(seq, tokens, entries, ended, finish, n_drafted=n_drafted)

    def observe(self, batch: StepBatch, seconds: float) -> bool:
        """Record a batch that took this long by itself. Returns whether ranks (also of offers) have changed."""
        self.gap.observe(batch, seconds)
        self.drafts.observe(batch, seconds)
        self.fair.decoded(batch, seconds)
        if not self._order.observe(batch, seconds):
            return False
        for seq in (*self.waiting.pictured, *self.waiting.ready, *self.encoding.values(), *self.prefilling.values()):
            self._order.place(seq, *seq.rest)
        self._admission.reorder()
        return True

    def check(self) -> None:
        """Check that every live sequence is in exactly one place and the caches agree with the leases. For tests."""
        waits = [*self.waiting.pictured, *self.waiting.ready, *self.parking.live, *self.fetching.live.values()]
        check_places(self._live, self._running, self.migrating, waits, self.arriving)
        assert not any(self.duties.runs(s.stage) for s in self.migrating.values()), "migrates though it could stay"
        self.waiting.check()
        self.room.caches.check()
        self.parking.check()
