"""The answer to a question: runs the study that was asked for and puts the plan together."""

from __future__ import annotations

import datetime
import math
import shlex
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from hydrainfer.core import ConfigError, Layout
from hydrainfer.machine import n_cores
from hydrainfer.planner.costs import CostFile
from hydrainfer.planner.inputs import summary
from hydrainfer.planner.search import (
    PLANNED,
    Cell,
    Finding,
    LayoutPlan,
    OnProgress,
    RoleUse,
    Row,
    Study,
    check_possible,
    grid_of,
    layout_file,
    layout_of,
    least_devices,
    ranked_at,
    rate_for_ratios,
    ratios_of,
    rows_of,
    search,
    use_of,
)
from hydrainfer.profiling.question import ProfileSetup
from hydrainfer.scheduler import Budgets
from hydrainfer.version import __version__

_WIDE = 0.2  # relative width of an interval beyond which the plan has a note
_GRID = (0.5, 1.0, 2.0, 4.0)  # multiples of the SLO's limits


def answer(
    asked: ProfileSetup,
    *,
    on_progress: OnProgress,
    command: str,
    n_processes: int | None = None,
    exhaustive: bool = False,
    ratios: bool = False,
    grid: bool = False,
) -> tuple[LayoutPlan, Study]:
    """The plan and the study of its devices. `ratios`, `grid`: also compute what the report's figures need. Raises
    `ConfigError`, also if no layout can meet the SLO even without load; the message then names the stage to blame."""
    q, begin_s = asked.question, time.perf_counter()
    limits = _grid_limits(asked) if grid else None
    searched = _searched(asked, n_processes, exhaustive, on_progress)
    study, n_devices = searched.study, searched.n_devices
    on_progress("explain", 0, 1)
    rows = [_priced(row, asked, n_devices) for row in rows_of(study, searched.found, n_processes=n_processes)]
    rate = q.rate or rate_for_ratios(rows)
    cells: tuple[Cell, ...] = ()
    if limits is not None:
        candidates = asked.candidates(asked.study())
        cells = grid_of(asked.study, candidates, asked.slo, *limits, n_processes=n_processes, on_progress=on_progress)
    return (
        LayoutPlan(
            model=asked.shape.name,
            devices=n_devices * q.tensor_parallel,
            per_instance=q.tensor_parallel,
            device=asked.hardware,
            measured=isinstance(asked.cost, CostFile),
            workload={"dataset": asked.workload.dataset, "source": asked.workload.source, **summary(asked.trace)},
            slo=asked.slo,
            target=q.target,
            objective=q.objective,
            rate=q.rate,
            requests=len(asked.trace),
            seed=q.seed,
            budgets={name: _given(b) for name, b in study.budgets(layout_of(rows[0].layout)).items()} if rows else {},
            layouts=tuple(rows),
            ratios=ratios_of(study, n_devices, rate, n_processes=n_processes) if ratios and rate else (),
            grid=cells,
            use=_used(asked, study, rows),
            notes=(*searched.notes, *_two_tpots(rows, asked), *_cautions(asked, study, n_devices)),
            engine=asked.engine.name,
            model_error=asked.model_error,
            unlike=bool(asked.kinds),
            price=asked.per_hour(n_devices),
            watts=asked.watts(n_devices),
            took_s=time.perf_counter() - begin_s,
            command=command,
            version=__version__,
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        ),
        study,
    )


def _grid_limits(asked: ProfileSetup) -> tuple[list[float], list[float]]:
    """The limits of TTFT and of TPOT that a report's grid tries, in seconds. Raises `ConfigError`."""
    ttft_s, tpot_s = asked.slo.ttft_s, asked.slo.tpot_s
    if ttft_s is None or tpot_s is None:
        raise ConfigError("--grid needs limits for both TTFT and TPOT", param="grid")
    return [by * ttft_s for by in _GRID], [by * tpot_s for by in _GRID]


class _Searched(NamedTuple):
    """The result of the search for `n_devices`, and notes about it."""

    study: Study
    n_devices: int
    found: Sequence[Finding]
    notes: list[str]


def _searched(asked: ProfileSetup, n_processes: int | None, exhaustive: bool, on_progress: OnProgress) -> _Searched:
    q, study = asked.question, asked.study()
    candidates = asked.candidates(study)
    check_possible(study, candidates)
    if q.objective == "goodput":
        found = search(study, candidates, n_processes=n_processes, exhaustive=exhaustive, on_progress=on_progress)
        return _Searched(study, asked.n_instances, found, _undecided(found[0] if found else None))
    assert q.rate is not None
    if q.objective == "devices":
        studies = [(s := asked.study(n_devices=n), _fitting(asked, s, n)) for n in range(1, asked.n_instances + 1)]
        n_devices, found = least_devices(studies, q.rate, n_processes=n_processes, on_progress=on_progress)
        study = studies[n_devices - 1][0]
        if n_devices:
            return _Searched(study, n_devices, found, [])
        note = f"{q.rate:g} requests/s are more than {q.devices} devices carry within the SLO for certain."
        return _Searched(study, asked.n_instances, found, [note])
    found = ranked_at(
        study,
        candidates,
        q.rate,
        q.objective,  # type: ignore[arg-type]
        n_processes=n_processes,
        on_progress=on_progress,
    )
    return _Searched(study, asked.n_instances, found, [])


