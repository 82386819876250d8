"""The order of preparation: what waits is kept as its client wrote it until an instance can soon use it.

    claimed ── join ──> waits, by tenant and rank ── go ──> ahead: prepared, queued ── leave: first token, or the end

Preparing (templates, tokens, pixels) takes the cores that the instances compute with, and what it makes takes memory.
So no more is prepared than is likely to have its first token within `_AHEAD_S`, and a few more to measure by. The rank
is that of the scheduler (`scheduler/order.py`), and only what goes before a request by rank keeps it waiting: a short
prompt that would pass a long one at the instance passes it here. Each tenant has its part of what is ahead.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable
from itertools import count

from hydrainfer.core import Share
from hydrainfer.scheduler import Policy
from hydrainfer.server.queues import Queue

_AHEAD_S = 1.0
_PER_EVENT = 4  # at most so many go at once: each is a few milliseconds of work
_TENANTS_PER_EVENT = 8


class LinePlace:
    """One request's place in a line. `key`: its rank, and its age by which equals are told apart."""

    __slots__ = ("ahead", "go", "key", "share", "units")

    def __init__(self, share: Share, key: tuple[float, int], units: float, go: Callable[[], None]) -> None:
        self.share, self.key, self.units, self.go = share, key, units, go
        self.ahead = False


class _TenantLine:
    """Turns by rank."""

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.waiting: list[LinePlace] = []
        self.ahead: list[LinePlace] = []


def _key(turn: LinePlace) -> tuple[float, int]:
    return turn.key


class PreparationLine:
    """Those of one kind. `queue`: where their work is counted, which knows how fast it goes. `n_least`: so many are
    ahead however slow they are. Everything on one thread; a call takes the time of what is ahead, at most."""

    def __init__(self, queue: Queue, n_least: int, policy: Policy) -> None:
        self.n_waiting = self.n_ahead = 0
        self._queue, self._n_least = queue, n_least
        self._ageing = policy.ageing if policy.order == "rank" else math.inf
        self._boost_s = policy.boost_s if policy.order == "rank" else 0.0
        self._tenants: OrderedDict[str, _TenantLine] = OrderedDict()  # those that have turns here
        self._weights = 0.0
        self._ages = count()

    def join(self, share: Share, arrival_s: float, units: float, priority: int, go: Callable[[], None]) -> LinePlace:
        """Wait until `go` is called, which may be at once. It leaves in either case."""
        tenant = self._tenants.get(share.tenant)
        if tenant is None:
            tenant = self._tenants[share.tenant] = _TenantLine(share.weight)
            self._weights += share.weight
        rank = arrival_s + units * self._queue.pace() / self._ageing - self._boost_s * priority
        turn = LinePlace(share, (rank, next(self._ages)), units, go)
        insort(tenant.waiting, turn, key=_key)
        self.n_waiting += 1
        self._advance(share.tenant)
        return turn

    def leave(self, turn: LinePlace) -> None:
        """It has its first token, or is over; others may go."""
        tenant = self._tenants[turn.share.tenant]
        turns = tenant.ahead if turn.ahead else tenant.waiting
        del turns[bisect_left(turns, turn.key, key=_key)]
        self.n_ahead -= turn.ahead
        self.n_waiting -= not turn.ahead
        self._advance(turn.share.tenant)
        if not tenant.ahead and not tenant.waiting:
            del self._tenants[turn.share.tenant]
            self._weights -= tenant.weight

    def check(self, idle: bool = False) -> None:
        """The counts are right; with `idle` nobody is here. Raises `AssertionError`."""
        tenants = self._tenants.values()
        assert self.n_waiting == sum(len(t.waiting) for t in tenants)
        assert self.n_ahead == sum(len(t.ahead) for t in tenants)
        assert not (self.n_waiting and not self.n_ahead), "those who wait are forgotten"
        assert not (idle and self._tenants), f"{self.n_waiting} wait, {self.n_ahead} are ahead"

    def _advance(self, first: str) -> None:
        """Let a few go: of the tenant `first`, then of some others in turn, so that each is looked at again and
        again. A tenant of which nothing is ahead never waits, so there is always somebody who will leave."""
        left = _PER_EVENT
        self._tenants.move_to_end(first, last=False)
        for _ in range(min(len(self._tenants), _TENANTS_PER_EVENT)):
            tenant = next(iter(self._tenants.values()))
            self._tenants.move_to_end(next(iter(self._tenants)))
            while left and tenant.waiting and self._may_go(tenant):
                turn = tenant.waiting.pop(0)
                insort(tenant.ahead, turn, key=_key)
                turn.ahead = True
                self.n_waiting -= 1
                self.n_ahead += 1
                left -= 1
                turn.go()

    def _may_go(self, tenant: _TenantLine) -> bool:
        """Whether the first that waits of this tenant may: little of its part of what is ahead goes before it."""
        part, n = tenant.weight / self._weights, bisect_left(tenant.ahead, tenant.waiting[0].key, key=_key)
        if n < max(1.0, self._n_least * part):
            return True
        pace = self._queue.pace()
        return 0.0 < sum(turn.units for turn in tenant.ahead[:n]) * pace < _AHEAD_S * part
