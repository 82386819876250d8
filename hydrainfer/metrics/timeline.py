"""Lifecycle events → one timeline per request → latencies, by the paper's definitions (section 2.3, Fig. 13)."""

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
_MIGRATION = {Stage.ENCODE: "encode_queue", Stage.PREFILL: "ep_migration", Stage.DECODE: "pd_migration"}


@dataclass(slots=True)
class Timeline:
    """What is known of one request. Times in seconds of the engine's clock; `token_s` has one entry per token."""

    arrived_s: float
    token_s: list[float] = field(default_factory=list)
    finished_s: float | None = None
    finish_reason: str = ""
    n_preemptions: int = 0
    intervals_s: dict[str, float] = field(default_factory=dict)
    _since_s: float = 0.0
    _doing: str = ""

    def switch(self, interval: str, at_s: float) -> None:
        """What went on until `at_s` ends there and `interval` begins. Repeated ones (after preemption) add up."""
        if self._doing:
            self.intervals_s[self._doing] = self.intervals_s.get(self._doing, 0.0) + at_s - self._since_s
        self._doing, self._since_s = interval, at_s

    @property
    def ttft_s(self) -> float | None:
        return self.token_s[0] - self.arrived_s if self.token_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first."""
        n = len(self.token_s) - 1
        return (self.token_s[-1] - self.token_s[0]) / n if n > 0 else None

    @property
    def e2e_s(self) -> float | None:
        return self.finished_s - self.arrived_s if self.finished_s is not None else None

    @property
    def queue_s(self) -> float:
        return sum(self.intervals_s.get(i, 0.0) for i in INTERVALS if i.endswith("_queue"))


class Timelines:
    """Builds timelines from events, live or simulated; hands each finished one to `finished` and forgets it."""

    def __init__(self, finished: Callable[[str, Timeline], None]) -> None:
        self._finished = finished
        self._live: dict[str, Timeline] = {}

    def record(self, event: LifecycleEvent) -> Timeline | None:
        """Returns the timeline the event belongs to, for recorders that look at single events."""
        request_id, kind, at_s, stage, detail, _ = event
        if kind is EventKind.ARRIVED:
            self._live[request_id] = Timeline(at_s, _since_s=at_s)
            return self._live[request_id]
        timeline = self._live.get(request_id)
        if timeline is None:
            return None
        if kind is EventKind.TOKEN:
            timeline.token_s.append(at_s)
        elif kind is EventKind.QUEUED:
            timeline.switch(f"{Stage(stage).value}_queue", at_s)
        elif kind is EventKind.STARTED:
            timeline.switch(Stage(stage).value, at_s)
        elif kind is EventKind.MIGRATING:
            timeline.switch(_MIGRATION[Stage(stage)], at_s)
        elif kind is EventKind.PREEMPTED:
            timeline.n_preemptions += 1
        elif kind is EventKind.FINISHED:
            timeline.switch("", at_s)
            timeline.finished_s, timeline.finish_reason = at_s, detail
            del self._live[request_id]
            self._finished(request_id, timeline)
        return timeline

    def __len__(self) -> int:
        return len(self._live)
