"""Lifecycle events → one timeline per request → latencies, by the paper's definitions (section 2.3, Fig. 13).

    ARRIVED ─encode_queue─ STARTED ─encode─ MIGRATING ─ep_migration─ QUEUED ─prefill_queue─ STARTED ─prefill─ … FINISHED

A life is cut where a stage is QUEUED or STARTED and where MIGRATING begins, so that the eight intervals always add up
to the whole. Events of one request come from several processes and may overtake each other; their `at_s` is one clock,
so the cuts are made in the order of time when FINISHED has come, which is the last to come. What precedes the first cut
(the pictures are prepared) belongs to the queue of its stage. RECOVERED is no cut: the interval in which an instance
died goes on until the next life is QUEUED, and what that life does again adds to the intervals it had before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hydrainfer.core import EventKind, LifecycleEvent, Stage

INTERVALS = (
    "encode_queue",
    "encode",
    "ep_migration",
    "prefill_queue",
    "prefill",
    "pd_migration",
    "decode_queue",
    "decode",
)
"""The eight intervals of the paper's latency breakdown, in order. Stages that did not happen take 0 s."""
_QUEUE = {stage: f"{stage.value}_queue" for stage in Stage}
_MIGRATION = {Stage.ENCODE: "encode_queue", Stage.PREFILL: "ep_migration", Stage.DECODE: "pd_migration"}


@dataclass(slots=True)
class Timeline:
    """The times and counts known of one request. Times in seconds of the engine's clock; `token_s` has one entry per
    token. `arrived_s` is None until ARRIVED is heard; `intervals_s` is empty until the request has finished, and then
    has what happened of `INTERVALS`, as `spans` has each time that one began and ended."""

    arrived_s: float | None = None
    token_s: list[float] = field(default_factory=list)
    finished_s: float | None = None
    finish_reason: str = ""
    n_preemptions: int = 0
    n_migrations: int = 0
    n_recoveries: int = 0
    intervals_s: dict[str, float] = field(default_factory=dict)
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    _cuts: list[tuple[float, str, Stage]] = field(default_factory=list)  # when which interval began, as heard

    def hear(self, event: LifecycleEvent) -> None:
        """Note an event, any but ARRIVED and FINISHED."""
        _, kind, at_s, stage, _, _ = event
        if kind is EventKind.TOKEN:
            self.token_s.append(at_s)
        elif kind is EventKind.QUEUED:
            self._cut(at_s, _QUEUE[Stage(stage)], Stage(stage))
        elif kind is EventKind.STARTED:
            self._cut(at_s, Stage(stage).value, Stage(stage))
        elif kind is EventKind.MIGRATING:
            self.n_migrations += 1
            self._cut(at_s, _MIGRATION[Stage(stage)], Stage(stage))
        elif kind is EventKind.PREEMPTED:
            self.n_preemptions += 1
        elif kind is EventKind.RECOVERED:
            self.n_recoveries += 1

    def finish(self, at_s: float, reason: str) -> None:
        """Order all that was heard. Clocks of two machines may disagree a little, so what seems to be before the
        arrival or after the end is moved there."""
        cuts = sorted(self._cuts, key=lambda cut: cut[0])
        self.token_s.sort()
        if self.arrived_s is None:  # its instance died before it could say so
            self.arrived_s = min([at_s, *self.token_s[:1], *(cut[0] for cut in cuts[:1])])
        self.finished_s, self.finish_reason = max(at_s, self.arrived_s), reason
        doing, since_s = _QUEUE[cuts[0][2] if cuts else Stage.PREFILL], self.arrived_s
        for cut_s, interval, _ in cuts:
            until_s = min(max(cut_s, since_s), self.finished_s)
            self._spend(doing, since_s, until_s)
            doing, since_s = interval, until_s
        self._spend(doing, since_s, self.finished_s)
        self._cuts.clear()

    def _cut(self, at_s: float, interval: str, stage: Stage) -> None:
        self._cuts.append((at_s, interval, stage))

    def _spend(self, interval: str, since_s: float, until_s: float) -> None:
        self.intervals_s[interval] = self.intervals_s.get(interval, 0.0) + until_s - since_s
        self.spans.append((interval, since_s, until_s))

    @property
    def ttft_s(self) -> float | None:
        if not self.token_s or self.arrived_s is None:
            return None
        return max(self.token_s[0] - self.arrived_s, 0.0)

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first."""
        n = len(self.token_s) - 1
        return (self.token_s[-1] - self.token_s[0]) / n if n > 0 else None

    @property
    def e2e_s(self) -> float | None:
        if self.finished_s is None or self.arrived_s is None:
            return None
        return self.finished_s - self.arrived_s

    @property
    def queue_s(self) -> float:
        return sum(self.intervals_s.get(i, 0.0) for i in INTERVALS if i.endswith("_queue"))


class Timelines:
    """Builds timelines from events, live or simulated; hands each finished one to `finished` and forgets it. FINISHED
    is the last that is recorded of a request; before it, any order will do."""

    def __init__(self, finished: Callable[[str, Timeline], None]) -> None:
        self._finished = finished
        self._live: dict[str, Timeline] = {}

    def record(self, event: LifecycleEvent) -> Timeline | None:
        """Returns the timeline the event belongs to, for recorders that look at single events; None if it tells nothing
        new: each instance that a request is given to says that it has arrived, and the first time counts."""
        timeline = self._live.get(event.request_id)
        if timeline is None:
            timeline = self._live[event.request_id] = Timeline()
        if event.kind is EventKind.ARRIVED:
            if timeline.arrived_s is not None:
                return None
            timeline.arrived_s = event.at_s
        elif event.kind is EventKind.FINISHED:
            del self._live[event.request_id]
            timeline.finish(event.at_s, event.detail)
            self._finished(event.request_id, timeline)
        else:
            timeline.hear(event)
        return timeline

    def __len__(self) -> int:
        return len(self._live)
