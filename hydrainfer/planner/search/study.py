"""Simulated attempts: does a layout carry a workload at a rate within the SLO?"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

import msgspec

from hydrainfer.cache import CacheSizes, CacheSpec, Split
from hydrainfer.config import Slo
from hydrainfer.core import CostModel, Guessing, Layout, LifecycleEvent, Request, Stage
from hydrainfer.engine import EventSink, Overlap
from hydrainfer.judging import FAILED, Series, Verdict, at_quantile, delay_limit_s, judge
from hydrainfer.metrics import Timelines
from hydrainfer.planner.costs import slowed, with_steps
from hydrainfer.planner.nouns import Link, ServerCost, TraceRequest
from hydrainfer.planner.search.budgets import Choice, RequestShare, best_of
from hydrainfer.planner.simulation import InstanceModel, ServedRequest, Simulator, StoreModel, as_requests, at_rate
from hydrainfer.scheduler import Budgets, Policy

_OVERRUN = 4.0  # standard deviations of the queue that forms by chance at the edge of capacity


class Station(msgspec.Struct, frozen=True, kw_only=True):
    """The description of every instance of one role. `blocks`: the number of blocks per cache that its memory holds;
    `split`: how the caches share that memory; `host`: the number of blocks of each cache in host memory. `choices`: the
    budgets to choose from for each layout; () if `budgets` suit all layouts."""

    cost: CostModel
    blocks: Mapping[CacheSpec, int]
    split: Split | None = None
    host: Mapping[CacheSpec, int] = {}
    budgets: Budgets = Budgets()
    choices: tuple[Choice, ...] = ()

    @property
    def sizes(self) -> CacheSizes:
        return CacheSizes(dict(self.blocks), self.split)


class Study(msgspec.Struct, frozen=True, kw_only=True):
    """The workload, SLO and devices that layouts are judged by. `stations`: by role. `trace`: the workload, whose
    arrivals are stretched to each rate; `more`: other requests of the workload, for runs after the first. `target`: the
    share of requests that must meet the SLO. `patience_s`: the longest TTFT limit that runs will be judged by, if it is
    longer than the SLO's, so that no run is stopped that may still meet it. `drafts`: the guesses that steps verify.
    `store`: one that all instances share."""

    stations: Mapping[str, Station]
    trace: tuple[TraceRequest, ...]
    more: tuple[TraceRequest, ...] = ()
    slo: Slo
    target: float = 0.9
    patience_s: float = 0.0
    link: Link = Link()
    policy: Policy = Policy()
    overlap: Overlap = "free"
    balancing: str = "least_load"
    server: ServerCost = ServerCost()
    drafts: Guessing | None = None
    store: StoreModel | None = None

    def budgets(self, layout: Layout) -> dict[str, Budgets]:
        """The budgets of each role of the layout. They depend on the share of the work that an instance has there."""
        n_output = sum(t.n_output - 1 for t in self.trace) / len(self.trace)
        n = [
            sum(role.runs(stage) for role in layout.instances) for stage in (Stage.ENCODE, Stage.PREFILL, Stage.DECODE)
        ]
        chosen = {}
        for role in layout.instances:
            name = str(role)
            s = self.stations[str(role)]
            runs = (role.runs(Stage.ENCODE), role.runs(Stage.PREFILL), role.runs(Stage.DECODE))
            share = RequestShare(*(int(mine) / max(1, of) for mine, of in zip(runs, n)))
            chosen[name] = best_of(s.choices, share, self.slo, max(1.0, n_output)).budgets if s.choices else s.budgets
        return chosen

    def host_cost(self, layout: Layout) -> ServerCost:
        """The host costs of all servers of the layout."""
        first = Stage.ENCODE if any(t.pictures for t in self.trace) else Stage.PREFILL
        n = 1
        if self.server.each:
            n = sum(role.runs(first) for role in layout.instances)
        return self.server.times(n)

    def instances(self, layout: Layout, rate: float = 0.0) -> list[InstanceModel]:
        """The instances of the layout. `rate`: requests per second, whose server work slows instances on the same
        cores."""
        models = []
        budgets = self.budgets(layout)
        server = self.host_cost(layout)
        slowdown = server.slowdown(self.trace, len(layout.instances), rate)
        for n, role in enumerate(layout.instances):
            s = self.stations[str(role)]
            models.append(
                InstanceModel(
                    name=f"{role}{n}",
                    role=role,
                    cost=slowed(with_steps(s.cost, server.step_s), slowdown) if server.threads else s.cost,
                    blocks=s.blocks,
                    split=s.split,
                    host=s.host,
                    budgets=budgets[str(role)],
                    policy=self.policy,
                    overlap=self.overlap,
                    drafts=self.drafts if role.runs(Stage.DECODE) else None,
                )
            )
        return models

    def requests(self, rate: float) -> list[Request]:
        """The workload at `rate` requests per second."""
        specs = (spec for station in self.stations.values() for spec in station.blocks if spec.chained)
        block_tokens = next((spec.block_tokens for spec in specs), 1)
        return as_requests(at_rate(self.trace, rate), block_tokens)

    def shortened(self, n: int) -> Study:
        return msgspec.structs.replace(self, trace=self.trace[:n], more=())

    def run(self, k: int) -> Study:
        """The study for the run `k` (0, 1, …) at a rate. Each run is twice as long as the one before and shares no
        requests with others. Where the workload has too few requests, those of the trace and their gaps are resampled
        with replacement."""
        n = len(self.trace)
        first = n * (2**k - 2)
        last = n * (2 ** (k + 1) - 2)
        if k == 0:
            return self
        trace = self.more[first:last]
        if last > len(self.more):
            rng = random.Random(k)
            gaps = [b.arrival_s - a.arrival_s for a, b in pairwise(self.trace)] or [1.0]
            at_s = accumulate(rng.choices(gaps, k=last - first))
            trace = tuple(
                msgspec.structs.replace(t, arrival_s=s) for t, s in zip(rng.choices(self.trace, k=last - first), at_s)
            )
        else:
            begin_s = trace[0].arrival_s
            trace = tuple(msgspec.structs.replace(t, arrival_s=t.arrival_s - begin_s) for t in trace)
        return msgspec.structs.replace(self, trace=trace, more=())


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one rate. `n_met` of `n` requests met the SLO. `stopped`: the run was stopped when it was clear
    that too few would; then only requests judged by that time are counted, and there are no percentiles. Percentiles
    are in seconds. `tpot`: by the mean interval of each request; `interval`: by the interval that `slo.token_share` of
    a request's intervals do not exceed."""

    rate: float
    n: int
    n_met: int
    stopped: bool = False
    ttft_p50: float | None = None
    ttft_p90: float | None = None
    tpot_p50: float | None = None
    tpot_p90: float | None = None
    interval_p90: float | None = None

    def carried(self, target: float) -> bool:
        return not self.stopped and self.n_met >= target * self.n - 1e-9


