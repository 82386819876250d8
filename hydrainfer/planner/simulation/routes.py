"""Several clusters on the virtual clock: routes between them that copies share, and the choice of the one that
prefills."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from hydrainfer.cluster.offload import SHORT_LOOP_S, Balance, LinkState, Offload, offloaded
from hydrainfer.cluster.roster import Roster
from hydrainfer.core import Request, Role, Stage
from hydrainfer.planner.nouns import Link, Route

_MEMORY_S = 5.0  # of the share of a route that is in use


class Timer(NamedTuple):
    """`clock()`: the virtual time; `at(time_s, call)`: calls later."""

    clock: Callable[[], float]
    at: Callable[[float, Callable[[], None]], None]


class RoutedCopy:
    """A copy over a route. When it is done is not known before, as others may join it."""

    cut, wait_for = False, None

    __slots__ = ("_landed", "is_done")

    def __init__(self, landed: Callable[[], None]) -> None:
        self.is_done = False
        self._landed = landed

    def poll(self, now: float) -> bool | None:  # noqa: ARG002 - told by `done`
        return True if self.is_done else None

    def ready_at(self) -> float | None:
        return None

    def done(self) -> None:
        """The last byte has arrived."""
        self.is_done = True
        self._landed()


class SharedRoute:
    """One direction between two clusters: all copies on it get the same rate, at most that of an instance's link."""

    def __init__(self, route: Route, link: Link, timer: Timer) -> None:
        self.route = route
        self.sent_bytes = 0.0
        self._most_per_s = link.bytes_per_s
        self._timer = timer
        self._copies: list[tuple[float, int, RoutedCopy]] = []  # by the value of `_each_bytes` at which it is done
        self._n_begun = 0
        self._each_bytes = 0.0  # that a copy which began at 0 would have got
        self._each_per_s = 0.0
        self._rate = route.rates[0][1]
        self._queued_bytes = 0.0
        self._share = 0.0
        self._updated_s = 0.0
        self._n_plans = 0
        for at_s, rate in route.rates[1:]:
            timer.at(at_s, lambda rate=rate: self._change(rate))  # type: ignore[misc]

    def begin(self, n_bytes: float, landed: Callable[[], None]) -> RoutedCopy:
        """Begin a copy now; `landed` is called when it is done."""
        self._advance()
        copy = RoutedCopy(landed)
        self._n_begun += 1
        self._queued_bytes += n_bytes
        heapq.heappush(self._copies, (self._each_bytes + n_bytes, self._n_begun, copy))
        self._plan()
        return copy

    def state(self) -> LinkState:
        self._advance()
        return LinkState(self._rate, self._share, self._queued_bytes, self.route.latency_s)

    def _change(self, rate: float) -> None:
        self._advance()
        self._rate = rate
        self._plan()

    def _advance(self) -> None:
        """Count what was copied since the last call."""
        now = self._timer.clock()
        seconds = now - self._updated_s
        if seconds <= 0.0:
            return
        self._updated_s = now
        self._each_bytes += self._each_per_s * seconds
        sent_bytes = min(self._queued_bytes, len(self._copies) * self._each_per_s * seconds)
        self.sent_bytes += sent_bytes
        self._queued_bytes -= sent_bytes
        self._share += (sent_bytes / seconds / self._rate - self._share) * -math.expm1(-seconds / _MEMORY_S)

    def _plan(self) -> None:
        """Share the rate anew, and wake up when the first copy is done."""
        self._n_plans += 1
        if not self._copies:
            self._each_per_s = self._queued_bytes = 0.0
            return
        self._each_per_s = min(self._most_per_s, self._rate / len(self._copies))
        n_left = max(0.0, self._copies[0][0] - self._each_bytes)
        n_plans = self._n_plans
        self._timer.at(self._timer.clock() + n_left / self._each_per_s, lambda: self._land(n_plans))

    def _land(self, n_plans: int) -> None:
        if n_plans != self._n_plans:
            return  # a copy has joined or the rate has changed since
        self._advance()
        self._each_bytes = max(self._each_bytes, self._copies[0][0])  # it is due, but a late clock has coarse steps
        arrives_s = self._timer.clock() + self.route.latency_s
        while self._copies and self._copies[0][0] <= self._each_bytes:
            self._timer.at(arrives_s, heapq.heappop(self._copies)[2].done)
        self._plan()


class Clusters:
    """The clusters of a deployment. `of`: that of each instance, by name; `home`: the one with the server. Without
    routes, all is one cluster. `n_places`: sequences that an instance decodes at a time."""

    def __init__(
        self,
        of: Mapping[str, str],
        home: str,
        routes: Iterable[Route],
        offload: Offload | None,
        link: Link,
        timer: Timer,
        n_places: int = 1,
    ) -> None:
        self.of = of
        self.home = home
        self.offload = offload
        self.thresholds: list[tuple[float, dict[str, float]]] = []  # when they changed
        self.n_placed = Counter[str]()  # by the cluster that prefills
        self.advice: list[tuple[float, Role]] = []  # of which role home should have had more
        self._link = link
        self._routes = {(r.source, r.target): SharedRoute(r, link, timer) for r in routes}
        self._observe_at = 0.0
        self._balance = Balance(home, n_places)

    def message_s(self, source: str, target: str) -> float:
        """Seconds of a message from one instance to another; "" is the server."""
        if not self._routes:
            return self._link.message_s
        one, other = self._cluster(source), self._cluster(target)
        if one == other:
            return self._link.message_s
        route = self._routes.get((one, other)) or self._routes.get((other, one))
        assert route is not None, f"no route between {one} and {other}"
        return self._link.message_s + route.route.latency_s

    def between(self, source: str, target: str) -> SharedRoute | None:
        """The route for a copy from one instance, or the server (""), to another; None inside a cluster."""
        one, other = self._cluster(source), self._cluster(target)
        if one == other:
            return None
        return self._routes[one, other]

    def _cluster(self, name: str) -> str:
        return self.of[name] if name else self.home

    def observe(self, now: float, roster: Roster, n_done: int) -> None:
        """Called at every heartbeat. `n_done`: the requests that have ended."""
        if self.offload is None or now < self._observe_at:
            return
        self._observe_at = now + SHORT_LOOP_S
        states = {source: route.state() for (source, target), route in self._routes.items() if target == self.home}
        names = roster.in_cluster(self.home, roster.running(Stage.PREFILL))
        home_s = min((roster.busy[name].delay_s for name in names), default=math.inf)
        self.offload.observe(now, states, home_s)
        thresholds = {name: self.offload.threshold(name) for name in states}
        if not self.thresholds or self.thresholds[-1][1] != thresholds:
            self.thresholds.append((now, thresholds))
        n_home = self.n_placed[self.home]
        role = self._balance.observe(now, roster, self.n_placed.total() - n_home, n_home, n_done)
        if role is not None:
            self.advice.append((now, role))

    def placed(self, request: Request, roster: Roster) -> tuple[Request, set[str]]:
        """See `offload.offloaded`; the request itself, and nobody, if there is no choice."""
        if self.offload is None:
            return request, set()
        placed, elsewhere = offloaded(request, roster, self.offload)
        self.n_placed[placed.prefill_cluster] += 1
        return placed, elsewhere

    def sent_bytes(self, source: str, target: str) -> float:
        """Bytes that have crossed a route so far."""
        route = self._routes[source, target]
        route.state()
        return route.sent_bytes
