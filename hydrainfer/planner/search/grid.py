"""The best layout for each pair of SLO limits (the paper's figure 12), which shows the method that suits each pair."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from hydrainfer.config import Slo
from hydrainfer.core import Layout
from hydrainfer.planner.search.bound import Bounds
from hydrainfer.planner.search.goodput import QUICK, Finding, OnProgress, search, workers
from hydrainfer.planner.search.layouts import layout_of, method_of
from hydrainfer.planner.search.objectives import is_possible
from hydrainfer.planner.search.plan import Cell
from hydrainfer.planner.search.study import Study
from hydrainfer.planner.search.trials import Trials

_REQUESTS = 600
_PER_METHOD = 3


def grid_of(
    study_for: Callable[[Slo], Study],
    candidates: Sequence[Layout],
    slo: Slo,
    ttfts: Sequence[float],
    tpots: Sequence[float],
    *,
    n_processes: int | None = None,
    on_progress: OnProgress = lambda *_: None,
) -> tuple[Cell, ...]:
    """One cell per pair of limits in seconds, in order of TTFT, then TPOT; the other limits are those of `slo`.
    `study_for` makes the study of an SLO, as budgets depend on it; its errors are passed on.

    Approximate: each rate gets one run of 600 requests, and where that is too short to tell, the rate counts as not
    carried, so goodput is too low rather than too high. Only the three layouts with the highest bounds are tried for
    each method. Cells are good for comparing methods; for a layout to deploy, plan for its SLO alone. Cells with the
    same TPOT are judged by the same runs, as far as their budgets are the same.
    """
    jobs = []
    for tpot_s in tpots:
        studies = [study_for(msgspec.structs.replace(slo, ttft_s=s, tpot_s=tpot_s)) for s in sorted(ttfts)]
        short = [msgspec.structs.replace(s.shortened(_REQUESTS), patience_s=max(ttfts)) for s in studies]
        jobs.append(([(study, chosen(study, candidates)) for study in short],))
    cells: dict[tuple[float, float], Cell] = {}
    on_progress("grid", 0, len(ttfts) * len(tpots))
    with workers(n_processes) as run:
        for column in run(_column, jobs):
            cells |= {(cell.ttft_s, cell.tpot_s): cell for cell in column}
            on_progress("grid", len(cells), len(ttfts) * len(tpots))
    return tuple(cells[ttft_s, tpot_s] for ttft_s in ttfts for tpot_s in tpots)


def chosen(study: Study, candidates: Sequence[Layout]) -> list[Layout]:
    """For each method, the three layouts with the highest bounds among those that the study has stations for."""
    bounds = Bounds(study)
    of_method = dict[str, list[tuple[float, Layout]]]()
    for layout in candidates:
        if all(str(role) in study.stations for role in layout.instances):
            of_method.setdefault(method_of(layout), []).append((bounds.of(layout).rate, layout))
    return [x for found in of_method.values() for _, x in sorted(found, key=lambda f: -f[0])[:_PER_METHOD]]


def _column(studies: Sequence[tuple[Study, Sequence[Layout]]]) -> list[Cell]:
    """The cells of one TPOT, tightest TTFT first. The best layout of a cell is tried first in the next one."""
    trials = Trials()
    cells = list[Cell]()
    for study, candidates in studies:
        findings = list[Finding]()
        best = cells[-1].layout if cells else ""
        if best or is_possible(study, candidates):
            first = [k for k in candidates if str(k) == best or method_of(k) == "EPD"]
            findings = search(study, candidates, n_processes=1, effort=QUICK, first=first, trials=trials)
        cells.append(_cell(study.slo, findings))
    return cells


def _cell(slo: Slo, found: Sequence[Finding]) -> Cell:
    """The cell of a search. `found`: its findings, best first, EPD only among them."""
    best = next((f for f in found if f.goodput), None)
    epd = next((f for f in found if method_of(layout_of(f.layout)) == "EPD"), None)
    assert slo.ttft_s is not None and slo.tpot_s is not None
    return Cell(
        ttft_s=slo.ttft_s,
        tpot_s=slo.tpot_s,
        layout=best.layout if best is not None else "",
        method=method_of(layout_of(best.layout)) if best is not None else "",
        goodput=_goodput(best),
        goodput_epd=_goodput(epd),
    )


def _goodput(found: Finding | None) -> float:
    return found.goodput or 0.0 if found is not None else 0.0
