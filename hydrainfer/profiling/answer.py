"""The answer to a question: runs the study that was asked for and puts the plan together."""

from __future__ import annotations

import datetime
import math
import shlex
import time
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

import msgspec

from hydrainfer.config import Slo
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
    Ratio,
    RoleUse,
    Row,
    Study,
    TierGain,
    grid_of,
    layout_file,
    layout_of,
    least_devices,
    ranked_at,
    rate_for_ratios,
    ratios_of,
    rows_of,
    search,
    tier_gains,
    use_of,
    why_impossible,
)
from hydrainfer.profiling.question import ProfileSetup
from hydrainfer.profiling.traces import fewer_than_usual
from hydrainfer.version import __version__

_WIDE = 0.2  # relative width of an interval beyond which the plan has a note
_PAUSES = 4  # times that the mean pause of a conversation fits into a run that is long enough
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
    `ConfigError`."""
    begin_s = time.perf_counter()
    q = asked.question
    inputs = asked.inputs
    limits = None
    if grid:
        limits = _grid_limits(inputs.slo)
    result = _searched(asked, n_processes, exhaustive, on_progress)
    study = result.study
    n_devices = result.n_devices
    found = rows_of(study, result.findings, n_processes=n_processes, on_progress=on_progress)
    rows = [_priced(row, asked, n_devices) for row in found]
    rate = q.rate if rows and q.rate else rate_for_ratios(rows)
    best_ratios: tuple[Ratio, ...] = ()
    cells: tuple[Cell, ...] = ()
    if limits is not None:
        candidates = inputs.candidates(inputs.study())
        cells = grid_of(inputs.study, candidates, inputs.slo, *limits, n_processes=n_processes, on_progress=on_progress)
    if ratios and rate:
        best_ratios = ratios_of(study, n_devices, rate, n_processes=n_processes)
    plan = LayoutPlan(
        model=inputs.shape.name,
        devices=n_devices * q.tensor_parallel,
        per_instance=q.tensor_parallel,
        device=asked.devices.hardware,
        measured=isinstance(asked.devices.cost, CostFile),
        workload={"dataset": asked.workload.dataset, "source": asked.workload.source, **summary(inputs.trace)},
        slo=inputs.slo,
        target=q.target,
        objective=q.objective,
        rate=q.rate,
        requests=len(inputs.trace),
        seed=q.seed,
        budgets=_budgets(study, rows),
        layouts=tuple(rows),
        ratios=best_ratios,
        grid=cells,
        use=_used(asked, study, rows),
        notes=(*result.notes, *_two_tpots(rows, inputs.slo), *_cautions(asked, study, n_devices)),
        engine=inputs.engine.name,
        model_error=inputs.model_error,
        unlike=bool(asked.devices.unlike),
        price=asked.prices.per_hour(n_devices),
        prices=asked.prices.terms(n_devices),
        watts=asked.prices.watts(n_devices),
        impossible=result.impossible,
        took_s=time.perf_counter() - begin_s,
        command=command,
        version=__version__,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
    return _with_tiers(plan, study, asked), study


def _with_tiers(plan: LayoutPlan, study: Study, asked: ProfileSetup) -> LayoutPlan:
    """The plan with its tiers, and what they contribute to the layout to deploy."""
    q = asked.question
    best = plan.choice
    gains: tuple[TierGain, ...] = ()
    if best is not None and best.goodput:
        gains = tier_gains(study, layout_of(best.layout), best.goodput)
    notes = (*plan.notes, *asked.tiers.notes, *_never_again(asked, plan), *_too_short(asked, plan))
    return msgspec.structs.replace(plan, store=q.store, host_cache_gib=q.host_cache_gib, tiers=gains, notes=notes)


def _never_again(asked: ProfileSetup, plan: LayoutPlan) -> Iterator[str]:
    """A note if tiers are planned for, and nothing that they keep is used again."""
    if asked.tiers.options and not any(t.parts for t in asked.inputs.trace):
        yield (
            f"No two requests of {plan.workload['dataset']} begin alike, so that no tier keeps what is used again; "
            "conversations are in --workload chat-minutes."
        )


def _too_short(asked: ProfileSetup, plan: LayoutPlan) -> Iterator[str]:
    """A note if the simulated time is too short for conversations to come back as late as they are to."""
    pauses = [t.apart_s for t in asked.inputs.trace if t.apart_s]
    best = plan.choice
    if not pauses or best is None or not best.goodput:
        return
    pause_s = fmean(pauses)
    n_wanted = math.ceil(_PAUSES * pause_s * best.goodput)
    if n_wanted > plan.requests:
        yield (
            f"Turns are to be {pause_s:.3g} s apart, but {plan.requests} requests at {best.goodput:.3g}/s take "
            f"{plan.requests / best.goodput:.3g} s, so that turns came back too soon: repeat it with --requests "
            f"{n_wanted}."
        )


def _grid_limits(slo: Slo) -> tuple[list[float], list[float]]:
    """The limits of TTFT and of TPOT that a report's grid tries, in seconds. Raises `ConfigError`."""
    if slo.ttft_s is None or slo.tpot_s is None:
        raise ConfigError("--grid needs limits for both TTFT and TPOT", param="grid")
    return [by * slo.ttft_s for by in _GRID], [by * slo.tpot_s for by in _GRID]


