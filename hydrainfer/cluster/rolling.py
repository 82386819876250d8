"""A rolling restart: every instance ends and is started again, one at a time, while requests go on.

    whole ─> one rests: others are preferred ─idle, or after 5 s─> it is ended ─> it is back ─> the next

What runs there when it ends goes on elsewhere, or waits for it if nobody else runs that stage, as after any death. One
that does not come back stops the restart there. Pure: no launcher, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping

_REST_S = 5.0
Incarnation = tuple[str, int]
"""The name and incarnation of an instance."""


class Rolling:
    """`resting`: who gets requests only if nobody else can. `ended`: who has been ended last."""

    def __init__(self) -> None:
        self.resting: str | None = None
        self.ended: Incarnation | None = None
        self._names: list[str] = []
        self._left: list[str] = []
        self._since = 0.0

    def begin(self, names: list[str]) -> None:
        """Restart all of these, and with them those that an earlier call had still to restart."""
        self._names, self._left = names, list(names)

    def turn(self, now: float, there: Mapping[str, int], idle: Mapping[str, bool]) -> Incarnation | None:
        """The instance to end now, if any. `there`: the incarnations of those that run; `idle`: whether they have
        nothing."""
        if self.resting is not None:
            name = self.resting
            if name in there and not idle[name] and now < self._since + _REST_S:
                return None
            self.resting = None
            self.ended = (name, there[name]) if name in there else None  # it has died by itself
            return self.ended
        if self._left and self._names_are(there):
            self.resting, self._since = self._left.pop(0), now
        return None

    def _names_are(self, there: Mapping[str, int]) -> bool:
        """Whether all run, the one that was ended last as another incarnation."""
        return all(name in there for name in self._names) and (self.ended is None or self.ended not in there.items())
