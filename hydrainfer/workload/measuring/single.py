"""`hydrainfer bench`: one server, at given rates or in a search for its goodput."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from hydrainfer.config import Slo
from hydrainfer.core import ConfigError
from hydrainfer.judging import Search
from hydrainfer.machine import versions
from hydrainfer.workload.client import Endpoint, Stop
from hydrainfer.workload.measuring.session import DEAD_AFTER, Effort, Session, Traffic, Watcher, hopeless
from hydrainfer.workload.results import PACKAGES, BenchResult, Run, Server, hardware, now
from hydrainfer.workload.sources import Arrivals, Closed, Constant, Gamma, Poisson, Replay, Workload


class LoadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The loads of a server: each of `rates` with arrivals of `kind`, each `concurrency`, and a `replay`. With none of
    these, a search for goodput: from `first_rate` (None: half of what one request at a time makes) up to `max_rate`, to
    within `tolerance`, for at most `limit_s`."""

    kind: str = "poisson"
    burst_shape: float = 0.5
    rates: tuple[float, ...] = ()
    concurrency: tuple[int, ...] = ()
    replay: Replay | None = None
    first_rate: float | None = None
    max_rate: float = 1e4
    tolerance: float = 0.05
    target: float = 0.9
    max_runs: int = 3
    limit_s: float = math.inf

    def at(self, rate: float) -> Arrivals:
        """The arrivals at `rate`. Raises `ConfigError`."""
        kinds: dict[str, Callable[[], Arrivals]] = {
            "poisson": lambda: Poisson(rate),
            "constant": lambda: Constant(rate),
            "gamma": lambda: Gamma(rate, self.burst_shape),
        }
        if self.kind not in kinds:
            raise ConfigError(f"no arrivals {self.kind!r}: one of {', '.join(kinds)}, replay", param="arrivals")
        return kinds[self.kind]()

    def fixed(self) -> list[Arrivals]:
        """The arrivals that were given; none for a search. Raises `ConfigError`."""
        replay = [self.replay] if self.replay else []
        return [*(self.at(rate) for rate in self.rates), *(Closed(n) for n in self.concurrency), *replay]


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """All that `bench` was asked to do."""

    workload: Workload
    like: str | None = None
    slo: Slo | None = None
    load: LoadPlan = LoadPlan()
    effort: Effort = Effort()
    seed: int = 0
    runs: int = 1
    name: str = "server"


@contextlib.contextmanager
def until_interrupted(stop: Stop) -> Iterator[None]:
    """The first Ctrl-C (or SIGTERM) ends the load and keeps its results so far; the second ends the process."""
    loop = asyncio.get_running_loop()
    terminated = signal.getsignal(signal.SIGTERM)

    def give_up() -> None:
        for sig in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(sig)
        signal.signal(signal.SIGTERM, terminated)  # the loop leaves the default handler, which cleans nothing up

    def once(name: str) -> None:
        stop.now(f"interrupted ({name})")
        give_up()

    for sig in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(sig, once, sig.name)
    try:
        yield
    finally:
        give_up()


async def bench(
    asked: Asked,
    target: Endpoint,
    watch: Watcher,
    stop: Stop | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> BenchResult:
    """The result of the loads that were asked for. A server that dies midway ends them, and the results so far are
    kept. Raises `ConfigError` for invalid options and for a server that cannot be measured at all."""
    stop = Stop(DEAD_AFTER) if stop is None else stop
    fixed = asked.load.fixed()
    if not fixed and asked.runs > 1:
        why = "a search runs a rate again where it is undecided"
        raise ConfigError(f"--runs is for given loads: {why}; leave it out", param="runs")
    if not fixed and asked.slo is None:
        wanted = "one of --goodput ttft:250 tpot:40 (ms), --slo, --rate or --concurrency"
        raise ConfigError(f"give {wanted}; the server is {target.base_url}")
    traffic = Traffic(asked.workload, asked.like)
    session = Session(asked.name, target, traffic, asked.slo, asked.effort, stop, watch, clock)
    runs: list[Run] = []
    goodput = {}
    notes = []
    with until_interrupted(stop):
        await session.open(asked.seed << 20)
        why_not = ""
        if asked.slo:
            why_not = hopeless(session.unloaded, asked.slo)
        notes += [why_not] if why_not else []
        for round_ in range(asked.runs):
            for rank, arrivals in enumerate(fixed):
                if not stop.came:
                    run = await session.at(arrivals, seed_of(asked.seed, round_, rank), round_)
                    runs += [run] if run is not None else []
                    notes += [session.lacking] if session.lacking not in ("", *notes) else []
        if not fixed and not stop.came and not why_not:
            load = asked.load
            search = Search(
                load.first_rate or session.first_rate,
                target=load.target,
                tolerance=load.tolerance,
                max_rate=load.max_rate,
                max_runs=load.max_runs,
            )
            goodput[asked.name], _ = await session.search(
                search, seed_of(asked.seed, 0, 0), load.at, runs, load.limit_s
            )
    if session.lacking and not runs:
        raise ConfigError(session.lacking, param="requests")
    server = Server(name=asked.name, facts=session.facts, unloaded=session.unloaded)
    return BenchResult(
        title=f"{asked.name}: {asked.workload.dataset}",
        command=command_line(sys.argv),
        date=now(),
        seeds=tuple(sorted({asked.seed, *(run.seed for run in runs)})),
        workload=asked.workload,
        like=asked.like or "",
        slo=asked.slo,
        hardware=hardware(),
        versions=versions(PACKAGES),
        servers=(server,),
        runs=tuple(runs),
        goodput=goodput,
        stopped=stop.reason,
        notes=tuple(notes),
    )


def seed_of(seed: int, round_: int, rank: int) -> int:
    """The seed of the traffic of one run: the same for every server, and different from all other runs."""
    return (seed << 20) + (round_ + 1) * 10_000 + rank * 100


def command_line(argv: Sequence[str]) -> str:
    return without_key(shlex.join(["hydrainfer", *argv[1:]]))


def without_key(command: str) -> str:
    """The command without its API key, for results, which are passed on to others."""
    return re.sub(r"""(--api-key[= ]['"]?)[^\s'"]+""", r"\1…", command)