class _SearchResult(NamedTuple):
    """The result of the search for `n_devices`, and notes about it. `impossible`: why the SLO cannot be met, which then
    was not searched for; "" if it may be."""

    study: Study
    n_devices: int
    findings: Sequence[Finding]
    notes: list[str]
    impossible: str = ""


def _searched(asked: ProfileSetup, n_processes: int | None, exhaustive: bool, on_progress: OnProgress) -> _SearchResult:
    q = asked.question
    n = asked.inputs.n_instances
    study = asked.inputs.study()
    candidates = asked.inputs.candidates(study)
    if impossible := why_impossible(study, candidates):
        return _SearchResult(study, n, [], [], impossible)
    if q.objective == "goodput":
        findings = search(study, candidates, n_processes=n_processes, exhaustive=exhaustive, on_progress=on_progress)
        return _SearchResult(study, n, findings, _undecided(findings))
    assert q.rate is not None
    if q.objective == "devices":
        return _fewest(asked, q.rate, n_processes, on_progress)
    findings = ranked_at(
        study,
        candidates,
        q.rate,
        q.objective,  # type: ignore[arg-type]
        n_processes=n_processes,
        on_progress=on_progress,
    )
    return _SearchResult(study, n, findings, [])


def _fewest(asked: ProfileSetup, rate: float, n_processes: int | None, on_progress: OnProgress) -> _SearchResult:
    """The fewest devices that carry `rate`."""
    n_largest = asked.inputs.n_instances
    studies = []
    for n in range(1, n_largest + 1):
        study = asked.inputs.study(n_devices=n)
        studies.append((study, _fitting(asked, study, n)))
    n_devices, findings = least_devices(studies, rate, n_processes=n_processes, on_progress=on_progress)
    study = studies[n_devices - 1][0]
    if n_devices:
        return _SearchResult(study, n_devices, findings, [])
    note = f"{rate:g} requests/s are more than {asked.question.devices} devices carry within the SLO for certain."
    return _SearchResult(study, n_largest, findings, [note])


def _priced(row: Row, asked: ProfileSetup, n_devices: int) -> Row:
    """The row with the cost and the energy of its requests."""
    if not row.goodput:
        return row
    per_hour = row.goodput * 3600.0
    trace = asked.inputs.trace
    n_output = sum(t.n_output for t in trace) / len(trace)
    price = asked.prices.per_hour(n_devices)
    watts = asked.prices.watts(n_devices)
    if price is not None:
        cost = price / per_hour
        row = msgspec.structs.replace(row, request_cost=cost, million_cost=cost / n_output * 1e6)
    if watts is not None:
        row = msgspec.structs.replace(row, request_wh=watts / per_hour)
    return row


