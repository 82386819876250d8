"""Requests that have come and wait, for a moment, until the shared store has said what it has of them.

arrives ─asked─> waits ─answered, or too late─> takes its turn
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hydrainfer.cache import StoreJob, StoreTier
from hydrainfer.core import LiveSequence
from hydrainfer.scheduler.finding import Finder, Visit

_NEVER = float("inf")
_PATIENCE_S = 0.02


class Ask(NamedTuple):
    """A question to the store about a request."""

    request_id: str
    job: StoreJob


class Asking:
    """The questions of one instance. `store`: None if there is none. `patience_s`: how long a request waits for an
    answer at most: computing may be sooner."""

    def __init__(self, finder: Finder, store: StoreTier | None) -> None:
        self.store = store
        self.patience_s = _PATIENCE_S
        self._finder = finder
        self._asked: set[str] = set()  # ids of requests that are here
        self._waiting: dict[str, float] = {}  # until when, by id; in this order
        self._asks: list[Ask] = []

    def arrived(self, seq: LiveSequence, visit: Visit, now: float) -> None:
        """Ask about a request, unless that was done before."""
        if self.store is None or seq.id in self._asked or not self.store.turn(now):
            return
        self._asked.add(seq.id)
        if lacking := self._finder.lacking(seq, visit):
            self._waiting[seq.id] = now + self.patience_s
            self._asks.append(Ask(seq.id, StoreJob("ask", {spec: (refs, ()) for spec, refs in lacking.items()})))

    def waits(self, request_id: str) -> bool:
        return request_id in self._waiting

    def asks(self) -> list[Ask]:
        """The questions to put now; each is returned once."""
        asks, self._asks = self._asks, []
        return asks

    def answered(self, ask: Ask, there: Mapping[str, Sequence[bool]]) -> None:
        """Note what the store has. `there`: by cache, whether it has each of the blocks that were asked for; empty if
        it did not answer."""
        self._waiting.pop(ask.request_id, None)
        assert self.store is not None
        for spec, has in there.items():
            self.store.heard(spec, ask.job.blocks[spec][0], has)

    def turn(self, now: float) -> int:
        """Let those that have waited for too long go on. Returns how many these are."""
        late = [name for name, until in self._waiting.items() if until <= now] if self._waiting else []
        for name in late:
            del self._waiting[name]
        return len(late)

    def forget(self, request_id: str) -> None:
        """Note that a request is not here any more."""
        self._finder.lost.pop(request_id, None)
        if self._asked:
            self._asked.discard(request_id)
            self._waiting.pop(request_id, None)

    def wake_at(self) -> float:
        return next(iter(self._waiting.values()), _NEVER)
