"""Runs the study that was asked for and puts the answer together."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Sequence

import msgspec

from hydrainfer.core import ConfigError, Layout
from hydrainfer.planner.costfile import CostFile
from hydrainfer.planner.deployment import layout_file
from hydrainfer.planner.grid import grid_of
from hydrainfer.planner.objectives import check_possible, least_devices, ranked_at
from hydrainfer.planner.plan import Cell, Plan, rows_of
from hydrainfer.planner.ratios import rate_for_ratios, ratios_of
from hydrainfer.planner.search import Progress, search
from hydrainfer.planner.study import Study
from hydrainfer.planner.workloads import summary
from hydrainfer.profiling.question import Prepared
from hydrainfer.version import __version__

_LONG = 5.0  # times the TTFT SLO: a trace that is shorter has no time to show that a queue grows
_GRID = (0.5, 1.0, 2.0, 4.0)  # times the limits of the SLO


def answer(
    asked: Prepared,
    *,
    on_progress: Progress,
    command: str,
    n_processes: int | None = None,
    exhaustive: bool = False,
    ratios: bool = False,
    grid: bool = False,
) -> tuple[Plan, Study]:
    """`ratios`, `grid`: with what the figures of a report need. Raises `ConfigError`, also if nothing can meet the SLO
    even without load: then it says which stage is to blame. The study is that of the devices in the plan."""
    q, begin_s = asked.question, time.perf_counter()
    ttft_s, tpot_s = asked.slo.ttft_s, asked.slo.tpot_s
    if grid and (ttft_s is None or tpot_s is None):
        raise ConfigError("--grid needs limits for both TTFT and TPOT", param="grid")
    study, n_devices, notes = asked.study(), q.devices, []
    candidates = asked.candidates(study)
    check_possible(study, candidates)
    if q.objective == "goodput":
        found = search(study, candidates, n_processes=n_processes, exhaustive=exhaustive, on_progress=on_progress)
        best = max((f.goodput or 0.0 for f in found), default=0.0)
        if best and study.slo.ttft_s and q.requests / best < _LONG * study.slo.ttft_s:
            wanted = int(best * _LONG * study.slo.ttft_s / 500 + 1) * 500
            notes.append(
                f"{q.requests} requests at {best:.3g}/s last {q.requests / best:.3g} s, which is short for a TTFT SLO "
                f"of {study.slo.ttft_s:g} s: queues hardly have the time to grow. Confirm with --requests {wanted}."
            )
    elif q.objective == "devices":
        assert q.rate is not None
        studies = [(s := asked.study(n_devices=n), _fitting(asked, s, n)) for n in range(1, q.devices + 1)]
        n_devices, found = least_devices(studies, q.rate, n_processes=n_processes, on_progress=on_progress)
        study = studies[n_devices - 1][0]
        if not n_devices:
            n_devices = q.devices
            notes.append(f"{q.rate:g} requests/s are more than {q.devices} devices carry within the SLO.")
    else:
        assert q.rate is not None
        found = ranked_at(study, candidates, q.rate, q.objective, n_processes=n_processes, on_progress=on_progress)
    on_progress("explain", 0, 1)
    rows = rows_of(study, found)
    rate = q.rate or rate_for_ratios(rows)
    cells: tuple[Cell, ...] = ()
    if grid and ttft_s is not None and tpot_s is not None:
        limits = [[by * limit_s for by in _GRID] for limit_s in (ttft_s, tpot_s)]
        cells = grid_of(asked.study, candidates, asked.slo, *limits, n_processes=n_processes, on_progress=on_progress)
    if isinstance(asked.cost, CostFile) and asked.cost.note:
        notes.append(asked.cost.note)
    if asked.kind == "cpu":
        notes.append(
            "HTTP, pictures and messages take the time of the same cores, and are not in these numbers: where a "
            "request takes the model only milliseconds, a server carries less. --validate shows how much."
        )
    if crowded := _crowded(asked, n_devices):
        notes.append(crowded)
    if asked.device.notes and asked.cost is None:
        notes.append(f"The device is described, not measured: {asked.device.notes}.")
    return (
        Plan(
            model=asked.shape.name,
            devices=n_devices,
            device=asked.device.name,
            measured=isinstance(asked.cost, CostFile),
            workload={"dataset": asked.workload.dataset, "source": asked.workload.source, **summary(asked.trace)},
            slo=asked.slo,
            target=q.target,
            objective=q.objective,
            rate=q.rate,
            requests=len(asked.trace),
            seed=q.seed,
            budgets={name: msgspec.structs.asdict(s.budgets) for name, s in study.stations.items()},
            layouts=tuple(rows),
            ratios=ratios_of(study, n_devices, rate, n_processes=n_processes) if ratios and rate else (),
            grid=cells,
            notes=tuple(notes),
            took_s=time.perf_counter() - begin_s,
            command=command,
            version=__version__,
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        ),
        study,
    )


def _fitting(asked: Prepared, study: Study, n_devices: int) -> Sequence[Layout]:
    """None where so few devices cannot hold the model, which more may do in parts."""
    try:
        return asked.candidates(study, n_devices)
    except ConfigError:
        return ()


def winners_file(plan: Plan, study: Study, asked: Prepared) -> str | None:
    """The layout file of what to start; None if nothing meets the SLO."""
    best = plan.choice
    if best is None:
        return None
    comment = (
        f"{best.layout}: {best.goodput:.3g} requests/s of {plan.workload['dataset']} within {plan.slo},\n"
        f"by simulation on {plan.devices} x {plan.device}, for {plan.model}. Made by `{plan.command}`."
    )
    return layout_file(Layout.parse(best.layout), study, comment, asked.threads)


def _crowded(asked: Prepared, n_devices: int) -> str:
    """If so many instances, with the threads that were measured, are more than the cores of this machine."""
    cores = len(os.sched_getaffinity(0))
    if asked.threads is None or asked.threads * n_devices <= cores:
        return ""
    return (
        f"{n_devices} instances of {asked.threads} measured threads need {n_devices * asked.threads} cores; this "
        f"machine has {cores}, so that here they would wait for each other, which is not in these numbers."
    )
