"""The seconds of work that wait for the first token, estimated from the rate at which work lately left the queue."""

from __future__ import annotations

import math

from hydrainfer.core import Share
from hydrainfer.core.request import ANYBODY

_CROWD = 4
"""The rate is measured only while at least this many requests wait: with fewer, the server may be idle in between. With
fewer, no request is refused, either; otherwise a rate measured in a slow time could never be measured again. The last
requests of a crowd still count if that makes the rate higher, since several may get their first tokens at once."""
_MEMORY_S, _MEMORY_N = 2.0, 16
"""The rate is measured over the latest crowded seconds, or over the latest requests if these take longer."""
_STEADY_S = 15.0
"""The seconds over which the steady rate is measured: a machine that is shared varies in speed."""
_HINT_S = 0.25
"""The measured time that still counts when a new crowd gathers: small crowds find room at once and seem fast."""
_PACE = 0.6
"""Turns are promised for this part of the measured rate. The rest is for requests that were not told to come. A flood
is served more slowly than the requests before it, and most of its promises are made in its first seconds."""
_EASED = 0.25
"""Below this part of the longest queue, promises are void: the requests that were promised a turn have not come."""
_RESERVED, _RESERVED_S = 0.5, 2.0
"""The part of the longest queue that is kept free for returning requests, and its minimum in seconds (which is never
more than half the queue). `Retry-After` has whole seconds, so requests return in batches of a second's work."""
LATEST_TURN_S = 600.0
"""No turn is promised later than this."""
UNKNOWN_S = 1.0
"""No turn is promised sooner than this while nothing is known about how fast requests are served."""


class Turns:
    """The turns of refused requests: one after the other, so that they do not come back all at once."""

    def __init__(self) -> None:
        self.latest_s = 0.0

    def promise(self, now: float, each_s: float, soonest_s: float = 0.0) -> float:
        """The seconds until the next turn, which comes after all earlier ones. `each_s`: how long the server takes for
        the request; `soonest_s`: from now, when the first turn can begin."""
        self.latest_s = max(self.latest_s, now + soonest_s) + each_s / _PACE
        wait_s = self.latest_s - now
        if wait_s > LATEST_TURN_S:  # spread over the last half
            wait_s = LATEST_TURN_S / 2 + wait_s % (LATEST_TURN_S / 2)
        return wait_s


