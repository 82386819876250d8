"""The best layout under each of several SLOs (the paper's figure 12): which method suits which limits."""

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
    """One cell per pair of limits in seconds, TTFT by TTFT; the rest of `slo` stays. `study_for` makes the study of an
    SLO, as budgets depend on it; its errors are passed on.

    Approximate: each rate gets one run of 600 requests, and where that is too short to tell, the rate counts as not
    carried, so that goodput is rather too low than too high; of each method, only the three layouts of highest bound
    are tried. Cells tell methods apart; for a layout to deploy, ask for its SLO alone.
    """
    pairs = [(ttft_s, tpot_s) for ttft_s in ttfts for tpot_s in tpots]
    jobs = []
    for ttft_s, tpot_s in pairs:
        study = study_for(msgspec.structs.replace(slo, ttft_s=ttft_s, tpot_s=tpot_s)).shortened(_REQUESTS)
        jobs.append((study, chosen(study, candidates)))
    cells: list[Cell] = []
    with workers(n_processes) as run:
        for cell in run(_cell, jobs):
            cells.append(cell)
            on_progress("grid", len(cells), len(pairs))
    return tuple(cells)


def chosen(study: Study, candidates: Sequence[Layout]) -> list[Layout]:
    """The three layouts of highest bound of each method, of those that the study has stations for."""
    bounds, of_method = Bounds(study), dict[str, list[tuple[float, Layout]]]()
    for layout in candidates:
        if all(str(role) in study.stations for role in layout.instances):
            of_method.setdefault(method_of(layout), []).append((bounds.of(layout).rate, layout))
    return [x for found in of_method.values() for _, x in sorted(found, key=lambda f: -f[0])[:_PER_METHOD]]


def _cell(study: Study, candidates: Sequence[Layout]) -> Cell:
    found = search(study, candidates, n_processes=1, effort=QUICK) if is_possible(study, candidates) else []
    epd = [x for x in candidates if method_of(x) == "EPD"]
    known = next((f for f in found if f.layout in map(str, epd) and f.goodput is not None), None)
    if known is None and epd and found and found[0].goodput:  # told to be less than the best, but not how much
        known = search(study, epd, n_processes=1, exhaustive=True, effort=QUICK)[0]
    best = next((f for f in found if f.goodput), None)
    ttft_s, tpot_s = study.slo.ttft_s, study.slo.tpot_s
    assert ttft_s is not None and tpot_s is not None
    return Cell(
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        layout=best.layout if best is not None else "",
        method=method_of(layout_of(best.layout)) if best is not None else "",
        goodput=_goodput(best),
        goodput_epd=_goodput(known),
    )


def _goodput(found: Finding | None) -> float:
    return found.goodput or 0.0 if found is not None else 0.0
