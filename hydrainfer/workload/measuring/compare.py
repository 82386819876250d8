"""`hydrainfer bench compare`: rounds of deployments in turn on the same hardware, with the same traffic."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from hydrainfer.config import Slo, converted, read_yaml
from hydrainfer.core import ConfigError
from hydrainfer.judging import Goodput, Search, Series
from hydrainfer.machine import versions
from hydrainfer.workload.client import Endpoint, Stop
from hydrainfer.workload.deployments import (
    Deployment,
    HardwareSlice,
    Noise,
    ServerFailed,
    ServerProcess,
    command_of,
    running,
)
from hydrainfer.workload.measuring.session import DEAD_AFTER, Effort, Session, Traffic, Watcher, hopeless
from hydrainfer.workload.measuring.single import LoadPlan, command_line, seed_of, until_interrupted, without_key
from hydrainfer.workload.results import PACKAGES, BenchResult, Run, Server, hardware, now
from hydrainfer.workload.sources import Workload


class ComparisonPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A comparison as a file of benchmarks/compare describes it. `layouts`: each becomes a deployment of the same name
    with `flags`; `servers`: other deployments. Every round starts each deployment afresh, in another order, and runs
    all `rates`. Rates above one at which attainment fell below `give_up_below` are left out for that deployment.
    `workload`, `slo`, `like`, `data`, `pictures`: as the options of `bench`. `target`: the share of the requests that
    has to meet the SLO. `notes`: go into the report."""

    title: str = "Comparison"
    layouts: tuple[str, ...] = ()
    servers: tuple[Deployment, ...] = ()
    flags: str = ""
    place: HardwareSlice = HardwareSlice()
    workload: str = "textcaps"
    data: str | None = None
    pictures: str | None = None
    like: str | None = None
    slo: str = ""
    target: float = 0.9
    arrivals: str = "poisson"
    burst_shape: float = 0.5
    rates: tuple[float, ...] = ()
    rounds: int = 3
    requests: int = 60
    min_s: float | None = None
    timeout_s: float = 600.0
    give_up_below: float = 0.3
    seed: int = 1
    notes: tuple[str, ...] = ()

    def deployments(self) -> tuple[Deployment, ...]:
        """All deployments to compare. Raises `ConfigError` if there are none, or two of the same name."""
        ours = tuple(Deployment(name=Path(layout).stem, layout=layout, flags=self.flags) for layout in self.layouts)
        every = ours + self.servers
        names = [one.name for one in every]
        if not every or len(set(names)) < len(names):
            raise ConfigError("a comparison needs --layouts or --server, each with a name of its own", param="layouts")
        return every


def read_plan(path: Path | None, given: dict[str, Any]) -> ComparisonPlan:
    """The plan in a file, in which the values of `given` replace the file's. Raises `ConfigError`."""
    content = read_yaml(path) if path else {}
    place = content.get("place", {})
    given_place = given.pop("place", {})
    if isinstance(place, dict):
        place = {**place, **given_place}
    return converted({**content, **given, "place": place}, ComparisonPlan, str(path or "the plan"), "config")


