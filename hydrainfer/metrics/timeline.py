"""Lifecycle events → one timeline per request → latencies, by the paper's definitions (section 2.3, Fig. 13).

    ARRIVED ─encode_queue─ STARTED ─encode─ MIGRATING ─ep_migration─ QUEUED ─prefill_queue─ STARTED ─prefill─ … FINISHED

The life of a request is cut at QUEUED, STARTED and MIGRATING, so the eight intervals always add up to the whole. The
events come from several processes and may overtake each other. Their `at_s` is on one clock, so the cuts are sorted by
time once FINISHED, always the last, has come. The time before the first cut, in which pictures are prepared, belongs to
the queue of the first stage. RECOVERED is not a cut: the interval in which an instance died lasts until the next life
is QUEUED, and the work that this life repeats is added to the same intervals.
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
    """The times and counts of one request. Times in seconds of the engine's clock; `token_s`: one entry per token.
    `n_drafted`, `n_accepted`: the drafts that its steps have verified, and those that were right.
    `n_prompt`: its prompt tokens; `n_cached`: those that were in a cache, None before prefill. `instance`: where it
    ended. `arrived_s`: None until ARRIVED has come. `intervals_s` and `spans` are empty until the request has finished;
    then they have the total time of each of `INTERVALS` that happened, and each occurrence with its begin and end."""

    arrived_s: float | None = None
    token_s: list[float] = field(default_factory=list)
    finished_s: float | None = None
    finish_reason: str = ""
    n_preemptions: int = 0
    n_migrations: int = 0
    n_recoveries: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    n_prompt: int = 0
    n_cached: int | None = None
    instance: str = ""
    intervals_s: dict[str, float] = field(default_factory=dict)
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    _cuts: list[tuple[float, str, Stage]] = field(default_factory=list)  # begin, interval, stage; as received

    def hear(self, event: LifecycleEvent) -> None:
        """Add an event, any but ARRIVED and FINISHED."""
        _, kind, at_s, stage, _, n, _ = event
        if kind is EventKind.TOKEN:
            self.token_s.append(at_s)
        elif kind is EventKind.QUEUED:
            self._cut(at_s, _QUEUE[Stage(stage)], Stage(stage))
        elif kind is EventKind.STARTED:
            self._cut(at_s, Stage(stage).value, Stage(stage))
            if stage == Stage.PREFILL and self.n_cached is None:
                self.n_cached = n
        elif kind is EventKind.MIGRATING:
            self.n_migrations += 1
            self._cut(at_s, _MIGRATION[Stage(stage)], Stage(stage))
        elif kind is EventKind.PREEMPTED:
            self.n_preemptions += 1
        elif kind is EventKind.RECOVERED:
            self.n_recoveries += 1
        elif kind is EventKind.DRAFTED:
            self.n_drafted += n
        elif kind is EventKind.ACCEPTED:
            self.n_accepted += n

    def finish(self, at_s: float, reason: str) -> None:
        """Sort the events and compute the intervals. The clocks of two machines may differ a little, so times before
        the arrival or after the end are moved there."""
        cuts = sorted(self._cuts, key=lambda cut: cut[0])
        self.token_s.sort()
        if self.arrived_s is None:  # its instance died before it could report ARRIVED
            self.arrived_s = min([at_s, *self.token_s[:1], *(cut[0] for cut in cuts[:1])])
        self.finished_s = max(at_s, self.arrived_s)
        self.finish_reason = reason
        doing = _QUEUE[cuts[0][2] if cuts else Stage.PREFILL]
        since_s = self.arrived_s
        for cut_s, interval, _ in cuts:
            until_s = min(max(cut_s, since_s), self.finished_s)
            self._spend(doing, since_s, until_s)
            doing = interval
            since_s = until_s
        self._spend(doing, since_s, self.finished_s)
        self._cuts.clear()

    def _cut(self, at_s: float, interval: str, stage: Stage) -> None:
        self._cuts.append((at_s, interval, stage))

    def _spend(self, interval: str, since_s: float, until_s: float) -> None:
        self.intervals_s[interval] = self.intervals_s.get(interval, 0.0) + until_s - since_s
        self.spans.append((interval, since_s, until_s))

    @property
    def doing(self) -> str:
        """The interval that a live request is in: one of `INTERVALS`, or "" before the first cut."""
        latest = max(reversed(list(self._cuts)), key=lambda cut: cut[0], default=(0.0, "", Stage.PREFILL))
        return latest[1]  # of equal times the one that came last

    @property
    def n_steps(self) -> int:
        """The steps that made its tokens."""
        return len(self.token_s) - self.n_accepted

    @property
    def n_computed(self) -> int | None:
        """The prompt tokens that were in no cache; None if it was not prefilled."""
        return None if self.n_cached is None else max(self.n_prompt - self.n_cached, 0)

    @property
    def ttft_s(self) -> float | None:
        if not self.token_s or self.arrived_s is None:
            return None
        return max(self.token_s[0] - self.arrived_s, 0.0)

    @property
    def tpot_s(self) -> float | None:
        """The mean time per output token after the first, or None with fewer than two tokens."""
        n = len(self.token_s) - 1
        if n > 0:
            return (self.token_s[-1] - self.token_s[0]) / n
        return None

    @property
    def e2e_s(self) -> float | None:
        if self.finished_s is None or self.arrived_s is None:
            return None
        return self.finished_s - self.arrived_s

    @property
    def queue_s(self) -> float:
        return sum(self.intervals_s.get(i, 0.0) for i in INTERVALS if i.endswith("_queue"))


class Timelines:
    """Builds timelines from events, live or simulated. Passes each finished one to `finished` and forgets it. FINISHED
    must be the last event of a request; the others may come in any order."""

    def __init__(self, finished: Callable[[str, Timeline], None]) -> None:
        self._finished = finished
        self._live: dict[str, Timeline] = {}

    def record(self, event: LifecycleEvent) -> Timeline | None:
        """Add an event. Returns its timeline, for recorders that look at single events, or None for a repeated ARRIVED:
        each instance that gets a request reports one, and only the first counts."""
        timeline = self._live.get(event.request_id)
        if timeline is None:
            timeline = self._live[event.request_id] = Timeline()
        if event.kind is EventKind.ARRIVED:
            if timeline.arrived_s is not None:
                return None
            timeline.arrived_s = event.at_s
            timeline.n_prompt = event.n
        elif event.kind is EventKind.FINISHED:
            del self._live[event.request_id]
            timeline.instance = event.instance
            timeline.finish(event.at_s, event.detail)
            self._finished(event.request_id, timeline)
        else:
            timeline.hear(event)
        return timeline

    def doing(self, request_id: str) -> str:
        """The interval that a live request is in, "" if that is not known. May be called from any thread."""
        timeline = self._live.get(request_id)
        return "" if timeline is None else timeline.doing

    def __len__(self) -> int:
        return len(self._live)
