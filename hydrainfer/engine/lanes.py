"""The lanes of an instance: which may launch a batch now, and what is in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from hydrainfer.core import Lane, StepBatch, StepResult
from hydrainfer.engine.ports import Runner, Ticket

Overlap = Literal["free", "step", "off", "slice"]
_NEVER = float("inf")
_CROWD, _MOST = 32, 4.0
"""`_CROWD` sequences decode together in little more time than one of them. Such a crowd decodes for at most `_MOST`
times the seconds of a vision batch before the next vision batch."""


@dataclass(slots=True)
class _Flight:
    """A batch in flight. `since_s`: when it was launched, or became the first of its lane."""

    batch: StepBatch
    ticket: Ticket
    since_s: float


class Lanes:
    """The lanes of an instance. `overlap`: `free` launches on any free lane; `step` launches both lanes together and
    waits for both (the paper); `off` runs one lane at a time, in turns; with `slice` the lanes share a thread, and
    encoding pauses for language batches. `ahead`: while the language lane computes a batch of decodes only, its next
    batch is launched too, unless those decodes wait for a part of the pictures; where lanes take turns, only while
    there are no pictures."""

    def __init__(self, runners: Mapping[Lane, Runner], overlap: Overlap, *, ahead: bool = False) -> None:
        self.runners, self.overlap = runners, overlap
        self._ahead = ahead
        self.in_flight: dict[Lane, list[_Flight]] = {}  # of busy lanes: one batch, or two, which land in this order
        self._latest = Lane.LANGUAGE
        self._encoded_s = self._since_s = 0.0  # the latest vision batch, and language batches since

    def landed(self, now: float) -> Iterator[tuple[StepResult, float]]:
        """The results of finished batches, each with the seconds that its batch took."""
        for lane, flights in list(self.in_flight.items()) if self.in_flight else ():
            while flights and (result := flights[0].ticket.poll(now)) is not None:
                first = flights.pop(0)
                if flights:
                    flights[0].since_s = now
                else:
                    del self.in_flight[lane]
                seconds = now - first.since_s if result.own_s is None else result.own_s
                if lane is Lane.VISION:
                    self._encoded_s, self._since_s = seconds, 0.0
                else:
                    self._since_s += seconds
                yield result, seconds

    def turns(
        self,
        prefers_language: Callable[[], bool],
        counts: Callable[[], tuple[int, int]],
        may_pause: Callable[[], bool],
    ) -> Iterator[Lane]:
        """The lanes to be asked for a batch now, in order. Each lane's batch is launched before the next lane is asked
        for. `prefers_language()`: whether some prefill goes before all pictures that wait to be encoded; `counts()`:
        how many decoding sequences count as a crowd, and how many sequences have pictures to be encoded; `may_pause()`:
        whether decodes may wait for pictures."""
        take_turns = self.overlap in ("step", "off")
        if not (self.in_flight and take_turns):
            yield from self._free(prefers_language, counts, may_pause)
        if self._ahead and not (take_turns and (Lane.VISION in self.in_flight or counts()[1])):
            batches = [flight.batch for flight in self.in_flight.get(Lane.LANGUAGE, ())]
            if len(batches) == 1 and batches[0].decodes_only and not batches[0].after_s:
                yield Lane.LANGUAGE  # if decodes wait, it is not known yet whose tokens may be late

    def _free(
        self,
        prefers_language: Callable[[], bool],
        counts: Callable[[], tuple[int, int]],
        may_pause: Callable[[], bool],
    ) -> Iterator[Lane]:
        lanes = [lane for lane in self.runners if lane not in self.in_flight]
        if self.overlap == "off":
            after = Lane.VISION if self._crowd_goes_on(*counts()) or prefers_language() else self._latest
            lanes.sort(key=lambda lane: lane is after)  # take turns
        elif self.overlap == "slice" and not may_pause():
            lanes.reverse()  # decodes do not wait for pictures
        for lane in lanes:
            if self.overlap == "slice" and Lane.LANGUAGE in self.in_flight and prefers_language():
                return  # the prefill there goes first
            yield lane
            if self.overlap == "off" and self.in_flight:
                return

    def _crowd_goes_on(self, n_decoding: int, n_pictures: int) -> bool:
        """Whether a crowd decodes before more pictures are encoded. It does until it has had its share of the time
        since the last vision batch, which grows with its number. If lanes just took turns, the whole crowd would wait
        for every few pictures of others."""
        if n_decoding < _CROWD or not n_pictures:
            return False
        return self._since_s < self._encoded_s * min(n_decoding / n_pictures, _MOST)

    def interrupts(self, lane: Lane) -> bool:
        """Whether a batch of this lane makes the other lane's wait."""
        return self.overlap == "slice" and lane is Lane.LANGUAGE and Lane.VISION in self.in_flight

    def launch(self, batch: StepBatch, now: float) -> None:
        lane = self._latest = batch.lane
        flight = _Flight(batch, self.runners[lane].launch(batch), now)
        self.in_flight.setdefault(lane, []).append(flight)

    @property
    def n_in_flight(self) -> int:
        return sum(map(len, self.in_flight.values()))

    def busy(self, lane: Lane) -> bool:
        return lane in self.in_flight

    def ready_at(self) -> float:
        """The time at which the first result will be there, as far as that is known; infinity if nobody knows."""
        found = _NEVER
        for flights in self.in_flight.values():
            at = flights[0].ticket.ready_at()
            if at is not None and at < found:
                found = at
        return found

    def hung_s(self, now: float) -> float:
        """The most seconds that a lane has been at its present batch. Any thread may ask."""
        return now - min((f.since_s for flights in list(self.in_flight.values()) for f in flights[:1]), default=now)

    def close(self) -> None:
        for runner in self.runners.values():
            runner.close()
