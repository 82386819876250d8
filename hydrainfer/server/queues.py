"""The seconds of work that wait for their first token, by how fast such work has lately left the queue."""

from __future__ import annotations

from hydrainfer.core import Share
from hydrainfer.core.request import ANYBODY

_CROWD = 4
"""With fewer requests before their first token nobody knows how fast they could be: they are not measured. So they are
not refused, either: what was measured of a slow time could otherwise never be measured again. But the last ones of a
crowd count where that makes it faster, for several may get their first tokens at once."""
_MEMORY_S, _MEMORY_N = 2.0, 16
"""A rate is that of the latest crowded seconds, or of the latest requests if so many take longer."""
_STEADY_S = 15.0
"""The memory of the rate by which promises are kept: a machine that others use, too, is faster now and slower then."""
_HINT_S = 0.25
"""How much of the measured time still counts when a new crowd gathers: small crowds find room at once and seem fast."""
_PACE = 0.6
"""Turns are promised for this part of the measured rate; the rest is for those whom nobody told to come. A flood is
answered more slowly than what was measured before it, and most of its promises are made in its first seconds."""
_EASED = 0.25
"""A queue shorter than this part of the longest: who was promised a turn has not come, and the promises are void."""
_RESERVED, _RESERVED_S = 0.5, 2.0
"""The part of the longest queue that is kept free for those who return, and the least of it in seconds (but never more
than half the queue). `Retry-After` has whole seconds, so they return a second's work at a time."""
LATEST_TURN_S = 600.0
"""No turn is promised later than this."""


class Queue:
    """Work of one kind between its arrival and its first token. `longest_s`: beyond it no more is taken in.

    The rate is that of the whole way, whatever is narrow on it: units that got their first token per second in which
    there was a crowd. What is promised to those who are refused are turns one after the other, so that they do not come
    back at once. Times are seconds of one clock, passed in; every method takes constant time."""

    def __init__(self, longest_s: float) -> None:
        self.longest_s = longest_s
        self._reserve_s = max(_RESERVED * longest_s, min(_RESERVED_S, longest_s / 2))
        self.n_waiting = 0
        self._n_last, self._last_s = 0, 0.0  # of what is left of a crowd: how many, and since its latest first token
        self.units = 0.0
        self._tenants: dict[str, list[float]] = {}  # of those that wait: units, requests, weight
        self._crowded_s = self._done = self._n_done = 0.0  # of that memory
        self._steady_s = self._steady = 0.0  # crowded seconds of the longer memory, and units
        self._at_s = 0.0
        self._turn_s = 0.0

    @property
    def crowded(self) -> bool:
        """Whether so many wait that a rate can be told of them."""
        return self.n_waiting >= _CROWD

    def enter(self, units: float, now: float, share: Share = ANYBODY) -> None:
        self._pass(now)
        self.n_waiting += 1
        if self.n_waiting == _CROWD:
            self._forget(self._crowded_s / _HINT_S)
            self._n_last = 0
        self.units += units
        mine = self._tenants.setdefault(share.tenant, [0.0, 0, share.weight])
        mine[0], mine[1] = mine[0] + units, mine[1] + 1

    def correct(self, by: float, share: Share = ANYBODY) -> None:
        """Add to the units that wait: they are known better now."""
        self.units += by
        if share.tenant in self._tenants:
            self._tenants[share.tenant][0] += by

    def leave(self, units: float, now: float, share: Share = ANYBODY, *, done: bool) -> None:
        """`done`: by its first token; else it was ended."""
        self._pass(now)
        if done and (self.crowded or (self._n_last and self._done)):
            self._count(min(self._last_s, units * self.pace()) if self._n_last else 0.0)
            self._last_s = 0.0
            self._done += units
            self._n_done += 1
            self._steady += units
            self._forget(min(self._crowded_s / _MEMORY_S, self._n_done / _MEMORY_N))
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
        """The time until what waits now has its first token; 0 while nothing is known."""
        self._pass(now)
        if self._done:
            return self.units * self.pace()
        return self._crowded_s if self.crowded else 0.0

    def pace(self) -> float:
        """The measured seconds per unit; 0 while nothing is known."""
        return self._crowded_s / self._done if self._done else 0.0

    def has_room(self, now: float, share: Share = ANYBODY, *, favoured: bool) -> bool:
        """Whether one more may enter, by the rate of now or the steady one, whichever is less. While turns are
        promised, a part of the queue is for those who return, and for the urgent; they enter by whichever is more.
        The few always find room, and so does a tenant that has less than its share of what may wait."""
        seconds = self.seconds(now)
        if seconds < _EASED * self.longest_s:
            self._turn_s = 0.0
        promised = self._turn_s > now
        most_s = self.longest_s - (self._reserve_s if promised and not favoured else 0.0)
        if self._steady:  # the first tokens of a new crowd come quickly: nobody decodes yet
            seconds = (min if promised and favoured else max)(seconds, self.units * self._steady_s / self._steady)
        within_share = self._seconds_of(share, seconds) < most_s * self._part_of(share)
        return not self.crowded or seconds < most_s or within_share

    def promise(self, now: float) -> float:
        """Seconds until the turn of one that is refused now."""
        each_s = self._crowded_s / self._n_done if self._n_done else 0.0
        self._turn_s = max(self._turn_s, now) + each_s / _PACE
        wait_s = self._turn_s - now
        if wait_s > LATEST_TURN_S:  # spread all the same
            wait_s = LATEST_TURN_S / 2 + wait_s % (LATEST_TURN_S / 2)
        return wait_s

    def _seconds_of(self, share: Share, seconds: float) -> float:
        """The part of what waits that is this tenant's."""
        mine = self._tenants.get(share.tenant)
        return seconds * mine[0] / self.units if mine is not None and self.units > 0.0 else 0.0

    def _part_of(self, share: Share) -> float:
        """The share of the queue beside the others that wait; 0 if nobody else does."""
        others = sum(weight for tenant, (_, _, weight) in self._tenants.items() if tenant != share.tenant)
        return share.weight / (share.weight + others) if others else 0.0

    def _forget(self, excess: float) -> None:
        if excess > 1.0:
            self._done, self._n_done = self._done / excess, self._n_done / excess
            self._crowded_s /= excess

    def _pass(self, now: float) -> None:
        passed_s = max(now - self._at_s, 0.0)
        if self.crowded:
            self._count(passed_s)
        elif self._n_last:
            self._last_s += passed_s
        self._at_s = now

    def _count(self, seconds: float) -> None:
        """Add to the time that a crowd has taken."""
        self._crowded_s += seconds
        self._steady_s += seconds
        if self._steady_s > _STEADY_S:
            self._steady *= _STEADY_S / self._steady_s
            self._steady_s = _STEADY_S
