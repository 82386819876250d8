"""Studies of the paper's cases, and simulations of them, each of which is run once and kept."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from copy import copy
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import msgspec

from benchmarks.record import ROOT
from hydrainfer.config import Slo
from hydrainfer.config.slo import read_slo
from hydrainfer.core import Layout
from hydrainfer.engine import Overlap
from hydrainfer.planner.costs import Hardware, read_hardware
from hydrainfer.planner.inputs import prompts_of, shape_of, trace_of
from hydrainfer.planner.nouns import TraceRequest
from hydrainfer.planner.search import Bounds, Study, bracket, layouts, mean_interval_s, method_of, narrow, study_of
from hydrainfer.planner.simulation import ServedRequest, Simulator, as_requests, at_rate
from hydrainfer.scheduler import Budgets, Policy
from hydrainfer.workload.sources import read_workload

GPUS = 8
MODELS = ("llava-1.5-7b", "llava-next-7b", "qwen2-vl-7b")
DATASETS = ("mme", "pope", "textcaps", "textvqa", "vizwiz")
TRACE = 4000  # requests, of which a run takes the first
SPANS = 5.0  # TTFT SLOs that a run should last
SEED = 0
CACHE = ROOT / ".cache" / "paper"

EAGER_STEP_BASE_S = 19e-3
SETTINGS = ("roofline", "eager")
"""`roofline`: configs/hardware/h800.yaml, where the memory traffic of a batch hides behind its arithmetic. `additive`:
the same numbers, with one change: it does not. `eager`: nor do the launches of a step, whose length is fitted to one
bar of Figure 14 (8 EPD, stage-level), the only number that is taken from the paper's results."""


class System(NamedTuple):
    """How instances schedule: first come, first served, as the paper's. `budgets` None: by the SLOs, as section 4.2
    says."""

    overlap: Overlap = "free"
    policy: Policy = Policy(order="fcfs")
    budgets: Budgets | None = None


SYSTEMS = {
    "stage-level": System(),
    "stage-level, joined lanes": System("step"),
    "decode-first": System(
        "off", Policy(order="fcfs", encode_wait_s=0.0), Budgets(tokens=2048, images=16, image_tokens=2048)
    ),
    "prefill-first": System(
        "off",
        Policy(order="fcfs", encode_wait_s=0.0, batching="prefill-first"),
        Budgets(tokens=5120, images=16, image_tokens=5120),
    ),
}
"""`decode-first`: chunks beside decodes within 2,048 tokens, pictures encoded between the steps (like vLLM v1).
`prefill-first`: pictures, then whole prompts within 5,120 tokens, and decodes when neither is left (like vLLM v0).
Budgets are those projects' defaults, whatever the SLO."""


class Case(NamedTuple):
    """`slo`: what budgets are for; what a run is judged by may differ."""

    model: str
    dataset: str
    slo: Slo
    setting: str = "roofline"
    system: str = "stage-level"


