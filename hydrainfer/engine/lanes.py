"""The lanes of an instance: which may launch a batch now, and what is in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from hydrainfer.core import Lane, StepBatch, StepResult
from hydrainfer.engine.ports import Runner, Ticket

Overlap = Literal["free", "step", "off", "slice"]
_NEVER = float("inf")


class Lanes:
    """`overlap`: `free` launches on any free lane; `step` launches both lanes together and joins them (the paper);
    `off` runs one lane at a time; with `slice` the lanes share a thread, and pictures that are being encoded wait for
    language batches."""

    def __init__(self, runners: Mapping[Lane, Runner], overlap: Overlap) -> None:
        self.runners, self.overlap = runners, overlap
        self.in_flight: dict[Lane, Ticket] = {}
        self._launched_s: dict[Lane, float] = {}
        self._latest = Lane.LANGUAGE

    def landed(self, now: float) -> Iterator[tuple[StepResult, float]]:
        """The results that are there, each with the seconds that its batch took."""
        for lane, ticket in list(self.in_flight.items()) if self.in_flight else ():
            result = ticket.poll(now)
            if result is not None:
                del self.in_flight[lane]
                yield result, now - self._launched_s[lane] if result.own_s is None else result.own_s

    def turns(self, prefers_language: Callable[[], bool]) -> Iterator[Lane]:
        """The lanes to be asked for a batch now, in order. `prefers_language()`: whether no picture is to be encoded
        before somebody's prefill. Each lane's batch is launched before the next lane is asked for."""
        if self.in_flight and self.overlap in ("step", "off"):
            return
        lanes = [lane for lane in self.runners if lane not in self.in_flight]
        if self.overlap == "off":
            after = Lane.VISION if prefers_language() else self._latest
            lanes.sort(key=lambda lane: lane is after)  # take turns
        elif self.overlap == "slice":
            lanes.reverse()  # decodes do not wait for pictures
        for lane in lanes:
            if self.overlap == "slice" and Lane.LANGUAGE in self.in_flight and prefers_language():
                return  # whoever is prefilled there goes first
            yield lane
            if self.overlap == "off" and self.in_flight:
                return

    def interrupts(self, lane: Lane) -> bool:
        """Whether a batch of this lane makes the other lane's wait."""
        return self.overlap == "slice" and lane is Lane.LANGUAGE and Lane.VISION in self.in_flight

    def launch(self, batch: StepBatch, now: float) -> None:
        lane = self._latest = batch.lane
        self._launched_s[lane] = now  # first: `hung_s` may be asked by another thread
        self.in_flight[lane] = self.runners[lane].launch(batch)

    def busy(self, lane: Lane) -> bool:
        return lane in self.in_flight

    def ready_at(self) -> float:
        """When the first result will be there, as far as that is known; infinity if nobody knows."""
        found = _NEVER
        for ticket in self.in_flight.values():
            at = ticket.ready_at()
            if at is not None and at < found:
                found = at
        return found

    def hung_s(self, now: float) -> float:
        """How long a lane has been at its batch."""
        return now - min((self._launched_s[lane] for lane in list(self.in_flight)), default=now)

    def close(self) -> None:
        for runner in self.runners.values():
            runner.close()