def attempt(
    study: Study, layout: Layout, rate: float, *, hurry: bool = True, timelines: Timelines | None = None
) -> Attempt:
    """Simulate one rate. `hurry`: stop when more requests have missed the SLO than may. `timelines` records every
    event."""
    judges = _Judges(study, rate)

    def record(event: LifecycleEvent) -> None:
        assert timelines is not None
        timelines.record(event)

    watch = judges.hopeless if hurry else None
    simulator = judges.served_by(layout, watch, None if timelines is None else record)
    return _attempt(rate, judges, simulator, [verdict_of(s, study.slo) for s in simulator.served.values()])


class Trial(NamedTuple):
    """One run, summed up in `attempt` and request by request in `series`. `kept`: for each request, whether it met all
    limits but TTFT. `rest_s`: the seconds from the first token to the end, of each request that has ended."""

    attempt: Attempt
    series: Series
    kept: Sequence[bool]
    rest_s: Sequence[float]

    def under(self, slo: Slo) -> Trial:
        """The same run judged by an SLO with another TTFT limit, which must not exceed the limit by which the run may
        have been stopped."""
        most_s = math.inf if slo.ttft_s is None else slo.ttft_s
        met = [kept and delay_s <= most_s for kept, delay_s in zip(self.kept, self.series.delay_s)]
        n_met = self.attempt.n_met if self.attempt.stopped else sum(met)
        series = Series(self.series.at_s, self.series.delay_s, met, delay_limit_s(slo, self.rest_s))
        return self._replace(attempt=msgspec.structs.replace(self.attempt, n_met=n_met), series=series)


