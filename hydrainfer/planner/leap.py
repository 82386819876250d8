"""Fast forward over decode steps that change nothing but counts.

While an instance only decodes, and none of its sequences ends, every step repeats the one before with one token more.
Such steps are not turned one by one: their ends are computed ahead, and what they did is written down when somebody
looks: a message has come, or the first step that is not of this kind is due. The outcome is the same, tested against
turning each step.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

from hydrainfer.core import DeviceTime, Lane, Load, Stage, StepBatch, StepResult
from hydrainfer.scheduler import skip

if TYPE_CHECKING:
    from hydrainfer.planner.simulator import Node

TOKEN = 7  # what every modelled device answers
_FEWEST, _MOST = 2, 64  # steps that are worth a leap; more are computed in vain when a message comes


class ModelledTicket:
    """A batch that is done at a known time."""

    __slots__ = ("at_s", "result")

    def __init__(self, at_s: float, result: StepResult) -> None:
        self.at_s, self.result = at_s, result

    def poll(self, now: float) -> StepResult | None:
        return self.result if now >= self.at_s else None

    def ready_at(self) -> float | None:
        return self.at_s


class Leap:
    """Of the batch in flight and those that repeat it. `ends`: when each is done, the last of which needs a turn."""

    def __init__(self, node: Node, batch: StepBatch, launched_s: float, ends: list[float]) -> None:
        self._node, self._batch, self._launched_s = node, batch, launched_s
        self.ends = ends
        self.ends_at = ends[-1]
        self._loads: list[Load] = []  # after each step that was asked for
        self._n_reported = 0

    @staticmethod
    def begin(node: Node) -> Leap | None:
        """If what `node` runs now can be repeated until something comes."""
        engine = node.engine
        found = engine.repeating()
        if found is None:
            return None
        ticket, launched_s, until_s = found
        assert isinstance(ticket, ModelledTicket)
        batch = ticket.result.batch
        if batch.lane is not Lane.LANGUAGE or len(batch.work) != len(engine.scheduler.decoding):
            return None
        n, seqs = _MOST, []
        for seq, *_ in batch.work:
            left = seq.request.max_tokens - seq.n_produced - 1  # that do not end it
            if left < _FEWEST or seq.plan[seq.cursor] is not Stage.DECODE:
                return None
            seqs.append(seq)
            if left < n:
                n = left
        if not engine.scheduler.room.can_grow(seqs, n):
            return None
        ends = _ends(node.device, batch, ticket.at_s, n, until_s)
        return Leap(node, batch, launched_s, ends) if len(ends) > _FEWEST else None

    def reported(self, until_s: float) -> Load | None:
        """What was said last until then, if that is news."""
        n = bisect_right(self.ends, until_s, hi=len(self.ends) - 1)
        if n <= self._n_reported:
            return None
        self._n_reported = n
        return self._load_after(n)

    def load_at(self, now: float) -> Load:
        n = bisect_right(self.ends, now, hi=len(self.ends) - 1)
        return self._load_after(n)

    def land(self, now: float) -> None:
        """Write down the steps that are done before `now`; the next one is in flight."""
        node, engine = self._node, self._node.engine
        n = bisect_left(self.ends, now, hi=len(self.ends) - 1)
        if n == 0:
            return
        done = self.ends[:n]
        for k in range(self._n_reported, n):
            if k == n - 1 or done[k + 1] + node.message_s > now:  # the others are known to be overtaken
                node.report(self._load_after(k + 1), done[k])
        times = [self._launched_s, *done]
        batch = skip(engine.scheduler, self._batch, [node.decoded(work.seq, done) for work in self._batch.work])
        result = StepResult(batch, tokens=[node.answer(work.seq) for work in batch.work])
        engine.skip(ModelledTicket(self.ends[n], result), self._batch, times)
        node.device.busy_until[Lane.LANGUAGE] = self.ends[n]

    def _load_after(self, n: int) -> Load:
        if n == 0:
            return self._node.engine.load()
        if not self._loads:
            starts = [self._launched_s, *self.ends]
            self._loads = self._node.engine.loads_after(self._batch, [b - a for a, b in zip(starts, self.ends)])
        return self._loads[n - 1]


def _ends(device: DeviceTime, batch: StepBatch, first_s: float, n: int, until_s: float) -> list[float]:
    """When the batch in flight and up to `n` after it are done, no later than something else happens."""
    n_seqs = len(batch.work)
    contexts = sum(work.start + 1 for work in batch.work)
    ends, end_s = [first_s], first_s
    for _ in range(n):
        contexts += n_seqs
        end_s += device.cost.language_s(0, 0, n_seqs, contexts)
        if end_s >= until_s:
            break
        ends.append(end_s)
    return ends
