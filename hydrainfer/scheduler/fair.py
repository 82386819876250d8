"""A fair share of an instance for each tenant: a tenant that has had much more than others that wait goes after them.

A counter per tenant holds the seconds of work that its requests were admitted with, and what their decoding has taken
since, divided by its weight (virtual token counters, arXiv 2401.00588). Among the tenants that wait, those within half
of the credit of the smallest counter go by rank, as if they were one. The others go after them, the smallest counter
first. So tenants within their shares still go by rank, and a tenant that floods the instance gets what they leave, but
never less than its share: the counters of two tenants that wait all the time differ by no more than the credit and the
work of their largest requests. After a pause, a tenant's counter is lifted to the credit below the others: nobody saves
up more.

A tenant within its share comes now and then. It waits for the running batch, and for what fills its own batch up. So
while there are such tenants, one that has had more adds to a batch only up to `LEFT_OVER_S`, and goes after the others:
if the batch ends because it may be filled no further, nobody was left out.
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
"""The most that a batch may take to which a tenant adds that has had more than others that come and go."""
FairTurn = tuple[bool, float, bool, tuple[float, float, int]]
"""Whether the tenant has all places that it may have, its excess, whether it goes after tenants that come now and then,
and the rank; the smallest goes first."""
rank_of: Callable[[LiveSequence], tuple[float, float, int]] = attrgetter("rank")


class Fair:
    """The counters of one instance, by tenant. With one tenant they change nothing. `credit_s`: in seconds of work."""

    def __init__(self, pace: Pace, credit_s: float) -> None:
        self.counters: dict[str, float] = {}
        self._pace, self._credit_s = pace, credit_s
        self._n_waiting: Counter[str] = Counter()  # requests
        self._least = 0.0  # the smallest counter of those that wait, or waited last
        self._now = 0.0  # the largest counter at an admission
        self._visited = 0.0  # while `_now` is smaller, a tenant within its share is about
        self._offered: Counter[str] = Counter()  # requests that peers offer
        self.weights: dict[str, float] = {}
        self.full: set[str] = set()  # tenants that have all places that they may have (`Places`)

    @property
    def waiting(self) -> Counter[str]:
        """The number of requests that wait here, or to come here, by tenant."""
        return self._n_waiting + self._offered

    def yields(self, tenant: str) -> bool:
        """Whether a tenant has had more than others that come and go."""
        return self._yields(self.counters[tenant])

    def arrive(self, request: Request) -> None:
        """Note that a request waits from now on."""
        tenant = request.share.tenant
        self.weights[tenant] = request.share.weight
        if self._lift(tenant):
            self._visited = self._now + self._credit_s
        self._n_waiting[tenant] += 1
        self._least = min(self.counters[t] for t in self._n_waiting)

    def leave(self, request: Request) -> None:
        """Note that a request waits no more."""
        tenant = request.share.tenant
        self._n_waiting[tenant] -= 1
        if not self._n_waiting[tenant]:
            del self._n_waiting[tenant]
            self._least = min((self.counters[t] for t in self._n_waiting), default=self.counters[tenant])

    def admitted(self, seq: LiveSequence) -> None:
        """Charge the tenant for what is to be computed here of an admitted sequence."""
        tenant = seq.request.share.tenant
        self.weights[tenant] = seq.request.share.weight
        self._lift(tenant)
        self._now = max(self._now, self.counters[tenant])
        self._charge(seq, self._pace.seconds(*seq.rest))

    def decoded(self, batch: StepBatch, seconds: float) -> None:
        """Charge decodes for a batch that took this long. Each of its tokens counts the same."""
        if len(self.counters) > 1 and batch.n_decodes:
            for item in batch.work[: batch.n_decodes]:
                self._charge(item.seq, seconds * item.count / batch.n_items)

    def time_for(self, seq: LiveSequence, left_s: float, batch_s: float) -> float:
        """How many of the `left_s` seconds that are left of a batch, which takes `batch_s` so far, this sequence may
        use."""
        if self._yields(self.counters[seq.request.share.tenant]):
            return max(0.0, min(left_s, LEFT_OVER_S - batch_s))
        return left_s

    @property
    def turn_of(self) -> Callable[[LiveSequence], Any]:
        """The key that orders the requests of one tenant and the first ones of all tenants. With one tenant it is the
        rank."""
        return self._turn_of if len(self.counters) > 1 else rank_of

    def _turn_of(self, seq: LiveSequence) -> FairTurn:
        return self._turn(self.counters[seq.request.share.tenant], seq)

    def _turn(self, counter: float, seq: LiveSequence) -> FairTurn:
        return seq.request.share.tenant in self.full, self._excess(counter), self._yields(counter), seq.rank

    def in_turn(self, queues: Mapping[str, Iterable[LiveSequence]]) -> Iterator[LiveSequence]:
        """The waiting sequences in the order they go, if each one is admitted. `queues`: by tenant, sorted by rank."""
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
        """Offers, given by rank, in the order of their tenants. `turn_of` orders requests that wait here in the same
        way: otherwise, of two that want the same room, each could wait for the other."""
        self._offered = Counter(handoff.request.share.tenant for _, handoff in waiting)
        self.weights |= {handoff.request.share.tenant: handoff.request.share.weight for _, handoff in waiting}
        for tenant in self._offered:
            self._lift(tenant)
        if len(self._offered) < 2:
            return waiting

        def turn_of(pair: tuple[Stage, Handoff]) -> tuple[bool, float, bool]:
            tenant = pair[1].request.share.tenant
            counter = self.counters[tenant]
            return tenant in self.full, self._excess(counter), self._yields(counter)

        return sorted(waiting, key=turn_of)

    def _lift(self, tenant: str) -> bool:
        """Lift the counter of a tenant that does not wait, so that it saves up no more than the credit. Returns whether
        that changed it."""
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
        """Whether a tenant with this counter has had more than others that come and go."""
        return self._now < self._visited and counter > self._now - self._credit_s / 2