class Sample(NamedTuple):
    """One run. Of each request, in seconds: time to first token, the interval that 90 % of its intervals do not exceed
    and the mean one (both 0 for a single token)."""

    rate: float
    ttft_s: list[float]
    interval_s: list[float]
    mean_interval_s: list[float]

    def attainment(self, slo: Slo, spans: float = SPANS) -> float:
        """Share of the requests that meet the SLO, had the run lasted `spans` times the TTFT SLO. If it was shorter,
        and TTFT rose in its second half, it is taken to rise so further, and nobody meets it once it is beyond."""
        ttft, tpot = slo.ttft_s or math.inf, slo.tpot_s or math.inf
        met = sum(t <= ttft and i <= tpot for t, i in zip(self.ttft_s, self.interval_s)) / len(self.ttft_s)
        lasted_s, wanted_s, rise = len(self.ttft_s) / self.rate, spans * ttft, self.rise
        if rise <= 0.0 or not lasted_s < wanted_s < math.inf:
            return met
        until_s = lasted_s + max(0.0, ttft - self.last_s) / rise
        return met * min(1.0, max(lasted_s, until_s) / wanted_s)

    @property
    def last_s(self) -> float:
        """Mean TTFT of the last quarter."""
        return fmean(self.ttft_s[-(len(self.ttft_s) // 4) :])

    @property
    def rise(self) -> float:
        """Seconds of TTFT per second, from the third quarter to the last: above 0 while a queue grows."""
        size = len(self.ttft_s) // 4
        return (self.last_s - fmean(self.ttft_s[-2 * size : -size])) / (size / self.rate)


class Goodput(NamedTuple):
    """Of a layout: requests per second of all GPUs, 90 % of which meet the SLO; and the runs that led there."""

    layout: str
    rate: float
    bound: float
    n_requests: int
    tried: list[tuple[float, float]]  # rate, attainment

    @property
    def per_gpu(self) -> float:
        return self.rate / GPUS


def device(setting: str) -> Hardware:
    h800 = read_hardware("h800")
    base_s = EAGER_STEP_BASE_S if setting == "eager" else h800.step_base_s
    return msgspec.structs.replace(h800, hides_traffic=setting == "roofline", step_base_s=base_s)


@lru_cache
def trace(model: str, dataset: str) -> tuple[TraceRequest, ...]:
    return tuple(trace_of(read_workload(dataset), prompts_of(model), TRACE, SEED))


def table_3(model: str, dataset: str) -> Slo:
    return read_slo(ROOT / "configs" / "slo" / f"{model}.yaml", dataset)


@lru_cache(256)
def study_for(case: Case) -> Study:
    requests = trace(case.model, case.dataset)[:1000]
    study = study_of(shape_of(case.model), device(case.setting), requests, case.slo)
    system = SYSTEMS[case.system]
    stations = study.stations
    if system.budgets is not None:
        stations = {
            role: msgspec.structs.replace(s, budgets=system.budgets, choices=()) for role, s in stations.items()
        }
    return msgspec.structs.replace(study, stations=stations, overlap=system.overlap, policy=system.policy)


@lru_cache(1024)
def bound_of(case: Case, layout: str) -> float:
    return Bounds(study_for(case)).of(Layout.parse(layout)).rate


def short(layout: Layout) -> str:
    """The layout as the paper writes it: 1EP7D."""
    return str(layout).replace("+", "")


def candidates(case: Case, per_method: int, mixed: bool = True) -> list[str]:
    """Of every method, the layouts with the highest bounds, even ratios first; and, if `mixed`, of each beside EPD."""
    by_method: dict[str, list[Layout]] = {}
    for layout in layouts(GPUS):
        by_method.setdefault(method_of(layout), []).append(layout)
    found: list[str] = []
    for method, some in by_method.items():
        if mixed or "+ EPD" not in method:
            some.sort(
                key=lambda x: (-round(bound_of(case, str(x)), 3), sum(str(role) == "EPD" for role in x.instances))
            )
            found += map(short, some[:per_method])
    return found


class Lab:
    """Runs simulations, or remembers them: in `folder`, by everything that they depend on but the code."""

    def __init__(self, n_requests: int = 1000, folder: Path | None = CACHE) -> None:
        """`n_requests`: of a run, where nothing else is said. Without a folder nothing is kept."""
        self._path = folder / "samples.jsonl" if folder is not None else None
        self.n_requests = n_requests
        self._known: dict[str, Sample] = {}
        if self._path is not None and self._path.exists():
            for line in self._path.read_text().splitlines():
                key, *values = json.loads(line)
                self._known[key] = Sample(*values)

    def sized(self, n_requests: int) -> Lab:
        """The same, with other runs where nothing else is said."""
        other = copy(self)
        other.n_requests = n_requests
        return other

    def run(self, case: Case, layout: str, rate: float, n: int) -> Sample:
        """The first `n` requests at `rate` per second."""
        study = study_for(case)
        rate = float(f"{rate:.4g}")
        key = _key(case, study, layout, rate, n)
        if key not in self._known:
            self._known[key] = sample = _simulate(case, study, layout, rate, n)
            self._keep(key, sample)
        return self._known[key]

    def _keep(self, key: str, sample: Sample) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                print(json.dumps([key, *sample]), file=file)

    def goodput(self, case: Case, layout: str, *, at_least: float = 0.0, tolerance: float = 0.04) -> Goodput:
        """Rates at or above the bound are not tried: a queue would grow for ever. Below `at_least`, it is only tried
        whether that is carried: 0 if not."""
        bound = bound_of(case, layout)
        n = self.n_requests
        tried: dict[float, float] = {}

        def carries(rate: float) -> bool:
            tried[rate] = self.run(case, layout, rate, n).attainment(case.slo)
            return tried[rate] >= 0.9

        low = 0.0
        if not at_least or (at_least < bound and carries(at_least)):
            low, high = bracket(carries, at_least, max(at_least, bound * 0.9), bound, 1.2)
            low, _ = narrow(carries, low, high, tolerance)
        return Goodput(layout, low, bound, n, sorted(tried.items()))

    def best(self, case: Case, layouts: Sequence[str]) -> Goodput:
        """Of several layouts, by bounds in descending order."""
        best: Goodput | None = None
        for layout in sorted(layouts, key=lambda name: -bound_of(case, name)):
            found = self.goodput(case, layout, at_least=best.rate * 1.01 if best is not None else 0.0)
            best = found if best is None or found.rate > best.rate else best
        assert best is not None
        return best


def _key(case: Case, study: Study, layout: str, rate: float, n: int) -> str:
    """Budgets of roles that the layout has not make no difference."""
    roles = sorted({str(role) for role in Layout.parse(layout).instances})
    budgets = study.budgets(Layout.parse(layout))
    stations = [(role, study.stations[role].cost, budgets[role]) for role in roles]
    blocks = [sorted((spec.name, n) for spec, n in study.stations[role].blocks.items()) for role in roles]
    what: list[Any] = [
        case.model,
        case.dataset,
        stations,
        blocks,
        study.policy,
        study.overlap,
        str(Layout.parse(layout)),
        rate,
        n,
        SEED,
    ]
    return hashlib.sha256(msgspec.json.encode(what)).hexdigest()[:16]


def _simulate(case: Case, study: Study, layout: str, rate: float, n: int) -> Sample:
    requests = as_requests(at_rate(trace(case.model, case.dataset)[:n], rate))
    simulator = Simulator(study.instances(Layout.parse(layout)), study.link, balancing=study.balancing)
    served = simulator.run(requests)
    assert all(s.finish == "length" for s in served), "a request was refused"
    ttft = [s.token_s[0] - s.arrival_s for s in served]
    means = [mean_interval_s(s) or 0.0 for s in served]
    return Sample(rate, *([round(v, 5) for v in column] for column in (ttft, [slo_interval(s) for s in served], means)))


def slo_interval(s: ServedRequest, share: float = 0.9) -> float:
    """The least TPOT SLO that the request meets."""
    intervals = sorted(b - a for a, b in pairwise(s.token_s))
    return intervals[math.ceil(share * len(intervals) - 1e-9) - 1] if intervals else 0.0


def crossing(points: list[tuple[float, float]], target: float = 0.9) -> float:
    """Where the attainment falls below `target`, between the rates that were run; 0 if it never reaches it. Rates
    ascend."""
    best = 0.0
    for (rate, share), (next_rate, next_share) in pairwise([*points, (math.inf, math.nan)]):
        if share < target:
            break
        best = rate
        if next_share < target:
            best = rate + (next_rate - rate) * (share - target) / (share - next_share)
    return best