def observe(study: Study, layout: Layout, rate: float, *, hurry: bool = False) -> Trial:
    """Simulate one rate to the end, or until it is clear that a queue grows; with `hurry`, until more requests have
    missed the SLO than may."""
    judges = _Judges(study, rate)
    watch = judges.overrun
    if hurry:
        watch = judges.hopeless
    simulator = judges.served_by(layout, watch)
    served = [s for s in simulator.served.values() if s.arrival_s <= simulator.now]
    while served and not served[-1].token_s and not served[-1].finish:  # these may not have been scheduled yet
        served.pop()
    delays = [s.token_s[0] - s.arrival_s if s.token_s else math.inf for s in served]
    verdicts = [verdict_of(s, study.slo) for s in served]
    rest_s = [s.token_s[-1] - s.token_s[0] for s in served if s.finish and s.token_s]
    arrivals = [s.arrival_s for s in served]
    met = [v.met for v in verdicts]
    kept = [v.tpot and v.e2e for v in verdicts]
    series = Series(arrivals, delays, met, delay_limit_s(study.slo, rest_s))
    return Trial(_attempt(rate, judges, simulator, verdicts), series, kept, rest_s)


def simulated(study: Study, layout: Layout, rate: float) -> Simulator:
    """The simulator that has served all requests at `rate`."""
    return _Judges(study, rate).served_by(layout, None)


def served_at(study: Study, layout: Layout, rate: float) -> list[ServedRequest]:
    """All requests, served at `rate`, with their tokens."""
    return list(simulated(study, layout, rate).served.values())


def watched(
    study: Study,
    layout: Layout,
    rate: float,
    look: Callable[[Simulator, float], None],
    record: EventSink | None = None,
) -> Simulator:
    """Simulate one rate to the end; returns the simulator. `look` is called with it and the time at every heartbeat;
    `record` gets every lifecycle event."""
    judges = _Judges(study, rate)

    def watch(now: float) -> bool:
        look(judges.simulator, now)
        return False

    return judges.served_by(layout, watch, record)


def _attempt(rate: float, judges: _Judges, simulator: Simulator, verdicts: Sequence[Verdict]) -> Attempt:
    """The result of a run. `verdicts`: of all requests, if the run came to its end."""
    served = list(simulator.served.values())
    slo = judges.study.slo
    n = len(served)
    if simulator.n_done < n:
        n_judged = judges.n_missed + judges.n_met
        return Attempt(rate=rate, n=n_judged, n_met=judges.n_met, stopped=True)
    ttft = sorted(s.token_s[0] - s.arrival_s for s in served if s.token_s)
    tpot = sorted(t for s in served if (t := mean_interval_s(s)) is not None)
    return Attempt(
        rate=rate,
        n=n,
        n_met=sum(v.met for v in verdicts),
        ttft_p50=_quantile(ttft, 0.5),
        ttft_p90=_quantile(ttft, 0.9),
        tpot_p50=_quantile(tpot, 0.5),
        tpot_p90=_quantile(tpot, 0.9),
        interval_p90=_quantile(sorted(slowest_interval_s(s.token_s, slo) for s in served), 0.9),
    )


