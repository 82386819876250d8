"""The figures of one simulated rate that tell why it is not carried: misses and what they waited for, beside the same
without load, and how busy devices, caches, links and the server are."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

import msgspec

from hydrainfer.config import Slo
from hydrainfer.core import CostModel, Layout, LifecycleEvent
from hydrainfer.judging import Series, Verdict, at_quantile, blamed, delay_limit_s, judge, per_token, steady_state
from hydrainfer.metrics import INTERVALS, Timeline, Timelines
from hydrainfer.planner.nouns import TraceRequest
from hydrainfer.planner.search.bound import Bounds
from hydrainfer.planner.search.study import Study, attempt, slowest_interval_s, token_intervals_s, watched
from hydrainfer.planner.search.usage import RoleUse, UseSamples
from hydrainfer.planner.simulation import at_rate

_NO_TOKEN = Verdict(ttft=False, tpot=True, e2e=True)
_UNLOADED = 24  # requests simulated without load, for the usual intervals
_SPARSE = 20.0  # seconds between arrivals, per second that a request takes alone
_ENDS = 4  # the first and the last of so many parts of a run are compared


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """The seconds of one interval over all requests: the mean, the 90th percentile, the mean without load, and the
    means of the first and of the last quarter of the arrivals. Decode is per token."""

    mean_s: float
    p90_s: float
    alone_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """One limit of the SLO: `missed`: the share of requests that missed it; `seconds`: what the target's share of the
    requests attain (TPOT: by the intervals that the SLO counts). `alone_s`, `alone_missed`: the same without load."""

    limit_s: float
    missed: float
    seconds: float
    alone_s: float
    alone_missed: float


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of `n` requests of a layout at `rate`, which it does not carry. `target`: the share that must meet
    the SLO; `missed`: the share that did not. `latencies`: by limit ("TTFT", "TPOT", "E2E"). `limit`, `interval`: the
    most common cause of misses, which `blamed` of the requests have; "" if nobody missed. `intervals`: by name. `use`:
    of each role. `server_s`: mean wait in the server before a request reaches an instance. `link`: the share of time
    in which the busiest end of a link copies. `growth`: of the queue, certain above 1 (`judging.Steady`). `bound`: the
    rate that the least work of `bound_stages` allows (none: that of the server)."""

    rate: float
    n: int
    target: float
    missed: float
    latencies: dict[str, Latency]
    intervals: dict[str, Spent]
    use: tuple[RoleUse, ...]
    limit: str = ""
    interval: str = ""
    blamed: float = 0.0
    server_s: float = 0.0
    link: float = 0.0
    growth: float = 0.0
    bound: float = float("inf")
    bound_stages: tuple[str, ...] = ()


def evidence_of(study: Study, layout: Layout, rate: float) -> Evidence:
    """The figures of one run of the study's requests at `rate`, simulated to its end."""
    alone = timelines_at(study.shortened(_UNLOADED), layout, slow_rate(study))
    usual = {name: one.mean_s for name, one in _spent(alone).items()}
    samples = UseSamples(study, layout, rate)
    timelines: dict[str, Timeline] = {}
    recorder = Timelines(timelines.__setitem__)
    simulator = watched(study, layout, rate, samples.look, lambda event: _record(recorder, event))
    each = sorted(timelines.values(), key=lambda t: t.arrived_s or 0.0)
    verdicts = [_verdict(study.slo, t) for t in each]
    blame: Counter[tuple[str, str]] = Counter()
    for t, verdict in zip(each, verdicts):
        for name, interval in blamed(verdict, t.intervals_s, usual, len(t.token_s)).items():
            blame[name.upper(), interval] += 1
    (limit, interval), n_blamed = (("", ""), 0) if not blame else blame.most_common(1)[0]
    bound = Bounds(study).of(layout)
    return Evidence(
        rate=rate,
        n=len(each),
        target=study.target,
        missed=fmean(not v.met for v in verdicts),
        latencies=dict(_latencies(study, each, alone)),
        intervals=_spent(each, usual),
        use=samples.roles(),
        limit=limit,
        interval=interval,
        blamed=n_blamed / len(each),
        server_s=_server_s(study, layout, rate),
        link=max(simulator.copies.busy_s.values(), default=0.0) / max(simulator.now, 1e-9),
        growth=_growth(study, each, verdicts),
        bound=bound.rate,
        bound_stages=tuple(stage.value for stage in bound.stages),
    )


