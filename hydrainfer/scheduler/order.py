"""The order of requests: one rank for those that wait and those that run, applied chunk by chunk.

    rank = arrival_s + remaining_s / a - boost_s * priority        the smallest goes first

The rank has no clock in it: of two requests that wait, neither gains on the other. So a rank stays the same while its
request waits, and changes only with the request's chunks. Nobody starves: q passes r only if it arrived less than C / a
seconds (and a bounded boost) after r, where C is the time that the largest request takes. a -> 0 is shortest remaining
first, a = 1 puts a second of waiting on a level with a second of work, and infinity is first come, first served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from hydrainfer.core import Duties, LiveSequence, Request, StepBatch
from hydrainfer.scheduler.fair import Fair
from hydrainfer.scheduler.pace import Pace
from hydrainfer.scheduler.policy import Policy

Rank = tuple[float, float, int]
"""The rank in seconds, then the request's age, which decides between equal ranks."""
LAST: Rank = (float("inf"), float("inf"), 0)


def rank_s(policy: Policy, arrival_s: float, work_s: float, priority: int) -> float:
    """The rank of a request with `work_s` seconds of work left, in seconds."""
    if policy.order != "rank":
        return arrival_s
    rank = arrival_s + work_s / policy.ageing
    if priority:
        rank -= policy.boost_s * max(-policy.max_priority, min(priority, policy.max_priority))
    return rank


class Order:
    """The ranks of sequences; `fair` says which tenant goes first. A sequence's remaining work counts only in stages
    that run here, at the pace measured here."""

    def __init__(self, duties: Duties, policy: Policy) -> None:
        self.ranked = policy.order == "rank"
        self.pace = Pace(duties)
        self.fair = Fair(self.pace, policy.credit_s)
        self._policy = policy

    def rank(self, request: Request, age: tuple[float, int], n_tokens: int, n_pictures: int) -> Rank:
        """The rank of a request. `age`: see `LiveSequence.order`. `n_tokens`, `n_pictures`: those still to be
        computed."""
        if not self.ranked:
            return age[0], *age
        work_s = self.pace.seconds(n_tokens, n_pictures)
        return rank_s(self._policy, age[0], work_s, request.priority), *age

    def place(self, seq: LiveSequence, n_tokens: int, n_pictures: int) -> None:
        """Set the rank of a sequence with this much remaining work."""
        seq.rest = n_tokens, n_pictures
        seq.rank = self.rank(seq.request, seq.order, n_tokens, n_pictures)

    def observe(self, batch: StepBatch, seconds: float) -> bool:
        """Record a batch that took this long. Returns whether all ranks must be computed anew."""
        return self.pace.observe(batch, seconds) and self.ranked

    def turns(
        self, running: Iterable[LiveSequence], waiting: Iterator[LiveSequence], admit: Callable[[LiveSequence], bool]
    ) -> Iterator[LiveSequence]:
        """The running and waiting sequences in the order in which they fill a batch: by tenant and rank, or running
        ones first. `waiting` is in order. Each waiting one is admitted when it is its turn; once one is not, no other
        is."""
        new, turn_of = None, self.fair.turn_of
        if self.ranked:
            new = next(waiting, None)
            running = list(running)
            if len(running) > 1:
                running.sort(key=turn_of)
        for seq in running:
            while new is not None and turn_of(new) < turn_of(seq):
                if not admit(new):
                    waiting, new = iter(()), None
                    break
                yield new
                new = next(waiting, None)
            yield seq
        new = new or next(waiting, None)
        while new is not None and admit(new):
            yield new
            new = next(waiting, None)


def best_in_flight(seqs: Iterable[LiveSequence]) -> Rank:
    """The best rank of the sequences that a lane is executing; `LAST` if there are none."""
    return min((s.rank for s in seqs if s.in_flight), default=LAST)
