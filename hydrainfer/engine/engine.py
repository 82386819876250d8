"""One instance: scheduler and runners turned by a synchronous `step`, which never blocks and never reads a clock.

    step(now):  poll tickets → apply → moves between instances → expire deadlines → launch on free lanes
                → hand out outputs → post to peers

A thread drives it in production (`thread.py`), a virtual clock in the simulator and in tests.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy

from hydrainfer.core import (
    DEVICE_LOST,
    Cached,
    DeadlineExceeded,
    ErrorInfo,
    EventKind,
    Grammar,
    HydraError,
    InstanceStats,
    InternalError,
    Lane,
    LifecycleEvent,
    LiveSequence,
    Load,
    Output,
    OutputSink,
    Parcel,
    Request,
    Stage,
    StepBatch,
    StepResult,
    StepTokens,
)
from hydrainfer.engine.compiling import LOOK_S, Compiling
from hydrainfer.engine.copies import Copies
from hydrainfer.engine.costs import Costs
from hydrainfer.engine.lanes import Lanes, Overlap
from hydrainfer.engine.moves import Arrived, Left, Moves, Pulled, Returned, Stranded
from hydrainfer.engine.ports import Runner
from hydrainfer.scheduler import Outcome, Scheduler, backlog

EventSink = Callable[[LifecycleEvent], None]
_NEVER = float("inf")
_PATIENCE = 10  # how many times more batches in a row may lack memory than may fail for another reason


class Engine:
    """The engine of one instance. `overlap`, `ahead`: see `Lanes`. `sink`
    gets the outputs of each step, `record`, if given, every lifecycle event. `moves`: moves requests between instances,
    if there are several. `moved(request id, instance, hops)` is told the new owner of a request that came or went.
    `step` raises when the device is lost or `give_up_after` batches of a lane in a row failed as a whole. `ready`
    says whether a grammar that is to be followed here is compiled, which it begins otherwise. `copies`: the copies to
    host memory and back, if there are caches there."""

    def __init__(
        self,
        scheduler: Scheduler,
        runners: Mapping[Lane, Runner],
        sink: OutputSink,
        record: EventSink | None = None,
        overlap: Overlap = "free",
        moves: Moves | None = None,
        moved: Callable[[str, str, int], None] | None = None,
        give_up_after: float = float("inf"),
        ready: Callable[[Grammar], bool] = lambda _: True,
        copies: Copies | None = None,
        *,
        ahead: bool = False,
    ) -> None:
        self._compiling = Compiling(ready)
        self._moved = moved or (lambda *_: None)
        self.scheduler = scheduler
        self.moves, self._copies = moves, copies
        self.lanes = Lanes(runners, overlap, ahead=ahead)
        self._sink = sink
        self._record = record
        self._outputs: list[Output] = []
        self._open: set[str] = set()  # submitted, without a final output yet
        self._deadlines: list[tuple[float, str, bool]] = []  # the flag: only for a request that still waits
        self._progress_s = 0.0
        self.costs = Costs()
        self._step_tokens = StepTokens()
        self._give_up_after = give_up_after
        self._n_failed: dict[Lane, int] = {}

    # ---- requests

    def submit(self, request: Request, now: float, produced: tuple[int, ...] = ()) -> None:
        """Queue a request, with the tokens that it already has. If it can never run here, its final output says why."""
        self._open.add(request.id)
        arrival_s = now if request.arrival_s is None else request.arrival_s
        if self._record is not None:
            self._record(LifecycleEvent(request.id, EventKind.ARRIVED, arrival_s, n=request.n_prompt))
        if not self._busy:
            self._progress_s = now
        if not self._compiling.holds(request, produced):
            self._add(request, now, produced)

    def _add(self, request: Request, now: float, produced: tuple[int, ...]) -> None:
        try:
            seq = self.scheduler.add(request, now, produced)
        except HydraError as e:
            self._end(_failed(request.id, e), now)
            return
        self._watch(seq)
        self._queued(seq, now)

    def _watch(self, seq: LiveSequence) -> None:
        deadline_s = seq.request.deadline_s
        if deadline_s == _NEVER:
            return
        heapq.heappush(self._deadlines, (deadline_s, seq.id, False))
        if seq in self.scheduler.waiting and (latest_s := self.scheduler.latest_s(seq)) < deadline_s:
            heapq.heappush(self._deadlines, (latest_s, seq.id, True))

    def cancel(self, request_ids: Iterable[str], now: float) -> None:
        for request_id in request_ids:
            if self._stop(request_id, now):
                self._end(Output(request_id, finish_reason="abort"), now)
            elif self.moves is not None:
                self.moves.cancel_arrival(request_id)

    def _stop(self, request_id: str, now: float) -> bool:
        """Forget a request, wherever in this engine it is. Returns False if it is not here."""
        if self.moves is not None:
            self.moves.close(request_id, now)
        return self._compiling.forget(request_id) or self.scheduler.cancel(request_id)

    def fail_all(self, error: HydraError, now: float) -> None:
        """End with `error` every request that has not ended yet, even one that the scheduler lost when a step failed.
        The blocks of a batch in flight come back when its result is applied."""
        request_ids = sorted(self._open)
        for request_id in request_ids:
            self._finish(_failed(request_id, error))
        self._flush()  # before the scheduler is told, which may be what is broken
        for request_id in request_ids:
            self._stop(request_id, now)
            self._event(request_id, EventKind.FINISHED, now, detail="error")

    # ---- other instances

    def deliver(self, parcel: Parcel) -> None:
        """Hand over a peer's messages, which the next step reads."""
        assert self.moves is not None, "an engine without peers got a message"
        self.moves.deliver(self._compiling.without_held(parcel))

    def _compiled(self, now: float) -> None:
        """Go on with what has waited for its grammar."""
        for request, produced in self._compiling.requests():
            self._add(request, now, produced)
        for parcel in self._compiling.offers():
            assert self.moves is not None
            self.moves.deliver(parcel)

    def peer_dead(self, peer: str, incarnation: int, now: float) -> None:
        if self.moves is not None:
            self.moves.peer_dead(peer, incarnation, now)

    def _move(self, moves: Moves, now: float) -> None:
        for move in moves.turn(now):
            match move:
                case Left(request_id, peer, hops):
                    self._open.discard(request_id)
                    self._moved(request_id, peer, hops)
                    self._progress_s = now
                case Arrived(seq, cancelled):
                    self._open.add(seq.id)
                    self._moved(seq.id, moves.name, seq.hops)
                    self._progress_s = now
                    self._watch(seq)
                    self._queued(seq, now)
                    if cancelled:
                        self.cancel([seq.id], now)
                case Pulled(n_tokens, seconds):
                    self.costs.pulled(n_tokens, seconds)
                case Returned(seq) if not seq.cancelled:  # not cancelled since it was taken back
                    self._queued(seq, now)
                case Stranded(request_id, error):
                    if self._stop(request_id, now):
                        self._end(_failed(request_id, error), now)

    # ---- the loop

    def step(self, now: float) -> float | None:
        """Take one turn. Returns the latest time for the next turn; None: only when somebody wakes the engine."""
        for result, seconds in self.lanes.landed(now):
            self._progress_s = now
            if result.error is None:
                self.observe(result.batch, seconds)
            self._judge(result)
            self._commit(self.scheduler.apply(result, now), now)
        if self._compiling:
            self._compiled(now)
        moves, copies = self.moves, self._copies
        for seq in copies.turn(now) if copies is not None else ():  # before offers: parked requests go first
            self._queued(seq, now)
        if moves is not None:
            self._move(moves, now)
        if self._deadlines:
            self._expire(now)
        self._launch(now)
        if copies is not None:
            copies.begin(now)  # for requests that landed, or were preempted, in this turn
        if moves is not None:
            moves.place(now)
        self._flush()
        if moves is not None and moves.to_post:
            moves.post(self.load())
        if not self._busy:
            self._progress_s = now  # a stall counts from the next request on
        return self._wake_at(now)

    def observe(self, batch: StepBatch, seconds: float) -> None:
        """Record a batch that took this long by itself."""
        self.costs.observe(batch, seconds)
        if self.scheduler.observe(batch, seconds) and self.moves is not None:
            self.moves.reorder()

    def _judge(self, result: StepResult) -> None:
        """Raise if too many batches in a row have failed, or the device is lost: the lane will not recover by itself.
        Memory that another process takes may come back, so that is waited for longer."""
        lane, code = result.batch.lane, "" if result.error is None else str(result.error.code)
        n = self._n_failed[lane] = self._n_failed.get(lane, 0) + 1 if code else 0
        if code == DEVICE_LOST or n >= self._give_up_after * (_PATIENCE if code == "out_of_memory" else 1):
            raise InternalError(f"{n} batches in a row failed on the {lane.value} lane")

    def _launch(self, now: float) -> None:
        lanes, s = self.lanes, self.scheduler

        def counts() -> tuple[int, int]:
            crowd = len(s.decoding) if s.policy.order == "rank" else 0  # in Algorithm 1 lanes just take turns
            return crowd, len(s.encoding) + len(s.waiting.pictured)

        def may_pause() -> bool:
            return not s.prefilling and s.gap.may_pause(now)

        for lane in lanes.turns(s.gate.prefers_language, counts, may_pause):
            turn = s.next(now, lane, lanes.interrupts(lane), ahead=lanes.busy(lane))
            batch, started, preempted, departed = turn
            for seq in preempted:
                self._event(seq.id, EventKind.PREEMPTED, now)
                self._queued(seq, now)
            for seq in departed:
                if seq not in preempted:  # such a one has departed just now
                    self._queued(seq, now)
            if batch is None:
                continue
            lanes.launch(batch, now)
            if batch.lane is Lane.LANGUAGE:
                self._step_tokens.add(batch.n_items)
            for seq in started:
                n_cached = max(seq.n_cached, 0) if seq.stage is Stage.PREFILL else 0
                self._event(seq.id, EventKind.STARTED, now, seq.stage, n=n_cached)

    def _commit(self, outcomes: list[Outcome], now: float) -> None:
        heard, outputs = self._record is not None, self._outputs
        for o in outcomes:
            seq, tokens = o.seq, o.tokens
            for _ in tokens if heard else ():
                self._event(seq.request.id, EventKind.TOKEN, now)
            if o.n_drafted:
                self._event(seq.request.id, EventKind.DRAFTED, now, n=o.n_drafted)
                self._event(seq.request.id, EventKind.ACCEPTED, now, n=len(tokens) - 1)
            start, n_cached = len(seq.tokens) - seq.n_prompt - len(tokens), max(seq.n_cached, 0)
            if o.ended is not None:
                self._event(seq.id, EventKind.ENDED, now, o.ended)
            prompt = seq.take_prompt_logprobs() if seq.prompt_logprobs else ()
            if o.finish is not None:
                stop, error = tokens[-1] if o.finish == "stop" else None, ErrorInfo.of(o.error) if o.error else None
                self._end(Output(seq.id, tokens, o.logprobs, prompt, o.finish, stop, error, start, n_cached), now)
                continue
            if tokens:
                outputs.append(Output(seq.request.id, tokens, o.logprobs, prompt, start=start, n_cached=n_cached))
            if o.ended is not None:
                self._queued(seq, now)

    def _queued(self, seq: LiveSequence, now: float) -> None:
        here = self.scheduler.duties.runs(seq.stage)
        self._event(seq.id, EventKind.QUEUED if here else EventKind.MIGRATING, now, seq.stage)
        if not here:
            self._depart(seq, now)

    def _depart(self, seq: LiveSequence, now: float) -> None:
        if self.moves is not None:
            self.moves.depart(seq, now)

    def _end(self, final: Output, now: float) -> None:
        self._finish(final)
        self._event(final.request_id, EventKind.FINISHED, now, detail=final.finish_reason or "")

    def _finish(self, final: Output) -> None:
        """The one place where a request's final output is handed out."""
        self._open.discard(final.request_id)
        self._outputs.append(final)

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id, if_waiting = heapq.heappop(self._deadlines)
            if if_waiting:
                seq = self.scheduler.get(request_id)
                if seq is None or seq not in self.scheduler.waiting:
                    continue
                if (latest_s := self.scheduler.latest_s(seq)) > now:
                    heapq.heappush(self._deadlines, (latest_s, request_id, True))
                    continue
                late = "the request cannot be done by its deadline any more; retry or raise the timeout"
            else:
                late = "the request's deadline passed before it was done; retry or raise the timeout"
            if self._stop(request_id, now):
                self._end(_failed(request_id, DeadlineExceeded(late)), now)

    def _flush(self) -> None:
        if self._outputs:
            self._sink(self._outputs)
            self._outputs = []  # only now: if the sink fails, they are handed out again

    def _wake_at(self, now: float) -> float | None:
        wake_at = self.lanes.ready_at()
        while self._deadlines and self.scheduler.get(self._deadlines[0][1]) is None:
            heapq.heappop(self._deadlines)
        if self._deadlines:
            wake_at = min(wake_at, self._deadlines[0][0])
        if Lane.VISION in self.lanes.runners and not self.lanes.busy(Lane.VISION):
            gate = self.scheduler.gate.opens_at()
            if now < gate < wake_at:
                wake_at = gate
        if self.moves is not None:
            wake_at = min(wake_at, self.moves.wake_at())
        if self._copies is not None:
            wake_at = min(wake_at, self._copies.wake_at())
        if self._compiling:
            wake_at = min(wake_at, now + LOOK_S)
        return wake_at if wake_at < _NEVER else None

    def _event(
        self, request_id: str, kind: EventKind, at_s: float, stage: Stage | str = "", detail: str = "", n: int = 0
    ) -> None:
        if self._record is not None:
            self._record(LifecycleEvent(request_id, kind, at_s, stage, detail, n))

    # ---- facts

    @property
    def _busy(self) -> bool:
        if self.lanes.in_flight:
            return True
        s = self.scheduler
        n = s.n_running + s.n_waiting + s.parking.n_live + len(s.fetching.live) + len(self._compiling)
        return bool(n or not self.still or (self.moves is not None and not self.moves.idle))

    @property
    def idle(self) -> bool:
        """Whether nothing lives here and no lane is executing: every block is back."""
        return not self._busy and not (self._copies is not None and self._copies.holding)

    @property
    def still(self) -> bool:
        """Whether no lane is executing and no copy is running: threads can end."""
        return not (self.lanes.in_flight or any(m is not None and m.copying for m in (self.moves, self._copies)))

    def news(self) -> Cached | None:
        """The prefixes that came and went since the last call; the first call begins the record."""
        return self.scheduler.room.caches.news()

    def out_of_reach(self, now: float) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The peers that cannot be reached, and the requests that only those could take."""
        return (self.moves.cut(now), self.moves.stuck()) if self.moves is not None else ((), ())

    def load(self) -> Load:
        return self.costs.load(*backlog(self.scheduler))

    def forget_cached(self) -> dict[str, int]:
        """Forget all KV, embeddings and states that later requests could reuse, on the device and in host memory.
        Blocks in use stay. A shared store is left alone. Returns the numbers of blocks by cache."""
        s = self.scheduler
        host = s.host.forget() if s.host is not None else {}
        return s.room.caches.forget() | {f"host_{name}": n for name, n in host.items()}

    def stats(self, now: float) -> InstanceStats:
        s, caches = self.scheduler, self.scheduler.room.caches
        return InstanceStats(
            role=str(s.duties),
            n_waiting=s.n_waiting + self._compiling.n_requests,
            n_running=s.n_running,
            n_encoding=len(s.encoding),
            n_prefilling=len(s.prefilling),
            n_decoding=len(s.decoding),
            cache_blocks=caches.usage() | {f"host_{spec}": n for spec, n in s.parking.caches.usage().items()},
            pictures_found=s.room.n_pictures_found,
            pictures_wanted=s.room.n_pictures_wanted,
            tokens_found=s.room.n_tokens_found,
            tokens_wanted=s.room.n_tokens_wanted,
            tokens_missed=s.room.n_tokens_missed,
            tokens_asked=s.room.n_tokens_asked,
            tokens_from=dict(s.room.n_tokens_from),
            n_preemptions=s.n_preemptions,
            n_steps=s.n_batches - self.lanes.n_in_flight,
            stalled_s=self._stalled_s(now),
            hung_s=self.lanes.hung_s(now),
            n_migrating=len(s.migrating),
            n_arriving=self.moves.n_arriving if self.moves is not None else 0,
            blocks_pulled=dict(self.moves.blocks_pulled) if self.moves is not None else {},
            n_landed=self.moves.n_landed if self.moves is not None else 0,
            n_parked=s.parking.n_live,
            drafts={name: deepcopy(counts) for name, counts in s.drafts.counts.items()},
            step_tokens=deepcopy(self._step_tokens),
            store=None if self._copies is None else self._copies.store_stats(),
        )

    def _stalled_s(self, now: float) -> float:
        """Seconds since anything last happened here, or since a lane began the batch that it is still at, while the
        other lane may go on. An instance that only waits for others to take or give a request does not stall."""
        if not self._busy or (self.moves is not None and not self.moves.idle):
            return self.lanes.hung_s(now)
        return max(now - self._progress_s, self.lanes.hung_s(now))

    def close(self) -> None:
        if self.moves is not None:
            self.moves.shut()
        if self._copies is not None:
            self._copies.close()
        self.lanes.close()


def _failed(request_id: str, error: HydraError) -> Output:
    return Output(request_id, finish_reason="error", error=ErrorInfo.of(error))
