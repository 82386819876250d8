"""One question to the simulator: does this layout carry this workload at this rate within the SLO?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec

from hydrainfer.cache import CacheSpec
from hydrainfer.cluster.roster import Balancing
from hydrainfer.config import Slo
from hydrainfer.core import CostModel, Layout, LifecycleEvent, Request
from hydrainfer.engine import Overlap
from hydrainfer.metrics import FAILED, Timelines, Verdict, effective_n, judge
from hydrainfer.planner.simulation import (
    InstanceModel,
    Link,
    ServedRequest,
    Simulator,
    TraceRequest,
    as_requests,
    at_rate,
)
from hydrainfer.scheduler import Budgets, Policy


class Station(msgspec.Struct, frozen=True, kw_only=True):
    """The description of every instance of one role: `blocks` per cache, as many as its memory holds."""

    cost: CostModel
    blocks: Mapping[CacheSpec, int]
    budgets: Budgets = Budgets()


class Study(msgspec.Struct, frozen=True, kw_only=True):
    """The workload, SLO and devices that layouts are judged by. `stations` by role. `trace`: the workload, whose
    arrivals are stretched to each rate. `target`: the share of requests that has to meet the SLO."""

    stations: Mapping[str, Station]
    trace: tuple[TraceRequest, ...]
    slo: Slo
    target: float = 0.9
    link: Link = Link()
    policy: Policy = Policy()
    overlap: Overlap = "free"
    balancing: Balancing = "least_load"

    def instances(self, layout: Layout) -> list[InstanceModel]:
        found = []
        for n, role in enumerate(layout.instances):
            s = self.stations[str(role)]
            found.append(
                InstanceModel(
                    name=f"{role}{n}",
                    role=role,
                    cost=s.cost,
                    blocks=s.blocks,
                    budgets=s.budgets,
                    policy=self.policy,
                    overlap=self.overlap,
                )
            )
        return found

    def requests(self, rate: float) -> list[Request]:
        """The workload at `rate` requests per second."""
        specs = (spec for station in self.stations.values() for spec in station.blocks if spec.chained)
        block_tokens = next((spec.block_tokens for spec in specs), 1)
        return as_requests(at_rate(self.trace, rate), block_tokens)

    def shortened(self, n: int) -> Study:
        return msgspec.structs.replace(self, trace=self.trace[:n])


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One rate tried. `n_met` of `n` requests met the SLO, and scattered as `n_effective` independent ones would;
    `stopped`: given up when it was clear that too few would: only those that were judged by then are counted, and there
    are no percentiles, which are in seconds."""

    rate: float
    n: int
    n_met: int
    n_effective: float
    stopped: bool = False
    ttft_p50: float | None = None
    ttft_p90: float | None = None
    tpot_p50: float | None = None
    tpot_p90: float | None = None

    def carried(self, target: float) -> bool:
        return not self.stopped and self.n_met >= target * self.n - 1e-9


def attempt(
    study: Study, layout: Layout, rate: float, *, hurry: bool = True, timelines: Timelines | None = None
) -> Attempt:
    """One rate, simulated. `hurry`: stop when more have missed than may. `timelines` hear of every event."""
    requests = study.requests(rate)

    def record(event: LifecycleEvent) -> None:
        assert timelines is not None
        timelines.record(event)

    judges = _Judges(study, requests)
    simulator = Simulator(
        study.instances(layout),
        study.link,
        balancing=study.balancing,
        record=None if timelines is None else record,
        watch=judges.hopeless if hurry else None,
    )
    judges.served = simulator.served
    served = simulator.run(requests)
    n = len(requests)
    if simulator.n_done < n:
        n_judged = judges.n_missed + judges.n_met
        return Attempt(rate=rate, n=n_judged, n_met=judges.n_met, n_effective=float(n_judged), stopped=True)
    met = [verdict_of(s, study.slo).met for s in served]
    ttft = sorted(s.token_s[0] - s.arrival_s for s in served if s.token_s)
    tpot = sorted(t for s in served if (t := mean_interval_s(s)) is not None)
    return Attempt(
        rate=rate,
        n=n,
        n_met=sum(met),
        n_effective=effective_n(met),
        ttft_p50=_quantile(ttft, 0.5),
        ttft_p90=_quantile(ttft, 0.9),
        tpot_p50=_quantile(tpot, 0.5),
        tpot_p90=_quantile(tpot, 0.9),
    )


def verdict_of(s: ServedRequest, slo: Slo) -> Verdict:
    if s.finish != "length" or not s.token_s:
        return FAILED
    at = s.token_s
    return judge(slo, at[0] - s.arrival_s, [b - a for a, b in pairwise(at)], at[-1] - s.arrival_s)


def mean_interval_s(s: ServedRequest) -> float | None:
    """TPOT: mean seconds per token after the first."""
    n = len(s.token_s) - 1
    return (s.token_s[-1] - s.token_s[0]) / n if n > 0 else None


def _quantile(ordered: Sequence[float], q: float) -> float | None:
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else None


class _Judges:
    """Counts requests that have missed for certain, while the simulation runs."""

    def __init__(self, study: Study, requests: Sequence[Request]) -> None:
        self.served: dict[str, ServedRequest] = {}
        self.n_missed = self.n_met = 0
        self._slo = study.slo
        self._most = (1.0 - study.target) * len(requests) + 1e-9
        self._coming = [(r.arrival_s or 0.0, r.id) for r in reversed(requests)]
        self._open: list[ServedRequest] = []

    def hopeless(self, now: float) -> bool:
        while self._coming and self._coming[-1][0] <= now:
            self._open.append(self.served[self._coming.pop()[1]])
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