def _record(recorder: Timelines, event: LifecycleEvent) -> None:
    recorder.record(event)


def _verdict(slo: Slo, t: Timeline) -> Verdict:
    if not t.token_s:
        return _NO_TOKEN
    return judge(slo, t.ttft_s, token_intervals_s(t.token_s), t.e2e_s or 0.0)


def _latencies(study: Study, each: Sequence[Timeline], alone: Sequence[Timeline]) -> Iterator[tuple[str, Latency]]:
    slo = study.slo
    for name, limit_s in (("ttft", slo.ttft_s), ("tpot", slo.tpot_s), ("e2e", slo.e2e_s)):
        if limit_s is not None:
            seconds, missed = _attained(study, each, name)
            alone_s, alone_missed = _attained(study, alone, name)
            yield (
                name.upper(),
                Latency(limit_s=limit_s, missed=missed, seconds=seconds, alone_s=alone_s, alone_missed=alone_missed),
            )


def _attained(study: Study, each: Sequence[Timeline], name: str) -> tuple[float, float]:
    """The seconds that the target's share of the requests attain, and the share that missed the limit."""
    missed = [not getattr(_verdict(study.slo, t), name) for t in each]
    seconds = {
        "ttft": lambda t: t.ttft_s or 0.0,
        "tpot": lambda t: slowest_interval_s(t.token_s, study.slo),
        "e2e": lambda t: t.e2e_s or 0.0,
    }[name]
    return at_quantile(sorted(map(seconds, each)), study.target), fmean(missed)


def _spent(each: Sequence[Timeline], usual: Mapping[str, float] | None = None) -> dict[str, Spent]:
    """What requests, in order of arrival, spent in each interval. `usual`: the means without load."""
    rows = [per_token(t.intervals_s, len(t.token_s)) for t in each]
    part = max(1, len(rows) // _ENDS)
    spent = {}
    for name in INTERVALS:
        column = [row.get(name, 0.0) for row in rows]
        spent[name] = Spent(
            mean_s=fmean(column),
            p90_s=at_quantile(sorted(column), 0.9),
            alone_s=(usual or {}).get(name, 0.0),
            first_s=fmean(column[:part]),
            last_s=fmean(column[-part:]),
        )
    return spent


def _growth(study: Study, each: Sequence[Timeline], verdicts: Sequence[Verdict]) -> float:
    """The growth of the queue, as a search judges it."""
    arrivals = [t.arrived_s or 0.0 for t in each]
    rest_s = [t.token_s[-1] - t.token_s[0] for t in each if t.token_s]
    delays = [math.inf if t.ttft_s is None else t.ttft_s for t in each]
    series = Series(arrivals, delays, [v.met for v in verdicts], delay_limit_s(study.slo, rest_s))
    return steady_state([series]).growth


def _server_s(study: Study, layout: Layout, rate: float) -> float:
    """The mean seconds that requests wait in the server, beyond what it takes for them alone."""
    server = study.host_cost(layout)
    trace = at_rate(study.trace, rate)
    n = len(layout.instances)
    loaded = [ready - t.arrival_s for ready, t in zip(server.ready_s(trace, n), trace)]
    sparse = at_rate(study.trace, slow_rate(study))
    alone = [ready - t.arrival_s for ready, t in zip(server.ready_s(sparse, n), sparse)]
    return max(0.0, fmean(loaded) - fmean(alone))


def slow_rate(study: Study) -> float:
    """A rate at which requests hardly overlap: they arrive many times as far apart as the longest of them takes
    alone."""
    first = study.trace[:_UNLOADED]
    stations = study.stations.values()
    return 1.0 / max(_SPARSE * max(_alone_s(s.cost, t) for t in first for s in stations), 1e-3)


def _alone_s(cost: CostModel, t: TraceRequest) -> float:
    """Seconds that a request takes with the device to itself."""
    encode_s = cost.encode_s(t.pictures) if t.pictures else 0.0
    prefill_s = cost.language_s(t.n_prompt, t.n_prompt * t.n_prompt // 2, 0, 0)
    return encode_s + prefill_s + t.n_output * cost.language_s(0, 0, 1, t.n_prompt + t.n_output)


def timelines_at(study: Study, layout: Layout, rate: float) -> list[Timeline]:
    """The timelines of all requests, simulated at `rate`."""
    timelines: dict[str, Timeline] = {}
    attempt(study, layout, rate, hurry=False, timelines=Timelines(timelines.__setitem__))
    return list(timelines.values())
