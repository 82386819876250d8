"""The layout with the best goodput: pruned by an upper bound, screened on a short trace, then measured.

    layouts ─bound below the best─> pruned
            ─screened─> does not carry the best's goodput: an upper limit is all that is known of it
            ─finals─> goodput in the steady state with its interval (`metrics.Search`), for the best few with more runs

A short trace flatters, as queues have no time to grow: a layout that fails on it fails on the whole. What a layout
carries on the short trace is compared with what the best one carries there. Layouts are tried in waves, best bound
first. A wave knows the best goodput of the waves before it only, so that the outcome does not depend on the number of
processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec

from hydrainfer.core import Layout
from hydrainfer.metrics import Search
from hydrainfer.planner.search.bound import Bounds
from hydrainfer.planner.search.layouts import method_of
from hydrainfer.planner.search.study import Attempt, Study, attempt, observe
from hydrainfer.processes import processes

_WAVE = 4
_SCREEN = 300  # requests
TOLERANCE = 0.03
"""A smaller difference between two layouts is none."""
_NEAR = 0.95  # of the best: worth a closer look
_AT_ONCE = 2  # finals after a wave


class SearchEffort(NamedTuple):
    """The effort of a final: see `metrics.Search`. `finals`: layouts that get one, `best`: of them a second, exact
    one. `measured`: layouts that are measured in all, the last of them roughly."""

    max_runs: int = 2
    tolerance: float = 0.1
    finals: int = 8
    best: int = 2
    measured: int = 10


COARSE, EXACT, QUICK = SearchEffort(), SearchEffort(3, 0.05), SearchEffort(1, 0.2, 2, 0, 0)


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the search for one layout. `goodput` requests per second, within [`goodput_low`, `goodput_high`];
    None where only the upper limit `goodput_high` is known. `stage`: of the search that it reached ("pruned",
    "screened", "final"). `attempts`: the rates tried, in order of rate."""

    layout: str
    stage: str
    bound: float
    goodput: float | None = None
    goodput_low: float | None = None
    goodput_high: float | None = None
    attempts: tuple[Attempt, ...] = ()

    @property
    def best_attempt(self) -> Attempt | None:
        """The longest attempt at the highest rate tried that is within the goodput."""
        within = [a for a in self.attempts if self.goodput is not None and a.rate <= self.goodput and not a.stopped]
        return max(within, key=lambda a: (a.rate, a.n), default=None)

    @property
    def failed_attempt(self) -> Attempt | None:
        """The attempt at the lowest rate that was not carried."""
        return next((a for a in self.attempts if self.goodput is None or a.rate > self.goodput), None)


OnProgress = Callable[[str, int, int], None]
"""Hears what is going on, how much of it is done, and of how much."""


def search(
    study: Study,
    candidates: Sequence[Layout],
    *,
    n_processes: int | None = None,
    exhaustive: bool = False,
    effort: SearchEffort = COARSE,
    on_progress: OnProgress = lambda *_: None,
) -> list[Finding]:
    """The findings of all candidates, best first. `exhaustive`: nothing is pruned or screened. `effort`: of finals."""
    of_study = Bounds(study)
    bounds = {layout: of_study.of(layout).rate for layout in candidates}
    order = sorted(candidates, key=lambda layout: -bounds[layout])
    with workers(n_processes) as run:
        if exhaustive:
            jobs = [(study, layout, bounds[layout], bounds[layout], effort) for layout in order]
            found = _told(run(measured, jobs), len(order), on_progress)
        else:
            found = _Waves(study, order, bounds, run, effort, on_progress).found()
    return sorted(found, key=lambda f: (-(f.goodput or 0.0) * (f.stage == "final"), -(f.goodput_high or 0.0)))


def _told(results: Iterator[Finding], n: int, on_progress: OnProgress) -> list[Finding]:
    found = []
    for result in results:
        found.append(result)
        on_progress("measure", len(found), n)
    return found


