"""The result of a benchmark as written to JSON: runs, servers, goodput, and all that is needed to repeat it."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from hydrainfer.config import Slo
from hydrainfer.judging import Goodput
from hydrainfer.machine import cpu_name, memory_bytes, n_cores
from hydrainfer.workload.client import LoadResult, ServerFacts
from hydrainfer.workload.results.attribution import Breakdown, Reference, breakdown_of
from hydrainfer.workload.results.judged import Attainment, attainment_of
from hydrainfer.workload.results.report import LoadReport, report_of
from hydrainfer.workload.sources import Workload, label

LATE_S = 0.05
"""A run is reported as late if the 99th percentile of the client's lag behind its schedule exceeds this."""
NOISY_CORES = 0.2
"""A run is reported as disturbed if other processes took more cores than this on average."""
N_CURVE = 101
PACKAGES = ("hydrainfer", "torch", "transformers", "numpy", "msgspec", "httptools", "uvloop", "ray")


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One load of one server. `rate_per_s`: the rate asked for; None in a closed loop. `curves`: values in seconds at
    the quantiles 0, 0.01, … 1 of TTFT and token intervals. `client_late`: the client lagged behind, so the load was not
    as intended. `others_cores`: mean cores that other processes of the machine took meanwhile; None if not known."""

    server: str
    arrivals: str
    rate_per_s: float | None
    round: int
    seed: int
    report: LoadReport
    attainment: Attainment | None = None
    breakdown: Breakdown | None = None
    curves: dict[str, tuple[float, ...]] = {}
    client_late: bool = False
    others_cores: float | None = None


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """A deployment that was loaded. `command`, `layout`, `cores`, `threads_per_instance`, `startup_s`: of a server that
    was started for the benchmark. `unloaded`: report of the requests sent one at a time. `failed`: why it could not be
    measured."""

    name: str
    facts: ServerFacts | None = None
    layout: str = ""
    n_instances: int = 1
    command: str = ""
    cores: str = ""
    threads_per_instance: str = ""
    startup_s: float | None = None
    unloaded: LoadReport | None = None
    failed: str = ""


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    """The whole result. `goodput`: by server. `stopped`: why the benchmark ended early."""

    title: str
    command: str
    date: str
    seeds: tuple[int, ...]
    workload: Workload
    like: str
    slo: Slo | None
    hardware: dict[str, Any]
    versions: dict[str, str]
    servers: tuple[Server, ...]
    runs: tuple[Run, ...]
    goodput: dict[str, Goodput] = {}
    stopped: str = ""
    notes: tuple[str, ...] = ()

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


def run_of(server: str, result: LoadResult, slo: Slo | None, reference: Reference, round_: int = 0) -> Run:
    """The numbers of one load; raw records are not kept."""
    report = report_of(result)
    records = result.records
    ok = [r for r in records if r.ok]
    curves = {
        "ttft": _curve([r.ttft_s for r in ok if r.ttft_s is not None]),
        "tpot": _curve([s for r in ok for s in r.token_interval_s]),
    }
    return Run(
        server=server,
        arrivals=label(result.arrivals),
        rate_per_s=getattr(result.arrivals, "rate_per_s", None),
        round=round_,
        seed=result.seed,
        report=report,
        attainment=attainment_of(records, slo) if slo and records else None,
        breakdown=breakdown_of(records, slo, reference),
        curves={name: curve for name, curve in curves.items() if curve},
        client_late=report.late_s is not None and report.late_s.p99 > LATE_S,
    )


def _curve(samples: list[float]) -> tuple[float, ...]:
    """The quantiles 0, 0.01, … 1 of the samples, or () if there are none. Six digits are enough for a figure."""
    if not samples:
        return ()
    return tuple(round(float(x), 6) for x in np.quantile(samples, np.linspace(0.0, 1.0, N_CURVE)))


def by_rate(runs: Sequence[Run], server: str) -> dict[float, list[Run]]:
    """The runs of one server by their rate, ascending."""
    runs_of: dict[float, list[Run]] = {}
    for run in sorted(
        (r for r in runs if r.server == server and r.rate_per_s is not None), key=lambda r: r.rate_per_s or 0
    ):
        runs_of.setdefault(run.rate_per_s or 0.0, []).append(run)
    return runs_of


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def hardware() -> dict[str, Any]:
    """The machine that this process, the client, runs on."""
    load = None
    if hasattr(os, "getloadavg"):
        load = os.getloadavg()[0]
    memory = round(memory_bytes() / 2**30, 1)
    return {"cpu": cpu_name(), "cores": n_cores(), "memory_gib": memory, "load_before": load}