def _used(asked: ProfileSetup, study: Study, rows: Sequence[Row]) -> tuple[RoleUse, ...]:
    """The utilization of the best layout's roles at its goodput, with the bytes of their weights."""
    if not rows or not rows[0].goodput:
        return ()
    layout = layout_of(rows[0].layout)
    weights = {str(role): float(asked.inputs.shape.weight_bytes(role)) for role in layout.instances}
    use = use_of(study, layout, rows[0].goodput)
    return tuple(msgspec.structs.replace(u, weight_bytes=weights[u.role]) for u in use)


def _undecided(findings: Sequence[Finding]) -> list[str]:
    """A note if the interval of the best layout is wide."""
    if not findings:
        return []
    best = findings[0]
    if not best.goodput or best.goodput_high is None or best.goodput_low is None:
        return []
    if best.goodput_high <= best.goodput_low * (1 + _WIDE):
        return []
    n = max(a.n for a in best.attempts)
    return [
        f"The goodput of {best.layout} is undecided between {best.goodput_low:.3g} and {best.goodput_high:.3g}/s: runs "
        f"of up to {n} requests are too short to tell. Confirm with more --requests."
    ]


def _two_tpots(rows: Sequence[Row], slo: Slo) -> Iterator[str]:
    """A warning if the TPOT limit is met interval by interval, but not by a request's mean."""
    if not rows or not rows[0].goodput or slo.tpot_s is None:
        return
    best = rows[0]
    if best.tpot_p90 is None or best.tpot_p90 <= slo.tpot_s:
        return
    yield (
        f"TPOT is met by {slo.token_share:.0%} of the intervals of a request, but not by their mean: "
        f"{best.layout} has a p90 of {best.tpot_p90 * 1e3:.3g} ms by the mean, where the limit is "
        f"{slo.tpot_s * 1e3:.3g} ms. Some intervals are very long."
    )


def _cautions(asked: ProfileSetup, study: Study, n_devices: int) -> Iterator[str]:
    """Notes on what the figures leave out."""
    if isinstance(asked.devices.cost, CostFile) and asked.devices.cost.note:
        yield asked.devices.cost.note
    if asked.devices.kind == "cpu":
        server_ms = study.server.work_s(study.trace, n_devices) * 1e3
        yield (
            f"These numbers include the {server_ms:.3g} ms of the same cores that the server takes for each request, "
            "but no client on this machine."
        )
    if fewer := fewer_than_usual(asked.question, len(asked.inputs.trace)):
        yield fewer
    if crowded := _crowded(asked, n_devices):
        yield crowded
    if not asked.servable:
        yield (
            "HydraInfer itself serves neither groups of devices, nor smaller weights on GPUs, nor unlike devices by "
            "one file: there is no layout.yaml."
        )
    if asked.devices.cost is not None:
        return
    for device in [device for device, _ in asked.devices.unlike] or [asked.devices.device]:
        if device.notes:
            yield f"The device is described, not measured: {device.notes}."


def _fitting(asked: ProfileSetup, study: Study, n_devices: int) -> Sequence[Layout]:
    """The layouts of `n_devices`; none if these cannot hold the model, which more devices may hold in parts."""
    try:
        return asked.inputs.candidates(study, n_devices)
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
    return layout_file(
        Layout.parse(best.layout), study, comment, asked.devices.threads, only, tiers=asked.tiers.options
    )


def _crowded(asked: ProfileSetup, n_devices: int) -> str:
    """A warning if `n_devices` instances, with the threads that were measured, need more cores than this machine
    has."""
    threads = asked.devices.threads
    cores = n_cores()
    if threads is None or threads * n_devices <= cores:
        return ""
    return (
        f"{n_devices} instances of {threads} measured threads need {n_devices * threads} cores; this "
        f"machine has {cores}, so that here they would wait for each other, which is not in these numbers."
    )


def _budgets(study: Study, rows: Sequence[Row]) -> dict[str, dict[str, int | float]]:
    """The budgets of the best layout by role and name, without those that set no limit."""
    if not rows:
        return {}
    budgets: dict[str, dict[str, int | float]] = {}
    for role, own in study.budgets(layout_of(rows[0].layout)).items():
        limits = msgspec.structs.asdict(own)
        budgets[role] = {name: value for name, value in limits.items() if value not in (None, math.inf)}
    return budgets
