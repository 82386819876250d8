"""The order of preparation: a request waits unprepared until an instance can soon use it.

    claimed ── join ──> waits, by tenant and rank ── go ──> ahead: prepared, queued ── leave: first token, or the end

Preparation (templates, tokens, pixels) takes cores that the instances compute with, and its results take memory. So
only requests that are likely to have their first token within `_AHEAD_S` are prepared, and a few more, so that their
rate can be measured. The rank is that of the scheduler (`rank_s`), and a request waits only for those of
better rank: a short prompt that would pass a long one at the instance also passes it here. Each tenant has its share of
the requests that are ahead.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable
from itertools import count

from hydrainfer.core import Share
from hydrainfer.scheduler import Policy, rank_s
from hydrainfer.server.door.queues import Queue

_AHEAD_S = 1.0
_PER_EVENT = 4  # requests that go at once, at most: each is a few milliseconds of work
_TENANTS_PER_EVENT = 8


class PreparationPlace:
    """The place of one request in a line. `key`: its rank, then a counter that orders equal ranks by arrival. `ahead`:
    it has been let go."""

    __slots__ = ("ahead", "go", "key", "share", "units")

    def __init__(self, share: Share, key: tuple[float, int], units: float, go: Callable[[], None]) -> None:
        self.share, self.key, self.units, self.go = share, key, units, go
        self.ahead = False


class _TenantPlaces:
    """The places of one tenant, by rank."""

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.waiting: list[PreparationPlace] = []
        self.ahead: list[PreparationPlace] = []


def _key(turn: PreparationPlace) -> tuple[float, int]:
    return turn.key


class PreparationOrder:
    """The line of one kind of work. `queue`: the queue that counts this work and measures its rate. `n_least`: the
    number of requests that are ahead however slow they are. Used on one thread. The time of a call is at most
    proportional to the number of requests that are ahead."""

    def __init__(self, queue: Queue, n_least: int, policy: Policy) -> None:
        self.n_waiting = self.n_ahead = 0
        self._queue, self._n_least = queue, n_least
        self._policy = policy
        self._tenants: OrderedDict[str, _TenantPlaces] = OrderedDict()  # tenants with places here
        self._weights = 0.0
        self._ages = count()

    def join(
        self, share: Share, arrival_s: float, units: float, priority: int, go: Callable[[], None]
    ) -> PreparationPlace:
        """Wait until `go` is called, which may be at once. The caller calls `leave` in either case."""
        tenant = self._tenants.get(share.tenant)
        if tenant is None:
            tenant = self._tenants[share.tenant] = _TenantPlaces(share.weight)
            self._weights += share.weight
        rank = rank_s(self._policy, arrival_s, units * self._queue.pace(), priority)
        turn = PreparationPlace(share, (rank, next(self._ages)), units, go)
        insort(tenant.waiting, turn, key=_key)
        self.n_waiting += 1
        self._advance(share.tenant)
        return turn

    def leave(self, turn: PreparationPlace) -> None:
        """Note that a request has its first token or has ended. Others may go."""
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
        """Check the counts and, with `idle`, that the line is empty. Raises `AssertionError`."""
        tenants = self._tenants.values()
        assert self.n_waiting == sum(len(t.waiting) for t in tenants)
        assert self.n_ahead == sum(len(t.ahead) for t in tenants)
        assert not (self.n_waiting and not self.n_ahead), "those who wait are forgotten"
        assert not (idle and self._tenants), f"{self.n_waiting} wait, {self.n_ahead} are ahead"

    def _advance(self, first: str) -> None:
        """Let a few requests go: those of the tenant `first`, then those of some others in turn, so that no tenant is
        forgotten. A tenant with no request ahead never waits, so there is always one that will leave."""
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

    def _may_go(self, tenant: _TenantPlaces) -> bool:
        """Whether the tenant's first waiting request may go: of the tenant's requests that are ahead, those of better
        rank take less than its share of `_AHEAD_S`, or are fewer than its share of `n_least`."""
        part, n = tenant.weight / self._weights, bisect_left(tenant.ahead, tenant.waiting[0].key, key=_key)
        if n < max(1.0, self._n_least * part):
            return True
        pace = self._queue.pace()
        return 0.0 < sum(turn.units for turn in tenant.ahead[:n]) * pace < _AHEAD_S * part
