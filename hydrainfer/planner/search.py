"""The layout with the best goodput: bounded by what no schedule can exceed, screened on a short trace, then measured.

    layouts ─bound below the best─> pruned
            ─screened─> far below the best: an upper limit is all that is known of it
            ─finals─> goodput with its interval, on the whole trace

Layouts are tried in waves, best bound first; what a wave knows of the best comes from the waves before it, so that the
outcome does not depend on how many processes share the work.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

import msgspec

from hydrainfer.core import Layout
from hydrainfer.metrics import Proportion
from hydrainfer.planner.layouts import StageWork, most_rate
from hydrainfer.planner.study import Attempt, Study, attempt

_WAVE = 4
_SCREEN = 300  # requests
_NEAR = 0.85  # of the best: worth a closer look
_FINALS = 8


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one layout. `goodput` requests per second, within [`goodput_low`, `goodput_high`]; None where
    only the upper limit `goodput_high` is known. `stage`: of the search that it reached ("pruned", "screened",
    "final"). `attempts`: the rates tried, in order of rate."""

    layout: str
    stage: str
    bound: float
    goodput: float | None = None
    goodput_low: float | None = None
    goodput_high: float | None = None
    attempts: tuple[Attempt, ...] = ()

    @property
    def best_attempt(self) -> Attempt | None:
        """At the goodput."""
        return next((a for a in self.attempts if self.goodput is not None and a.rate == self.goodput), None)

    @property
    def failed_attempt(self) -> Attempt | None:
        """At the lowest rate that was not carried."""
        return next((a for a in self.attempts if self.goodput is None or a.rate > self.goodput), None)


Progress = Callable[[str, int, int], None]
"""Hears what is going on, how much of it is done, and of how much."""


def search(
    study: Study,
    candidates: Sequence[Layout],
    work: StageWork,
    *,
    n_processes: int | None = None,
    exhaustive: bool = False,
    on_progress: Progress = lambda *_: None,
) -> list[Found]:
    """All of them, best first. `work` bounds what each could carry; `exhaustive`: nothing is pruned or screened."""
    slack = _slack(study)
    bounds = {layout: most_rate(layout, work) * slack for layout in candidates}
    order = sorted(candidates, key=lambda layout: -bounds[layout])
    first = max(bounds[order[0]] / 4, 1e-3)
    found: dict[Layout, Found] = {}
    with _pool(n_processes) as run:
        if exhaustive:
            finalists = [(layout, bounds[layout] / 2) for layout in order]
        else:
            screened = _screen(study.shortened(_SCREEN), order, bounds, first, run, found, on_progress)
            finalists = [(layout, rate) for layout, rate in screened if rate > 0.0][:_FINALS]
        for done, result in enumerate(
            run(_final, [(study, layout, bounds[layout], near) for layout, near in finalists])
        ):
            found[finalists[done][0]] = result
            on_progress("measure", done + 1, len(finalists))
    return sorted(found.values(), key=lambda f: (-(f.goodput or 0.0), -(f.goodput_high or 0.0)))


def _slack(study: Study) -> float:
    """A trace ends, so more can be offered than is carried: the last ones may wait as long as the SLO lets them."""
    share = 1.0 / study.target
    return share * 1.1


def _screen(
    study: Study,
    order: Sequence[Layout],
    bounds: dict[Layout, float],
    first: float,
    run: Run,
    found: dict[Layout, Found],
    on_progress: Progress,
) -> list[tuple[Layout, float]]:
    """Layouts that may be the best, with a rough goodput, best first."""
    best, rough = 0.0, {}
    for begin in range(0, len(order), _WAVE):
        wave = [layout for layout in order[begin : begin + _WAVE] if bounds[layout] >= _NEAR * best]
        for layout in order[begin : begin + _WAVE]:
            if layout not in wave:
                found[layout] = _only_bound(layout, bounds[layout])
        jobs = [(study, layout, bounds[layout], best * _NEAR, best or first) for layout in wave]
        for layout, result in zip(wave, run(_rough, jobs)):
            found[layout] = result
            rough[layout] = result.goodput or 0.0
        best = max([best, *rough.values()])
        on_progress("screen", min(begin + _WAVE, len(order)), len(order))
    near = [(layout, rate) for layout, rate in rough.items() if rate >= _NEAR * best]
    return sorted(near, key=lambda pair: -pair[1])


def _only_bound(layout: Layout, bound: float) -> Found:
    return Found(layout=str(layout), stage="pruned", bound=bound, goodput_high=bound)


def _rough(study: Study, layout: Layout, bound: float, at_least: float, near: float) -> Found:
    """Its goodput on a short trace within 10 %; no closer look if it does not carry `at_least`."""
    tried: list[Attempt] = []

    def carries(rate: float) -> bool:
        tried.append(attempt(study, layout, rate))
        return tried[-1].carried(study.target)

    if at_least and not carries(at_least):
        return Found(layout=str(layout), stage="screened", bound=bound, goodput_high=at_least, attempts=tuple(tried))
    low, high = bracket(carries, at_least or 0.0, max(near, at_least * 1.2), bound * 2)
    low, high = narrow(carries, low, high, 0.1)
    attempts = tuple(sorted(tried, key=lambda a: a.rate))
    return Found(
        layout=str(layout),
        stage="screened",
        bound=bound,
        goodput=low,
        goodput_low=low,
        goodput_high=high,
        attempts=attempts,
    )


def _final(study: Study, layout: Layout, bound: float, near: float) -> Found:
    """Its goodput on the whole trace within 3 %, with what the scatter of its requests leaves open."""
    tried: list[Attempt] = []

    def carries(rate: float) -> bool:
        tried.append(attempt(study, layout, rate))
        return tried[-1].carried(study.target)

    low, high = bracket(carries, 0.0, near, bound * 2, 1.15)
    low, _ = narrow(carries, low, high, 0.03)
    attempts = tuple(sorted(tried, key=lambda a: a.rate))
    surely = [a.rate for a in attempts if Proportion.of(a.n_met, a.n, a.n_effective).low >= study.target]
    surely_not = [a.rate for a in attempts if Proportion.of(a.n_met, a.n, a.n_effective).high < study.target]
    return Found(
        layout=str(layout),
        stage="final",
        bound=bound,
        goodput=low,
        goodput_low=max((r for r in surely if r <= low), default=0.0),
        goodput_high=min((r for r in surely_not if r > low), default=bound),
        attempts=attempts,
    )


def bracket(
    carries: Callable[[float], bool], low: float, near: float, most: float, factor: float = 1.5
) -> tuple[float, float]:
    """(carried, not carried), beginning at `near`; (0, x) if not even a thousandth of it is. `low` is carried."""
    rate, high = near, float("inf")
    while rate < most:
        if not carries(rate):
            high = rate
            break
        low, rate = rate, rate * factor
    else:
        high = rate
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


Run = Callable[[Callable[..., Found], Sequence[tuple[Any, ...]]], Iterator[Found]]


@contextmanager
def _pool(n_processes: int | None) -> Iterator[Run]:
    """Runs jobs, in order, in processes of their own or, if there is one, in this."""
    n = n_processes or len(os.sched_getaffinity(0))
    if n == 1:
        yield lambda call, jobs: (call(*job) for job in jobs)
        return
    with ProcessPoolExecutor(n, mp_context=multiprocessing.get_context("forkserver")) as pool:
        yield lambda call, jobs: pool.map(call, *zip(*jobs)) if jobs else iter(())