class _Waves:
    """Waves of screening, with finals between them."""

    def __init__(
        self,
        study: Study,
        order: Sequence[Layout],
        bounds: dict[Layout, float],
        run: RunJobs,
        effort: SearchEffort,
        on_progress: OnProgress,
    ) -> None:
        self._effort = effort
        self._study, self._short = study, study.shortened(_SCREEN)
        self._order, self._bounds, self._run, self._on_progress = order, bounds, run, on_progress
        self._screened: dict[Layout, Finding] = {}
        self._finals: dict[Layout, Finding] = {}

    def found(self) -> list[Finding]:
        n = len(self._order)
        for begin in range(0, n, _WAVE):
            best = self._best
            wave = self._order[begin : begin + _WAVE]
            open_ = [layout for layout in wave if self._bounds[layout] >= best]
            for layout in wave:
                if layout not in open_:
                    high = self._bounds[layout]
                    self._screened[layout] = Finding(layout=str(layout), stage="pruned", bound=high, goodput_high=high)
            tolerance = self._effort.tolerance
            jobs = [(self._short, layout, self._bounds[layout], best * _NEAR, tolerance) for layout in open_]
            self._screened |= dict(zip(open_, self._run(_rough, jobs)))
            if len(self._finals) < self._effort.finals:
                self._measure(self._promising()[:_AT_ONCE])
            self._on_progress("screen", min(begin + _WAVE, n), n)
        while len(self._finals) < self._effort.finals and (promising := self._promising()):
            self._measure(promising[:_AT_ONCE])
            self._on_progress("measure", len(self._finals), len(self._finals) + len(promising))
        whole = [k for k in self._order if k not in self._finals and method_of(k) == "EPD"]
        self._measure(whole)  # what all others are compared with
        first = sorted(self._finals, key=lambda k: -(self._finals[k].goodput or 0.0))[: self._effort.best]
        self._measure(first, EXACT)
        self._measure(self._runners_up(), QUICK)
        return [*(self._screened | self._finals).values()]

    @property
    def _best(self) -> float:
        return max((f.goodput or 0.0 for f in self._finals.values()), default=0.0)

    def _promising(self) -> list[Layout]:
        """Layouts not measured yet, on the short trace no worse than the best there; most promising first."""
        rough = {k: f.goodput or 0.0 for k, f in self._screened.items()}
        best = max(self._finals, key=lambda k: self._finals[k].goodput or 0.0, default=None)
        least = max(self._best, rough.get(best, 0.0) if best is not None else 0.0) * _NEAR
        open_ = [k for k, rate in rough.items() if rate > least and k not in self._finals]
        return sorted(open_, key=lambda k: -rough[k])

    def _runners_up(self) -> list[Layout]:
        """Those that may be best of the rest, as far as is known, to make up the number that is measured."""
        rest = [k for k in self._screened if k not in self._finals]
        high = {k: self._screened[k].goodput_high or self._bounds[k] for k in rest}
        n = max(0, self._effort.measured - len(self._finals))
        return sorted(rest, key=lambda k: (-high[k], -self._bounds[k]))[:n]

    def _measure(self, layouts: Sequence[Layout], effort: SearchEffort | None = None) -> None:
        jobs = []
        for k in layouts:
            known = self._finals.get(k, self._screened[k])
            near = known.goodput or 0.8 * (known.goodput_high or self._bounds[k])
            jobs.append((self._study, k, self._bounds[k], near, effort or self._effort))
        self._finals |= dict(zip(layouts, self._run(measured, jobs)))


def _rough(study: Study, layout: Layout, bound: float, at_least: float, tolerance: float) -> Finding:
    """The layout's goodput on a short trace within `tolerance`; only an upper limit if it does not carry `at_least`."""
    tried: list[Attempt] = []

    def carries(rate: float) -> bool:
        tried.append(attempt(study, layout, rate))
        return tried[-1].carried(study.target)

    if at_least and not carries(at_least):
        found = Finding(layout=str(layout), stage="screened", bound=bound)
        return msgspec.structs.replace(found, goodput_high=at_least, attempts=tuple(tried))
    low, high = bracket(carries, at_least, bound, bound)
    low, high = narrow(carries, low, high, tolerance)
    attempts = tuple(sorted(tried, key=lambda a: a.rate))
    return Finding(
        layout=str(layout),
        stage="screened",
        bound=bound,
        goodput=low,
        goodput_low=low,
        goodput_high=high,
        attempts=attempts,
    )


def measured(study: Study, layout: Layout, bound: float, near: float, effort: SearchEffort = COARSE) -> Finding:
    """The layout's goodput in the steady state, with its confidence interval; the search begins near `near`."""
    tried: list[Attempt] = []
    near = min(near, 0.95 * bound)
    steady = Search(
        near, target=study.target, tolerance=effort.tolerance, bound=bound, max_runs=effort.max_runs, factor=1.15
    )
    while (ask := steady.next()) is not None:
        run = study.run(ask.times.bit_length() - 1)
        result, series = observe(run, layout, ask.rate)
        tried.append(result)
        steady.tell(ask.rate, series)
    found = steady.result()
    return Finding(
        layout=str(layout),
        stage="final",
        bound=bound,
        goodput=found.rate_per_s,
        goodput_low=found.low or 0.0,
        goodput_high=found.high or bound,
        attempts=tuple(sorted(tried, key=lambda a: a.rate)),
    )


def bracket(
    carries: Callable[[float], bool], low: float, near: float, most: float, factor: float = 1.5
) -> tuple[float, float]:
    """A rate that is carried and one that is not, beginning at `near`; (0, x) if not even a thousandth of it is
    carried. `low` is carried, `most` is not."""
    rate, high = near, float("inf")
    while rate < most:
        if not carries(rate):
            high = rate
            break
        low, rate = rate, rate * factor
    else:
        high = most
    while low == 0.0 and high > near / 1000:
        rate = high / factor
        if carries(rate):
            low = rate
        else:
            high, factor = rate, factor * 1.3
    return low, high


def narrow(carries: Callable[[float], bool], low: float, high: float, tolerance: float) -> tuple[float, float]:
    """Halve the gap on a log scale until it is within `tolerance`."""
    while low > 0.0 and high / low > 1.0 + tolerance:
        rate = (low * high) ** 0.5
        low, high = (rate, high) if carries(rate) else (low, rate)
    return low, high


RunJobs = Callable[[Callable[..., Any], Sequence[tuple[Any, ...]]], Iterator[Any]]


@contextmanager
def workers(n_processes: int | None) -> Iterator[RunJobs]:
    """A function that runs jobs in order, in processes (default: one per core); a single one is this process."""
    n = n_processes or len(os.sched_getaffinity(0))
    if n == 1:
        yield lambda call, jobs: (call(*job) for job in jobs)
        return
    with processes(n, preload=[__name__]) as pool:
        yield lambda call, jobs: pool.map(call, *zip(*jobs)) if jobs else iter(())
