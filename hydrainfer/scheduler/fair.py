"""A fair share of an instance for each tenant: who has had much more than others that wait goes after them.

A counter per tenant has the seconds of work that its requests were admitted with and what their decoding has taken
since, over its weight (virtual token counters, arXiv 2401.00588). Of those that wait, tenants within half of the credit
of the least go by rank, as if they were one; the others go after them, the least counter first. So tenants that keep
within their shares lose nothing of the order by rank, and one that floods the instance gets what they leave, but never
less than its share: the counters of two that wait all the while stay within the credit, and what their largest requests
take, of each other. Who comes after a pause is lifted to the credit below the others: nobody saves up more.

Who keeps within his share comes now and then and waits for the batch that runs, and for what his own is filled up with.
So while there are such, a tenant that has had more fills a batch no further than `LEFT_OVER_S`, and goes after those
who have not: a batch that ends because it may fill it no further has left nobody out.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any

from hydrainfer.core import Handoff, LiveSequence, Request, Stage, StepBatch
from hydrainfer.scheduler.pace import Pace

LEFT_OVER_S = 0.05
"""How long a batch may take to which one adds who has had more than others that come and go."""
FairTurn = tuple[float, bool, tuple[float, float, int]]
"""What a tenant has had too much, whether it goes after those who come now and then, and the rank: the smallest goes
first."""
rank_of: Callable[[LiveSequence], tuple[float, float, int]] = attrgetter("rank")


class Fair:
    """The counters of one instance, by tenant. With one tenant they change nothing. `credit_s`: of work."""

    def __init__(self, pace: Pace, credit_s: float) -> None:
        self.counters: dict[str, float] = {}
        self._pace, self._credit_s = pace, credit_s
        self._n_waiting: Counter[str] = Counter()  # requests
        self._least = 0.0  # counter of those that wait, or that waited last
        self._now = 0.0  # the largest counter with which anybody was admitted
        self._visited = 0.0  # until that is larger, somebody within his share is about

    def arrive(self, request: Request) -> None:
        """It waits from now on."""
        tenant = request.share.tenant
        if self._lift(tenant):
            self._visited = self._now + self._credit_s
        self._n_waiting[tenant] += 1
        self._least = min(self.counters[t] for t in self._n_waiting)

    def leave(self, request: Request) -> None:
        """It waits no more."""
        tenant = request.share.tenant
        self._n_waiting[tenant] -= 1
        if not self._n_waiting[tenant]:
            del self._n_waiting[tenant]
            self._least = min((self.counters[t] for t in self._n_waiting), default=self.counters[tenant])

    def admitted(self, seq: LiveSequence) -> None:
        """It has room: what is to be computed of it here is its tenant's."""
        tenant = seq.request.share.tenant
        self._lift(tenant)
        self._now = max(self._now, self.counters[tenant])
        self._charge(seq, self._pace.seconds(*seq.rest))

    def decoded(self, batch: StepBatch, seconds: float) -> None:
        """A batch took this long: each of its tokens as much of it as any other."""
        if len(self.counters) > 1 and batch.n_decodes:
            for item in batch.work[: batch.n_decodes]:
                self._charge(item.seq, seconds * item.count / batch.n_items)

    def time_for(self, seq: LiveSequence, left_s: float, batch_s: float) -> float:
        """How much longer a batch of `batch_s` may get by this one, of the `left_s` that are left of it."""
        if self._yields(self.counters[seq.request.share.tenant]):
            return max(0.0, min(left_s, LEFT_OVER_S - batch_s))
        return left_s

    @property
    def turn_of(self) -> Callable[[LiveSequence], Any]:
        """The key by which the first ones of all tenants, and the requests of one, are ordered: with one tenant, the
        rank."""
        return self._turn_of if len(self.counters) > 1 else rank_of

    def _turn_of(self, seq: LiveSequence) -> FairTurn:
        return self._turn(self.counters[seq.request.share.tenant], seq)

    def _turn(self, counter: float, seq: LiveSequence) -> FairTurn:
        return self._excess(counter), self._yields(counter), seq.rank

    def in_turn(self, queues: Mapping[str, Iterable[LiveSequence]]) -> Iterator[LiveSequence]:
        """Those who wait, by tenant in the order of their ranks, as they go if each one that is yielded is admitted."""
        queued = {tenant: iter(queue) for tenant, queue in queues.items()}
        heads = [(*self._turn_of(s), t, self.counters[t], s) for t, q in queued.items() if (s := next(q, None))]
        heapq.heapify(heads)
        while heads:
            *_, tenant, counter, seq = heads[0]
            yield seq
            counter += self._pace.seconds(*seq.rest) / seq.request.share.weight
            if (after := next(queued[tenant], None)) is None:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, (*self._turn(counter, after), tenant, counter, after))

    def offers(self, waiting: list[tuple[Stage, Handoff]]) -> list[tuple[Stage, Handoff]]:
        """Offers in the order of their ranks, as their tenants go. `turn_of` orders requests that wait here likewise:
        of two that want the same room, each could else wait for the other."""
        tenants = {handoff.request.share.tenant for _, handoff in waiting}
        for tenant in tenants:
            self._lift(tenant)
        if len(tenants) < 2:
            return waiting

        def turn_of(pair: tuple[Stage, Handoff]) -> tuple[float, bool]:
            counter = self.counters[pair[1].request.share.tenant]
            return self._excess(counter), self._yields(counter)

        return sorted(waiting, key=turn_of)

    def _lift(self, tenant: str) -> bool:
        """Who does not wait saves up no more than the credit. Whether he would have."""
        before, least = self.counters.setdefault(tenant, 0.0), self._now - self._credit_s
        if tenant in self._n_waiting or before >= least:
            return False
        self.counters[tenant] = least
        return True

    def _charge(self, seq: LiveSequence, seconds: float) -> None:
        share = seq.request.share
        self.counters[share.tenant] += seconds / share.weight
        if share.tenant in self._n_waiting:
            self._least = min(self.counters[t] for t in self._n_waiting)

    def _excess(self, counter: float) -> float:
        return max(0.0, counter - self._least - self._credit_s / 2)

    def _yields(self, counter: float) -> bool:
        """Whether a tenant has had more than others that come and go."""
        return self._now < self._visited and counter > self._now - self._credit_s / 2