class Queue:
    """Work of one kind between its arrival and its first token. `longest_s`: the most seconds of work that may wait.

    The rate is the number of units that got their first token, per second in which there was a crowd; it covers the
    whole way, whatever the bottleneck is. Refused requests are promised turns one after the other, so that they do not
    come back all at once. Times are seconds of one clock, passed in. Every method takes constant time."""

    def __init__(self, longest_s: float) -> None:
        self.longest_s = longest_s
        self._reserve_s = max(_RESERVED * longest_s, min(_RESERVED_S, longest_s / 2))
        self.n_waiting = 0
        self._n_last, self._last_s = 0, 0.0  # requests left of a crowd, and seconds since its latest first token
        self.units = 0.0
        self._tenants: dict[str, list[float]] = {}  # by tenant that waits: its units, requests and weight
        self._crowded_s = self._done = self._n_done = 0.0  # lately: crowded seconds, units and requests done in them
        self._open_s = self._still_s = 0.0  # crowded seconds since one was done; since one was done or answered
        self._answered = False  # since one was done
        self._steady_s = self._steady = 0.0  # for the steady rate: crowded seconds, units done in them
        self._at_s = 0.0
        self._turns = Turns()

    @property
    def crowded(self) -> bool:
        """Whether enough requests wait for their rate to be measured."""
        return self.n_waiting >= _CROWD

    def enter(self, units: float, now: float, share: Share = ANYBODY) -> None:
        self._pass(now)
        self.n_waiting += 1
        if self.n_waiting == _CROWD:
            self._forget((self._crowded_s + self._still_s) / _HINT_S)
            self._n_last = 0
        self.units += units
        mine = self._tenants.setdefault(share.tenant, [0.0, 0, share.weight])
        mine[0], mine[1] = mine[0] + units, mine[1] + 1

    def correct(self, by: float, share: Share = ANYBODY) -> None:
        """Add `by` to the waiting units, since their estimate has changed."""
        self.units += by
        if share.tenant in self._tenants:
            self._tenants[share.tenant][0] += by

    def leave(
        self,
        units: float,
        now: float,
        share: Share = ANYBODY,
        *,
        done: bool,
        answered: bool = False,
        waited_s: float = math.inf,
    ) -> None:
        """Remove a request that waited for `waited_s`. `done`: it has its first token; otherwise it has ended without
        one. `answered`: with an error of its own. Such requests show that nothing stands still, but not how fast others
        are: the time in which there may have been only such requests does not count."""
        self._pass(now)
        if done and (self.crowded or (self._n_last and self._done)):
            if self._answered:
                self._open_s = min(self._open_s, waited_s)
            self._count(self._open_s)
            self._open_s = self._still_s = 0.0
            self._answered = False
            self._count(min(self._last_s, units * self.pace()) if self._n_last else 0.0)
            self._last_s = 0.0
            self._done += units
            self._n_done += 1
            self._steady += units
            self._forget(min(self._crowded_s / _MEMORY_S, self._n_done / _MEMORY_N))
        elif answered:
            self._still_s, self._answered = 0.0, True
        if self.n_waiting == _CROWD:
            self._n_last, self._last_s = _CROWD, 0.0
        self._n_last = max(self._n_last - 1, 0)
        self.n_waiting -= 1
        self.units = self.units - units if self.n_waiting else 0.0
        mine = self._tenants[share.tenant]
        mine[0], mine[1] = mine[0] - units, mine[1] - 1
        if not mine[1]:
            del self._tenants[share.tenant]

    def seconds(self, now: float) -> float:
        """The seconds until all that waits now has its first token; 0 while nothing is known."""
        self._pass(now)
        if self._done:
            return self.units * self.pace()
        return self._still_s if self.crowded else 0.0

    def pace(self) -> float:
        """The measured seconds per unit; 0 while nothing is known."""
        return (self._crowded_s + self._still_s) / self._done if self._done else 0.0

    def has_room(self, now: float, share: Share = ANYBODY, *, favoured: bool) -> bool:
        """Whether one more request may enter, by the present or the steady rate, whichever is lower. While turns are
        promised, a part of the queue is kept for `favoured` requests, which are returning or urgent; for them the
        higher rate counts. There is always room below a crowd, and for a tenant that has less than its share of the
        queue."""
        seconds = self.seconds(now)
        if seconds < _EASED * self.longest_s:
            self._turns.latest_s = 0.0
        promised = self._turns.latest_s > now
        most_s = self.longest_s - (self._reserve_s if promised and not favoured else 0.0)
        if self._steady:  # the first tokens of a new crowd come quickly: nobody decodes yet
            seconds = (min if promised and favoured else max)(seconds, self._steady_seconds())
        within_share = self._seconds_of(share, seconds) < most_s * self._part_of(share)
        return not self.crowded or seconds < most_s or within_share

    def promise(self, now: float) -> float:
        """The seconds until the turn of a request that is refused now."""
        if not self._n_done:
            each_s = self._still_s / max(self.n_waiting, 1)  # as `seconds`: all take as long as they have waited
            return max(self._turns.promise(now, each_s), UNKNOWN_S)
        each_s = (self._crowded_s + self._still_s) / self._n_done
        return self._turns.promise(now, each_s, self._excess_s(now))

    def _excess_s(self, now: float) -> float:
        """The seconds of work beyond `longest_s`, by the rate that counts for returning requests."""
        seconds = self.seconds(now)
        if self._steady:
            seconds = min(seconds, self._steady_seconds())
        return max(seconds - self.longest_s, 0.0)

    def _steady_seconds(self) -> float:
        """As `seconds`, by the steady rate."""
        return self.units * (self._steady_s + self._still_s) / self._steady

    def _seconds_of(self, share: Share, seconds: float) -> float:
        """The part of the waiting `seconds` that is this tenant's."""
        mine = self._tenants.get(share.tenant)
        return seconds * mine[0] / self.units if mine is not None and self.units > 0.0 else 0.0

    def _part_of(self, share: Share) -> float:
        """The tenant's share of the queue among the tenants that wait; 0 if no other waits."""
        others = sum(weight for tenant, (_, _, weight) in self._tenants.items() if tenant != share.tenant)
        return share.weight / (share.weight + others) if others else 0.0

    def _forget(self, excess: float) -> None:
        if excess > 1.0:
            self._done, self._n_done = self._done / excess, self._n_done / excess
            self._crowded_s, self._open_s, self._still_s = (
                seconds / excess for seconds in (self._crowded_s, self._open_s, self._still_s)
            )

    def _pass(self, now: float) -> None:
        passed_s = max(now - self._at_s, 0.0)
        if self.crowded:
            self._open_s += passed_s
            self._still_s += passed_s
        elif self._n_last:
            self._last_s += passed_s
        self._at_s = now

    def _count(self, seconds: float) -> None:
        """Add to the crowded time."""
        self._crowded_s += seconds
        self._steady_s += seconds
        if self._steady_s > _STEADY_S:
            self._steady *= _STEADY_S / self._steady_s
            self._steady_s = _STEADY_S
