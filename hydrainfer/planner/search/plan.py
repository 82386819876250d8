"""The answer of `hydrainfer profile`: all layouts ranked, with the goodput of each and what limits it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hydrainfer.config import Slo
from hydrainfer.planner.search.bound import Bounds
from hydrainfer.planner.search.goodput import TOLERANCE, Finding, OnProgress, workers
from hydrainfer.planner.search.layouts import layout_of, method_of
from hydrainfer.planner.search.reason import Reason, reason
from hydrainfer.planner.search.study import Attempt, Study
from hydrainfer.planner.search.tiers import TierGain
from hydrainfer.planner.search.usage import RoleUse


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One layout. `goodput`: requests per second within the SLO, between `goodput_low` and `goodput_high` (95 %); None
    if the search stopped with nothing but the upper limit `goodput_high`: certain if `limit` is "bound", else what one
    short run did not carry. `ttft_p90`, `tpot_p90` (of a request's mean interval) and `interval_p90` (of the interval
    that the SLO's share of a request's intervals do not exceed): in seconds, at the goodput. `request_cost`,
    `million_cost`: price of a request and of a million answer tokens there, if the price of devices is known;
    `request_wh`: energy of a request with boards at their power limit. `limited_by`: why the layout carries no more, in
    words; `why`: the same with what it does to requests; `limit`: the kind of `Reason` ("failed": the search stopped at
    a rate that a run did not carry, and nobody looked why); `stage`: the stage that limits it. `search`: the last stage
    of the search that the layout reached ("pruned", "screened", "final")."""

    layout: str
    method: str
    goodput: float | None = None
    goodput_low: float | None = None
    goodput_high: float | None = None
    ttft_p90: float | None = None
    tpot_p90: float | None = None
    interval_p90: float | None = None
    attainment: float | None = None
    request_cost: float | None = None
    million_cost: float | None = None
    request_wh: float | None = None
    stage: str = ""
    limited_by: str = ""
    limit: str = ""
    why: str = ""
    search: str = "final"
    bound: float = 0.0
    attempts: tuple[Attempt, ...] = ()


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """One way to divide the devices between two roles (or EPD only), at `rate` requests per second. The p90 are in
    seconds, None if no request got that far."""

    method: str
    layout: str
    rate: float
    ttft_p90: float | None
    tpot_p90: float | None
    attainment: float


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """The best layout under one pair of SLOs, in seconds; "" and 0 if nothing meets them."""

    ttft_s: float
    tpot_s: float
    layout: str
    method: str
    goodput: float
    goodput_epd: float  # of the EPD-only layout


class Live(msgspec.Struct, frozen=True, kw_only=True):
    """A layout that was run for real, compared with its simulation. Pairs are (predicted, measured). `goodput`:
    requests per second, predicted with the client on the same machine (`planned`: without the client); the measured one
    lies between `goodput_low` and `goodput_high` (95 %), as far as the rates that were run can tell. All other pairs
    are at `rate`, in seconds."""

    layout: str
    rate: float
    planned: float
    goodput: tuple[float, float]
    goodput_low: float | None
    goodput_high: float | None
    attainment: tuple[float, float]  # a share, not seconds
    ttft_p50: tuple[float, float]
    ttft_p90: tuple[float, float]
    tpot_p50: tuple[float, float]
    tpot_p90: tuple[float, float]


class DevicePrice(msgspec.Struct, frozen=True, kw_only=True):
    """`n` devices of one kind, and the price of one for an hour."""

    device: str
    n: int
    per_hour: float


class LayoutPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The ranking of all layouts and the question behind it. `objective`: "goodput", "devices" (then `devices` is the
    smallest number that carries `rate`), "ttft" or "tpot" (lowest p90 at `rate`). `layouts`: best first.
    `per_instance`: number of devices of an instance; `device`: their name; `measured`: whether they were measured or
    described. `workload`: what the trace holds, as means. `budgets`: of each role of the first layout. `use`:
    utilization of each role of the first layout at its goodput. `grid`, `live`: if asked for. `model_error`: in nine of
    ten cases, the measured goodput of a deployment is within a factor of 1 + `model_error` of the planned one; None if
    not known. `notes`: caveats. `ratios`: of the methods with two roles, all at one rate. `unlike`: `device` names
    several kinds and the number of each. `price`: of all devices for an hour, `prices`: of each kind; `watts`: of all
    devices; None if not known. `command`: made the plan; `launch`: serves the layout to deploy, "" if it was not
    written. `store`, `host_cache_gib`: the other tiers, as `serve` takes them; `tiers`: what they contribute to the
    layout to deploy, at its goodput. `impossible`: why no layout meets the SLO even without load, "" if some do; then
    there are no `layouts`."""

    model: str
    devices: int
    per_instance: int = 1
    device: str
    measured: bool
    workload: dict[str, str | float]
    slo: Slo
    target: float
    objective: str
    rate: float | None
    requests: int
    seed: int
    budgets: dict[str, dict[str, int | float]]
    layouts: tuple[Row, ...]
    ratios: tuple[Ratio, ...] = ()
    use: tuple[RoleUse, ...] = ()
    grid: tuple[Cell, ...] = ()
    live: tuple[Live, ...] = ()
    notes: tuple[str, ...] = ()
    engine: str = "hydrainfer"
    model_error: float | None = None
    unlike: bool = False
    price: float | None = None
    prices: tuple[DevicePrice, ...] = ()
    watts: float | None = None
    store: str | None = None
    host_cache_gib: float = 0.0
    tiers: tuple[TierGain, ...] = ()
    impossible: str = ""
    took_s: float = 0.0
    command: str = ""
    launch: str = ""
    version: str = ""
    date: str = ""

    @property
    def hardware(self) -> str:
        """All devices, in words."""
        if self.unlike:
            return self.device
        return f"{self.devices // self.per_instance} x {self.device}"

    @property
    def best(self) -> Row | None:
        """The first row; None if nothing meets the SLO."""
        first = None
        if self.layouts:
            first = self.layouts[0]
        return first if first is not None and first.goodput else None

    @property
    def choice(self) -> Row | None:
        """The row to deploy: the best one, or EPD only if it is not certain that splitting gains anything."""
        best = self.best
        epd = next((row for row in self.layouts if row.method == "EPD" and row.goodput), None)
        if best is None or epd is None or epd is best:
            return best
        if self.objective == "devices":
            return epd  # it carries the rate as well
        if self.objective == "goodput":
            assert best.goodput and epd.goodput
            more = best.goodput > epd.goodput * (1 + TOLERANCE)
            if best.goodput_low:  # for certain
                more = more and best.goodput_low > epd.goodput
            return best if more else epd
        quick, slow = ((r.ttft_p90 if self.objective == "ttft" else r.tpot_p90) for r in (best, epd))
        if quick is not None and slow is not None and quick < slow * (1 - TOLERANCE):
            return best
        return epd


def rows_of(
    study: Study,
    found: Sequence[Finding],
    n_explained: int = 12,
    *,
    n_processes: int | None = None,
    on_progress: OnProgress = lambda *_: None,
) -> list[Row]:
    """The rows of the findings, in the same order. The first `n_explained` findings that were measured are explained by
    a simulation, the others by what stopped their search."""
    if not found:
        return []
    bounds = Bounds(study)
    explained = [f for f in found if f.stage == "final"][:n_explained]
    whys: dict[str, Reason] = {}
    on_progress("explain", 0, len(explained))
    with workers(n_processes) as run:
        jobs = [(study, layout_of(f.layout), *_failed_run(f)) for f in explained]
        for f, why in zip(explained, run(reason, jobs)):
            whys[f.layout] = why
            on_progress("explain", len(whys), len(explained))
    return [_row(f, whys.get(f.layout), bounds) for f in found]


def _failed_run(f: Finding) -> tuple[float, int]:
    """The rate that certainly is not carried, else the lowest above the goodput, and the number of the last run there,
    which decided; the bound if no such rate ran."""
    tried = [a.rate for a in f.attempts]
    rate = f.bound
    if f.goodput_high in tried:
        rate = f.goodput_high
    elif f.failed_attempt is not None:
        rate = f.failed_attempt.rate
    return rate, max(0, tried.count(rate) - 1)


def _row(f: Finding, why: Reason | None, bounds: Bounds) -> Row:
    best = f.best_attempt
    final = f.stage == "final"
    layout = layout_of(f.layout)
    if why is not None:
        stage, words, text, kind = why.stage, why.words, str(why), why.kind
    else:
        stage, words, kind = _stopped(f, bounds)
        text = words
    return Row(
        layout=f.layout,
        method=method_of(layout),
        goodput=f.goodput if final else None,
        goodput_low=f.goodput_low if final else None,
        goodput_high=f.goodput_high,
        ttft_p90=best.ttft_p90 if best is not None else None,
        tpot_p90=best.tpot_p90 if best is not None else None,
        interval_p90=best.interval_p90 if best is not None else None,
        attainment=best.n_met / best.n if best is not None else None,
        stage=stage,
        limited_by=words,
        limit=kind,
        why=text,
        search=f.stage,
        bound=f.bound,
        attempts=f.attempts,
    )


def _stopped(f: Finding, bounds: Bounds) -> tuple[str, str, str]:
    """What stopped the search for a layout: the stage, the words, and the kind of limit. The bound is named only if it
    is the upper limit that the finding has."""
    failed = f.failed_attempt
    below_bound = f.goodput_high is not None and f.goodput_high < f.bound
    if f.stage != "pruned" and failed is not None and below_bound:
        run = f"at {failed.rate:.3g}/s {failed.n - failed.n_met} of {failed.n} requests missed the SLO"
        return "", f"not looked into: {run}", "failed"
    stages = [s.value for s in bounds.of(layout_of(f.layout)).stages]
    names = " and ".join(stages) or "the server"
    return "".join(stages[:1]), f"{names}: the least possible work allows {f.bound:.3g}/s", "bound"