class Comparison:
    """The runner of a plan. `say` gets one line at a time."""

    def __init__(
        self,
        plan: ComparisonPlan,
        workload: Workload,
        slo: Slo,
        effort: Effort,
        watch: Watcher,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Raises `ConfigError` for a plan that cannot be run."""
        if not plan.rates:
            raise ConfigError("a comparison needs the rates to run: --rates 1,2,4", param="rates")
        self._plan = plan
        self._workload = workload
        self._slo = slo
        self._effort = effort
        self._deployments = plan.deployments()
        self._load = LoadPlan(kind=plan.arrivals, burst_shape=plan.burst_shape, rates=tuple(sorted(plan.rates)))
        self._load.fixed()
        self._search()  # refuses a target that is not a share
        self._cores = plan.place.core_set
        self._traffic = Traffic(workload, plan.like)
        self._watch = watch
        self._say = say
        self._clock = clock
        self._servers: dict[str, Server] = {}
        self._runs: list[Run] = []
        self._series: list[tuple[str, float, Series]] = []  # by server and rate
        self._too_much: dict[str, float] = {}
        self._notes: list[str] = []

    def prepare(self) -> None:
        """Draw the pictures of all rates now, before there is an event loop or a server that would wait for them."""
        self._traffic.of(self._effort.unloaded + self._effort.warmup, self._plan.seed << 20)
        for round_ in range(self._plan.rounds):
            for rank, rate in enumerate(self._load.rates):
                self._traffic.of(self._effort.n_at(rate), seed_of(self._plan.seed, round_, rank))

    async def run(self) -> BenchResult:
        """The result, even of a comparison that was interrupted. A deployment that fails is left out from then on."""
        stop = Stop()
        with tempfile.TemporaryDirectory() as logs, until_interrupted(stop):
            for round_ in range(self._plan.rounds):
                for one in _rotated(self._deployments, round_):
                    if stop.came or self._failed(one):
                        continue
                    try:
                        await self._one(one, round_, stop, Path(logs) / one.name.replace("/", "_"))
                    except (ServerFailed, ConfigError) as e:
                        self._fail(one, str(e))
        return self._result(stop)

    async def _one(self, one: Deployment, round_: int, stop: Stop, log: Path) -> None:
        self._say(f"round {round_ + 1} of {self._plan.rounds}: {one.name}" + (" is started" if not one.url else ""))
        mine = Stop(DEAD_AFTER, stop)
        async with running(one, self._plan.place, log) as (url, process):
            target = Endpoint(base_url=url, model=one.model, timeout_s=self._effort.timeout_s)
            session = Session(one.name, target, self._traffic, self._slo, self._effort, mine, self._watch, self._clock)
            await session.open(self._plan.seed << 20)
            if one.name not in self._servers:
                self._servers[one.name] = self._described(one, session, process)
                why_not = hopeless(session.unloaded, self._slo)
                self._notes += [f"{one.name}: {why_not}"] if why_not else []
            for rank, rate in enumerate(self._load.rates):
                if not mine.came and rate <= self._too_much.get(one.name, rate):
                    noise = Noise(process)
                    run = await session.at(self._load.at(rate), seed_of(self._plan.seed, round_, rank), round_)
                    if run is None:
                        self._notes += [session.lacking] if session.lacking not in ("", *self._notes) else []
                        break
                    self._runs.append(msgspec.structs.replace(run, others_cores=noise.others_cores()))
                    if mine.came:  # a partial run would be judged as a whole one
                        break
                    if session.series is not None:
                        self._series.append((one.name, rate, session.series))
                    if run.attainment and run.attainment.met.share < self._plan.give_up_below:
                        self._too_much[one.name] = min(rate, self._too_much.get(one.name, rate))
            if mine.came and not stop.came:
                log_end = ""
                if process:
                    log_end = f"\n{process.log_tail()}"
                raise ServerFailed(f"{mine.reason}{log_end}")

    def _described(self, one: Deployment, session: Session, process: ServerProcess | None) -> Server:
        place = self._plan.place
        n = one.n_instances
        threads = one.threads if not one.layout else f"{place.threads}" if n is not None else "see the layout's file"
        command = "" if process is None else one.start or " ".join(command_of(one, place, 0)).replace("--port 0 ", "")
        return Server(
            name=one.name,
            facts=session.facts,
            layout=one.layout,
            n_instances=n or max(1, len(session.facts.instances)),
            command=without_key(command),
            cores=",".join(str(c) for c in sorted(self._cores)) if process else "",
            threads_per_instance=threads,
            startup_s=process.startup_s if process else None,
            unloaded=session.unloaded,
        )

    def _failed(self, one: Deployment) -> bool:
        return one.name in self._servers and bool(self._servers[one.name].failed)

    def _fail(self, one: Deployment, why: str) -> None:
        self._say(f"{one.name} failed: {why}")
        known = self._servers.get(one.name, Server(name=one.name, layout=one.layout))
        self._servers[one.name] = msgspec.structs.replace(known, failed=why)

    def _result(self, stop: Stop) -> BenchResult:
        return BenchResult(
            title=self._plan.title,
            command=command_line(sys.argv),
            date=now(),
            seeds=tuple(sorted({run.seed for run in self._runs})),
            workload=self._workload,
            like=self._plan.like or "",
            slo=self._slo,
            hardware=hardware(),
            versions=versions(PACKAGES),
            servers=tuple(self._servers[one.name] for one in self._deployments if one.name in self._servers),
            runs=tuple(self._runs),
            goodput=dict(self._goodputs()),
            stopped=stop.reason,
            notes=(*self._plan.notes, *self._notes, *self._unequal()),
        )

    def _goodputs(self) -> Iterator[tuple[str, Goodput]]:
        """The goodput of each deployment, on the grid of the rates that were run."""
        for one in self._deployments:
            results = [(rate, series) for name, rate, series in self._series if name == one.name]
            if results:
                search = self._search()
                for rate, series in results:
                    search.tell(rate, series)
                yield one.name, search.result()

    def _search(self) -> Search:
        """A search for the goodput of a deployment, without runs. Raises `ConfigError`."""
        return Search(self._load.rates[0], target=self._plan.target)

    def _unequal(self) -> list[str]:
        """A note if the layouts do not have equal hardware."""
        counts = {one.n_instances for one in self._deployments if one.n_instances is not None}
        per_instance = "emulated" in self._plan.flags or self._plan.place.gpus is not None
        if len(counts) > 1 and per_instance:
            return [
                "The layouts have different numbers of instances, each with a device of its own: hardware is NOT equal."
            ]
        return []


def _rotated(deployments: Sequence[Deployment], round_: int) -> Sequence[Deployment]:
    """The deployments in another order in every round, so that none always follows the same one."""
    k = round_ % len(deployments)
    return [*deployments[k:], *deployments[:k]]
