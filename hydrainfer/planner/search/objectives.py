"""Objectives other than the best goodput: the fewest devices for a rate, the least latency at a rate, and whether an
SLO can be met at all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from hydrainfer.core import Layout
from hydrainfer.judging import Search
from hydrainfer.metrics import INTERVALS
from hydrainfer.planner.search.bound import Bounds
from hydrainfer.planner.search.evidence import slow_rate, timelines_at
from hydrainfer.planner.search.goodput import EXACT, Finding, OnProgress, by_rate, workers
from hydrainfer.planner.search.layouts import method_of
from hydrainfer.planner.search.study import Study, Trial, attempt, observe, slowest_interval_s

Objective = Literal["goodput", "devices", "ttft", "tpot"]
_ALONE = 60  # requests, one after another


def ranked_at(
    study: Study,
    candidates: Sequence[Layout],
    rate: float,
    by: Literal["ttft", "tpot"],
    *,
    n_processes: int | None = None,
    on_progress: OnProgress = lambda *_: None,
) -> list[Finding]:
    """Layouts that certainly carry `rate` within the SLO in the steady state, lowest p90 of `by` first; then the
    others, which do not, are undecided (their `goodput_high` is above the rate) or were pruned by their bound."""
    bounds = Bounds(study)
    findings = []
    limits = {layout: bounds.of(layout).rate for layout in candidates}
    able = [layout for layout in candidates if limits[layout] > rate]
    with workers(n_processes) as run:
        for finding in run(_at, [(study, layout, limits[layout], rate) for layout in able]):
            findings.append(finding)
            on_progress("simulate", len(findings), len(able))
    findings += [
        Finding(layout=str(layout), stage="pruned", bound=limits[layout], goodput_high=limits[layout])
        for layout in candidates
        if limits[layout] <= rate
    ]

    def key(f: Finding) -> tuple[bool, float]:
        best = f.best_attempt
        seconds = None
        if best is not None:
            seconds = best.ttft_p90 if by == "ttft" else best.tpot_p90
        return (f.goodput is None, seconds if seconds is not None else -f.bound)

    return sorted(findings, key=key)


def least_devices(
    studies: Sequence[tuple[Study, Sequence[Layout]]],
    rate: float,
    *,
    n_processes: int | None = None,
    on_progress: OnProgress = lambda *_: None,
) -> tuple[int, list[Finding]]:
    """The smallest number of instances (1, 2, …) with candidates that carry `rate`, and the findings for it, highest
    attainment first. If no number does, 0 and the findings for the last number."""
    findings: list[Finding] = []
    for n, (study, candidates) in enumerate(studies, 1):
        on_progress(f"{n} instances", n - 1, len(studies))
        findings = ranked_at(study, candidates, rate, "ttft", n_processes=n_processes)
        if any(f.goodput is not None for f in findings):
            return n, sorted(findings, key=lambda f: (f.goodput is None, -_attainment(f)))
    return 0, findings


def _at(study: Study, layout: Layout, bound: float, rate: float) -> Finding:
    """The finding of a layout at one `rate`. It is judged as in a search for goodput, but runs only at this rate."""
    search = Search(rate, target=study.target, bound=bound, max_runs=EXACT.max_runs)
    trials = list[Trial]()
    while (ask := search.next()) is not None and ask.rate == rate:
        trials.append(observe(study.run(len(trials)), layout, rate))
        search.tell(rate, trials[-1].series)
    known = search.result()
    return Finding(
        layout=str(layout),
        stage="final",
        bound=bound,
        goodput=rate if known.low else None,
        goodput_low=known.low or 0.0,
        goodput_high=known.high or bound,
        attempts=by_rate(trials),
    )


def _attainment(f: Finding) -> float:
    if f.best_attempt is not None:
        return f.best_attempt.n_met / f.best_attempt.n
    return 0.0


def why_impossible(study: Study, candidates: Sequence[Layout]) -> str:
    """Why no method meets the SLO even without load: the stage that takes too long, and the latency that can be
    attained; "" if some method does."""
    if is_possible(study, candidates):
        return ""
    return _why_not(study.shortened(_ALONE), candidates)


def is_possible(study: Study, candidates: Sequence[Layout]) -> bool:
    """True if some method meets the SLO without load."""
    first = study.shortened(_ALONE)
    rate = slow_rate(first)
    return any(attempt(first, layout, rate, hurry=False).carried(study.target) for layout in _one_each(candidates))


def _one_each(candidates: Sequence[Layout]) -> list[Layout]:
    """One layout of every method."""
    return list({method_of(layout): layout for layout in candidates}.values())


def _why_not(study: Study, candidates: Sequence[Layout]) -> str:
    """The limits that no method meets, in words, with the lowest latencies of any method without load."""
    slo = study.slo
    least: dict[str, tuple[float, str, dict[str, float]]] = {}
    for layout in _one_each(candidates):
        timelines = timelines_at(study, layout, slow_rate(study))
        ttft = _share([t.ttft_s for t in timelines if t.ttft_s is not None], study.target)
        tpot = _share([slowest_interval_s(t.token_s, slo) for t in timelines], study.target)
        e2e = _share([t.e2e_s for t in timelines if t.e2e_s is not None], study.target)
        mean_s = {name: sum(t.intervals_s.get(name, 0.0) for t in timelines) / len(timelines) for name in INTERVALS}
        for name, seconds in (("TTFT", ttft), ("TPOT", tpot), ("E2E", e2e)):
            if name not in least or seconds < least[name][0]:
                least[name] = (seconds, str(layout), mean_s)
    limits = {"TTFT": slo.ttft_s, "TPOT": slo.tpot_s, "E2E": slo.e2e_s}
    reasons = []
    for name, limit_s in limits.items():
        seconds, where, mean_s = least[name]
        if limit_s is not None and seconds > limit_s:
            part = {"TTFT": INTERVALS[:5], "TPOT": ("decode",), "E2E": INTERVALS}[name]
            stage = max(part, key=lambda interval: mean_s[interval])
            reasons.append(
                f"{name} ≤ {limit_s * 1e3:.4g} ms is impossible: without any load {seconds * 1e3:.4g} ms is the best "
                f"that {study.target:.0%} of the requests get ({where}), most of it in {stage.replace('_', ' ')}"
            )
    together = f"no layout meets {slo} for {study.target:.0%} of the requests even without load: each limit can be met"
    return "; ".join(reasons) or f"{together}, but not all of them by the same layout"


def _share(numbers: Sequence[float], share: float) -> float:
    """The smallest limit that this share of the numbers meets."""
    ordered = sorted(numbers)
    if ordered:
        return ordered[max(1, math.ceil(share * len(ordered) - 1e-9)) - 1]
    return math.inf
