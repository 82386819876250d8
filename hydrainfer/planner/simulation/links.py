"""Links between instances: how long messages and copies take, and copies that wait for each other."""

from __future__ import annotations

import msgspec


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """The link between any two instances: `bytes_per_s` and `latency_s` of a copy, of which each instance sends one and
    takes one at a time; `message_s`: how long a message takes."""

    bytes_per_s: float = 20e9
    latency_s: float = 50e-6
    message_s: float = 300e-6


class LinkEnds:
    """The ends of the links: each instance sends one copy and takes one at a time."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._sends_until: dict[str, float] = {}
        self._takes_until: dict[str, float] = {}

    def begin(self, source: str, target: str, n_bytes: int, now: float) -> float:
        """Reserve both ends for a copy asked for now. Returns the time when it will be done."""
        start_s = max(now, self._sends_until.get(source, 0.0), self._takes_until.get(target, 0.0))
        end_s = start_s + self._link.latency_s + n_bytes / self._link.bytes_per_s
        self._sends_until[source] = self._takes_until[target] = end_s
        return end_s


class ModelledCopy:
    """A copy that is done at a known time."""

    __slots__ = ("_at",)

    def __init__(self, at_s: float) -> None:
        self._at = at_s

    def poll(self, now: float) -> bool | None:
        return True if now >= self._at else None

    def ready_at(self) -> float | None:
        return self._at
