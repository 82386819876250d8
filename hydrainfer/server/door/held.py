"""The places that requests hold, and the rate at which they become free."""

from __future__ import annotations

from hydrainfer.server.door.queues import UNKNOWN_S, Turns

_NEWEST = 0.05  # weight of the newest request in the mean
_EASED = 0.25  # below this part of the places, promises are void: the requests that were promised a turn have not come


class HeldPlaces:
    """At most `n_most` places, one per choice, each held from the request's acceptance until its end.

    By Little's law, places become free at the rate of those held, divided by the mean time for which one is held. That
    is the time of the served requests lately or, if longer, of those that hold places now. Times are seconds of one
    clock, passed in. Every method takes constant time."""

    def __init__(self, n_most: int) -> None:
        self.n_most = n_most
        self.n = 0
        self._since_s = 0.0  # the sum of the times since when they are held
        self._mean_s: float | None = None
        self._turns = Turns()

    def change(self, by: int, since_s: float) -> None:
        """Add `by` places that are held since then, or remove as many of them."""
        self.n += by
        self._since_s = self._since_s + by * since_s if self.n else 0.0
        if self.n < _EASED * self.n_most:
            self._turns.latest_s = 0.0

    def served(self, seconds: float) -> None:
        """Note for how long a request held its places that got an answer."""
        if self._mean_s is None:
            self._mean_s = seconds
        self._mean_s += _NEWEST * (seconds - self._mean_s)

    def promise(self, n: int, now: float) -> float:
        """The seconds until the turn of a request for `n` places that is refused now. At least one place is held."""
        least_s = UNKNOWN_S if self._mean_s is None else 0.0
        mean_s = max(self._mean_s or least_s, now - self._since_s / self.n)
        return max(self._turns.promise(now, n * mean_s / self.n), least_s)
