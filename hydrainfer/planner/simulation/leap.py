"""Fast forward over decode steps that change nothing but counts.

While an instance only decodes and none of its sequences ends, every step repeats the one before with one token more.
The ends of such steps are computed ahead. Their effect is applied when a message arrives or when the first step that
differs is due. The outcome is the same as with a turn for each step, and tests compare the two.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from copy import copy
from itertools import islice, pairwise

from hydrainfer.core import DeviceTime, Lane, LiveSequence, Load, Request, Span, Stage, StepBatch, StepResult
from hydrainfer.engine import Engine
from hydrainfer.scheduler import backlog, skip

TOKEN = 7  # the token that every modelled device returns
_FEWEST, _MOST = 2, 64  # steps of a leap; with more, too many are in vain when a message arrives


class ModelledTicket:
    """A batch that is done when `span` ends. Only the simulator knows that time; the engine is not told."""

    __slots__ = ("began_s", "result", "span")

    def __init__(self, span: Span, result: StepResult, now: float) -> None:
        self.span = span
        self.result = result
        result.own_s = span.own_s
        self.began_s = now if span.own_s is None else span.end_s - span.own_s  # the batch may begin later than now

    def poll(self, now: float) -> StepResult | None:
        return self.result if now >= self.span.end_s else None

    def ready_at(self) -> float | None:
        return None


class Leap:
    """The batch in flight and the steps that repeat it. `ends`: when each is done; the last one needs a turn."""

    def __init__(self, engine: Engine, device: DeviceTime, ticket: ModelledTicket, ends: list[float]) -> None:
        self._engine = engine
        self._device = device
        self._ticket = ticket
        self._batch = ticket.result.batch
        self._began_s = ticket.began_s
        self.ends = ends
        self.ends_at = ends[-1]
        self._costs = copy(engine.costs)
        self._counts = backlog(engine.scheduler)
        self._loads: list[Load] = []  # after each step, as far as asked for
        self._n_reported = 0

    @staticmethod
    def begin(engine: Engine, device: DeviceTime, ticket: ModelledTicket, due_s: float) -> Leap | None:
        """A leap over the steps that repeat the one in flight, which must be the only one; None if there are too few.
        `due_s`: when the engine has something else to do. (A request that arrives waits for a copy, whose end is known,
        or for room, which only shrinks while sequences decode.)"""
        s = engine.scheduler
        batch = ticket.result.batch
        if batch.lane is not Lane.LANGUAGE or len(batch.work) != len(s.decoding):
            return None
        if s.encoding or s.prefilling or s.n_waiting:
            return None
        n = _MOST
        seqs = []
        for item in batch.work:
            seq = item.seq
            left = seq.n_most - len(seq.tokens) - 1  # tokens that do not end the sequence
            if left < _FEWEST or seq.plan[seq.cursor] is not Stage.DECODE:
                return None
            seqs.append(seq)
            if left < n:
                n = left
        shares = bool(seqs[0].request.keys)
        if shares:  # no block is published or evicted meanwhile
            n = min(n, *(int(min(seq.hold.due - seq.n_computed - 1, _MOST)) for seq in seqs))
        if not s.room.can_grow(seqs, n, evicting=not shares):
            return None
        ends = _ends(device, batch, ticket.span.end_s, n, due_s)
        if len(ends) > _FEWEST:
            return Leap(engine, device, ticket, ends)
        return None

    def reported(self, until_s: float) -> Load | None:
        """The load after the last step done by `until_s`; None if it was already reported."""
        n = bisect_right(self.ends, until_s, hi=len(self.ends) - 1)
        if n <= self._n_reported:
            return None
        self._n_reported = n
        return self._load_after(n)

    def load_at(self, now: float) -> Load:
        n = bisect_right(self.ends, now, hi=len(self.ends) - 1)
        return self._load_after(n)

    def unreported(self, now: float, message_s: float) -> Iterator[tuple[Load, float]]:
        """The loads after the steps done before `now` that `reported` has not returned, each with its time. Left out
        are loads whose messages, of `message_s` each, are followed by the next one's before `now`."""
        n = self._n_before(now)
        for k in range(self._n_reported, n):
            if k == n - 1 or self.ends[k + 1] + message_s > now:
                yield self._load_after(k + 1), self.ends[k]

    def land(
        self,
        now: float,
        decoded: Callable[[LiveSequence, list[float]], list[int]],
        answer: Callable[[Request, int], int],
    ) -> None:
        """Apply the steps that are done before `now`; the next one is in flight. `decoded(seq, times)` records the
        tokens of a sequence and returns them; `answer(request, n)` is the token after the first `n`."""
        n = self._n_before(now)
        if n == 0:
            return
        done = self.ends[:n]
        engine = self._engine
        ticket = self._ticket
        for began_s, ended_s in pairwise((self._began_s, *done)):
            engine.observe(self._batch, ended_s - began_s)
        batch = skip(engine.scheduler, self._batch, [decoded(work.seq, done) for work in self._batch.work], done)
        tokens = [answer(work.seq.request, work.seq.n_computed + 1) for work in batch.work]
        ticket.span = self._device.latest[Lane.LANGUAGE] = Span(self.ends[n])
        ticket.began_s = self.ends[n - 1]
        ticket.result = StepResult(batch, tokens, own_s=self.ends[n] - ticket.began_s)

    def _n_before(self, now: float) -> int:
        return bisect_left(self.ends, now, hi=len(self.ends) - 1)

    def _load_after(self, n: int) -> Load:
        if n == 0:
            return self._engine.load()
        ends = self.ends
        loads = self._loads
        for i in range(len(loads), n):
            self._costs.observe(self._batch, ends[i] - (ends[i - 1] if i else self._began_s))
            loads.append(self._costs.load(*self._counts))
        return loads[n - 1]


def _ends(device: DeviceTime, batch: StepBatch, first_s: float, n: int, until_s: float) -> list[float]:
    """The time at which the batch in flight is done, and those of up to `n` steps after it that end before
    `until_s`."""
    contexts = sum(work.start + 1 for work in batch.work)
    ends = [first_s]
    end_s = first_s
    for seconds in islice(device.cost.decodes_s(len(batch.work), contexts), n):
        end_s += seconds
        if end_s >= until_s:
            break
        ends.append(end_s)
    return ends
