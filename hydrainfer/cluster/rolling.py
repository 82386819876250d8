"""A rolling restart: every instance ends and is started again, one at a time, while requests go on.

    all run ─> one rests: others are preferred ─idle, or after 5 s─> it is ended ─> it is back ─> the next

As after any death, requests that still run there go on elsewhere, or wait for the instance if no other runs their
stage. If an instance does not come back, no further one is restarted. Pure: no launcher, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping

_REST_S = 5.0
Incarnation = tuple[str, int]
"""The name and incarnation of an instance."""


class Rolling:
    """The state of a rolling restart. `resting`: the instance that gets requests only if no other can take them.
    `ended`: the incarnation that was ended last."""

    def __init__(self) -> None:
        self.resting: str | None = None
        self.ended: Incarnation | None = None
        self._names: list[str] = []
        self._left: list[str] = []
        self._since = 0.0

    def begin(self, names: list[str]) -> None:
        """Begin to restart all of these instances. Replaces the rest of an earlier call."""
        self._names, self._left = names, list(names)

    def turn(self, now: float, there: Mapping[str, int], idle: Mapping[str, bool]) -> Incarnation | None:
        """The instance to end now, if any. By name, `there`: the incarnations that run; `idle`: whether an instance has
        no requests."""
        if self.resting is not None:
            name = self.resting
            if name in there and not idle[name] and now < self._since + _REST_S:
                return None
            self.resting = None
            self.ended = (name, there[name]) if name in there else None  # None: it has died by itself
            return self.ended
        if self._left and self._names_are(there):
            self.resting, self._since = self._left.pop(0), now
        return None

    def _names_are(self, there: Mapping[str, int]) -> bool:
        """Whether all instances run, and the one that was ended last is a new incarnation."""
        return all(name in there for name in self._names) and (self.ended is None or self.ended not in there.items())