def verdict_of(s: ServedRequest, slo: Slo) -> Verdict:
    if s.finish != "length" or not s.token_s:
        return FAILED
    at = s.token_s
    return judge(slo, at[0] - s.arrival_s, token_intervals_s(at), at[-1] - s.arrival_s)


def token_intervals_s(token_s: Sequence[float]) -> list[float]:
    """The intervals between a request's tokens. Those of one step count as equally far apart, as in the load
    generator."""
    found: list[float] = []
    before = token_s[0] if token_s else 0.0
    for at, together in groupby(token_s[1:]):
        n = len(list(together))
        found += [(at - before) / n] * n
        before = at
    return found


def mean_interval_s(s: ServedRequest) -> float | None:
    """The TPOT of a request: mean seconds per token after the first."""
    n = len(s.token_s) - 1
    return (s.token_s[-1] - s.token_s[0]) / n if n > 0 else None


def slowest_interval_s(token_s: Sequence[float], slo: Slo) -> float:
    """The smallest TPOT limit that `slo.token_share` of a request's token intervals meet."""
    steps = sorted(token_intervals_s(token_s))
    if steps:
        return steps[max(1, math.ceil(slo.token_share * len(steps) - 1e-9)) - 1]
    return 0.0


def _quantile(ordered: Sequence[float], q: float) -> float | None:
    return at_quantile(ordered, q) if ordered else None


class _Judges:
    """A count of the requests that have certainly missed the SLO while the simulation runs. The TTFT limit is
    `patience_s` if that is longer than the SLO's. `simulator` is set by `served_by`."""

    simulator: Simulator

    def __init__(self, study: Study, rate: float) -> None:
        requests = study.requests(rate)
        self._served: dict[str, ServedRequest] = {}
        self.n_missed = self.n_met = 0
        ttft_s = study.slo.ttft_s
        self._slo = msgspec.structs.replace(study.slo, ttft_s=ttft_s and max(ttft_s, study.patience_s))
        self.study = study
        self._requests = requests
        self._rate = rate
        self._most = (1.0 - study.target) * len(requests) + 1e-9
        self._coming = [(r.arrival_s or 0.0, r.id) for r in reversed(requests)]
        self._open: list[ServedRequest] = []

    def served_by(
        self, layout: Layout, watch: Callable[[float], bool] | None, record: EventSink | None = None
    ) -> Simulator:
        study = self.study
        instances = study.instances(layout, self._rate)
        simulator = Simulator(
            instances, study.link, balancing=study.balancing, record=record, watch=watch, store=study.store
        )
        self.simulator, self._served = simulator, simulator.served
        ready_s = study.host_cost(layout).ready_s(at_rate(study.trace, self._rate), len(instances))
        simulator.run(self._requests, {r.id: s for r, s in zip(self._requests, ready_s)})
        return simulator

    def overrun(self, now: float) -> bool:
        """Whether more requests have missed than may, and more wait than would by chance, however often this is
        checked."""
        if not self.hopeless(now):
            return False
        n_wait = sum(not s.token_s for s in self._open)
        return n_wait > _OVERRUN * math.sqrt(2.0 * (len(self._requests) - len(self._coming)))

    def hopeless(self, now: float) -> bool:
        while self._coming and self._coming[-1][0] <= now:
            self._open.append(self._served[self._coming.pop()[1]])
        still: list[ServedRequest] = []
        ttft_s = self._slo.ttft_s
        for s in self._open:
            if s.finish:
                met = verdict_of(s, self._slo).met
                self.n_met += met
                self.n_missed += not met
            elif ttft_s is not None and not s.token_s and now - s.arrival_s > ttft_s:
                self.n_missed += 1
            else:
                still.append(s)
        self._open = still
        return self.n_missed > self._most
