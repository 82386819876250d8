"""The seconds of work that wait for their first token, by how fast such work has lately left the queue."""

from __future__ import annotations

import math

_CROWD = 4
"""With fewer requests before their first token nobody knows how fast they could be: they are not measured."""
_MEMORY_S = 5.0
"""Of crowded time: a measurement so old has lost two thirds of its weight."""
_PACE = 0.9
"""Turns are promised for this part of the measured rate; the rest is for those whom nobody told to come."""
_EASED = 0.25
"""A queue shorter than this part of the longest: who was promised a turn has not come, and the promises are void."""
_RESERVED_S = 2.0
"""Kept free for those who return. `Retry-After` has whole seconds, so they come in heaps of one second's work."""
LATEST_TURN_S = 600.0


class Queue:
    """Work of one kind between its arrival and its first token. `longest_s`: beyond it no more is taken in.

    The rate is that of the whole way, whatever is narrow on it: units that got their first token per second in which
    there was a crowd. What is promised to those who are refused are turns one after the other, so that they do not come
    back at once. Times are seconds of one clock, passed in; every method takes constant time."""

    def __init__(self, longest_s: float) -> None:
        self.longest_s = longest_s
        self.n_waiting = 0
        self.units = 0.0
        self._crowded_s = self._done = self._n_done = 0.0  # fading
        self._at_s = 0.0
        self._turn_s = 0.0

    def enter(self, units: float, now: float) -> None:
        self._pass(now)
        self.n_waiting += 1
        self.units += units

    def correct(self, by: float) -> None:
        """What waits is more or less than it was thought to be."""
        self.units += by

    def leave(self, units: float, now: float, *, done: bool) -> None:
        """`done`: by its first token; else it was ended."""
        self._pass(now)
        if done and self.n_waiting >= _CROWD:
            self._done += units
            self._n_done += 1
        self.n_waiting -= 1
        self.units = self.units - units if self.n_waiting else 0.0

    def seconds(self, now: float) -> float:
        """The time until what waits now has its first token; 0 while nothing is known."""
        self._pass(now)
        if self._done:
            return self.units * self._crowded_s / self._done
        return self._crowded_s if self.n_waiting >= _CROWD else 0.0

    def has_room(self, now: float, *, returning: bool) -> bool:
        """Whether one more may enter. While turns are promised, a part of the queue is for those who return."""
        seconds = self.seconds(now)
        if seconds < _EASED * self.longest_s:
            self._turn_s = 0.0
        reserved = not returning and self._turn_s > now
        return seconds < self.longest_s - (min(_RESERVED_S, self.longest_s / 2) if reserved else 0.0)

    def promise(self, now: float) -> float:
        """Seconds until the turn of one that is refused now."""
        each_s = self._crowded_s / self._n_done if self._n_done else 0.0
        self._turn_s = max(self._turn_s, now) + each_s / _PACE
        wait_s = self._turn_s - now
        if wait_s > LATEST_TURN_S:  # spread all the same
            wait_s = LATEST_TURN_S / 2 + wait_s % (LATEST_TURN_S / 2)
        return wait_s

    def _pass(self, now: float) -> None:
        passed_s, self._at_s = max(now - self._at_s, 0.0), now
        if self.n_waiting < _CROWD:
            return
        kept = math.exp(-passed_s / _MEMORY_S)
        self._done *= kept
        self._n_done *= kept
        # the integral of what fades, so that a rate that stays the same is measured as such
        self._crowded_s = self._crowded_s * kept + _MEMORY_S * (1.0 - kept)
