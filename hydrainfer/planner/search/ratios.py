"""Latency for each ratio of a method's two roles at one rate (the paper's figure 11), and the choice of that rate."""

from __future__ import annotations

from collections.abc import Sequence

from hydrainfer.core import Layout
from hydrainfer.planner.search.goodput import workers
from hydrainfer.planner.search.layouts import METHODS, layouts, method_of
from hydrainfer.planner.search.plan import Ratio, Row
from hydrainfer.planner.search.study import Study, attempt

_LOAD = 0.8  # of the best goodput


def ratios_of(study: Study, n_devices: int, rate: float, *, n_processes: int | None = None) -> tuple[Ratio, ...]:
    """The latencies of EPD only, then of each method with two roles, from the fewest to the most instances of its first
    role. Every layout is simulated at `rate` to the end of the trace. Layouts with a role that the study has no station
    for are left out."""
    two = {"+".join(m) for m in METHODS if len(m) == 2}
    chosen = [x for x in layouts(n_devices) if method_of(x) in two | {"EPD"}]
    chosen = [x for x in chosen if all(str(role) in study.stations for role in x.instances)]
    with workers(n_processes) as run:
        return tuple(run(_ratio, [(study, layout, rate) for layout in chosen]))


def rate_for_ratios(rows: Sequence[Row]) -> float | None:
    """The goodput of EPD only, a rate at which split layouts can show their gain. If that is not known, 80 % of the
    best goodput; None if no layout carries any rate."""
    epd = next((r.goodput for r in rows if r.method == "EPD" and r.goodput), None)
    best = max((r.goodput or 0.0 for r in rows), default=0.0)
    return epd or best * _LOAD or None


def _ratio(study: Study, layout: Layout, rate: float) -> Ratio:
    a = attempt(study, layout, rate, hurry=False)
    return Ratio(
        method=method_of(layout),
        layout=str(layout),
        rate=rate,
        ttft_p90=a.ttft_p90,
        tpot_p90=a.tpot_p90,
        attainment=a.n_met / a.n,
    )