def _priced(row: Row, asked: ProfileSetup, n_devices: int) -> Row:
    """The row with the cost and the energy of its requests."""
    if not row.goodput:
        return row
    per_hour, n_output = row.goodput * 3600.0, sum(t.n_output for t in asked.trace) / len(asked.trace)
    price, watts = asked.per_hour(n_devices), asked.watts(n_devices)
    return msgspec.structs.replace(
        row,
        request_cost=None if price is None else price / per_hour,
        million_cost=None if price is None else price / per_hour / n_output * 1e6,
        request_wh=None if watts is None else watts / per_hour,
    )


def _used(asked: ProfileSetup, study: Study, rows: Sequence[Row]) -> tuple[RoleUse, ...]:
    """The utilization of the best layout's roles at its goodput, with the bytes of their weights."""
    if not rows or not rows[0].goodput:
        return ()
    layout = layout_of(rows[0].layout)
    weights = {str(role): float(asked.shape.weight_bytes(role)) for role in layout.instances}
    used = use_of(study, layout, rows[0].goodput)
    return tuple(msgspec.structs.replace(u, weight_bytes=weights[u.role]) for u in used)


def _undecided(best: Finding | None) -> list[str]:
    """A note if the interval of the best layout is wide."""
    if best is None or not best.goodput or best.goodput_high is None or best.goodput_low is None:
        return []
    if best.goodput_high <= best.goodput_low * (1 + _WIDE):
        return []
    n = max(a.n for a in best.attempts)
    return [
        f"The goodput of {best.layout} is undecided between {best.goodput_low:.3g} and {best.goodput_high:.3g}/s: runs "
        f"of up to {n} requests are too short to tell. Confirm with more --requests."
    ]


def _two_tpots(rows: Sequence[Row], asked: ProfileSetup) -> Iterator[str]:
    """A warning if the TPOT limit is met interval by interval, but not by a request's mean."""
    best, limit_s = rows[0] if rows else None, asked.slo.tpot_s
    if best is None or not best.goodput or best.tpot_p90 is None or limit_s is None or best.tpot_p90 <= limit_s:
        return
    yield (
        f"TPOT is met by {asked.slo.token_share:.0%} of the intervals of a request, but not by their mean: "
        f"{best.layout} has a p90 of {best.tpot_p90 * 1e3:.3g} ms by the mean, where the limit is "
        f"{limit_s * 1e3:.3g} ms. Some intervals are very long."
    )


def _cautions(asked: ProfileSetup, study: Study, n_devices: int) -> Iterator[str]:
    """Notes on what the figures leave out."""
    if isinstance(asked.cost, CostFile) and asked.cost.note:
        yield asked.cost.note
    if asked.kind == "cpu":
        server_ms = study.server.work_s(study.trace, n_devices) * 1e3
        yield (
            f"These numbers include the {server_ms:.3g} ms of the same cores that the server takes for each request, "
            "but no client on this machine."
        )
    if crowded := _crowded(asked, n_devices):
        yield crowded
    if not asked.servable:
        yield (
            "HydraInfer itself serves neither groups of devices, nor smaller weights on GPUs, nor unlike devices by "
            "one file: there is no layout.yaml."
        )
    for device in [device for device, _ in asked.kinds] or [asked.device]:
        if device.notes and asked.cost is None:
            yield f"The device is described, not measured: {device.notes}."


def _fitting(asked: ProfileSetup, study: Study, n_devices: int) -> Sequence[Layout]:
    """The layouts of `n_devices`; none if these cannot hold the model, which more devices may hold in parts."""
    try:
        return asked.candidates(study, n_devices)
    except ConfigError:
        return ()


def winners_file(plan: LayoutPlan, study: Study, asked: ProfileSetup, only: Sequence[str] = PLANNED) -> str | None:
    """The file of the layout to start, with `only` these options; None if nothing meets the SLO, or HydraInfer cannot
    serve the layout."""
    best = plan.choice
    if best is None or not asked.servable:
        return None
    comment = (
        f"{best.layout}: {best.goodput:.3g} requests/s of {plan.workload['dataset']} within {plan.slo},\n"
        f"by simulation on {plan.hardware}, for {plan.model}. Made by `{plan.command}`."
    )
    if asked.flags:
        comment += f"\nTo be served with `{shlex.join(asked.flags)}`."
    return layout_file(Layout.parse(best.layout), study, comment, asked.threads, only)


def _crowded(asked: ProfileSetup, n_devices: int) -> str:
    """A warning if `n_devices` instances, with the threads that were measured, need more cores than this machine
    has."""
    cores = n_cores()
    if asked.threads is None or asked.threads * n_devices <= cores:
        return ""
    return (
        f"{n_devices} instances of {asked.threads} measured threads need {n_devices * asked.threads} cores; this "
        f"machine has {cores}, so that here they would wait for each other, which is not in these numbers."
    )


def _given(budgets: Budgets) -> dict[str, int | float]:
    """The budgets by name, without those that set no limit."""
    return {name: value for name, value in msgspec.structs.asdict(budgets).items() if value not in (None, math.inf)}
