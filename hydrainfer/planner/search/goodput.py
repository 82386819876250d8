"""The layout with the best goodput: pruned by an upper bound, screened on a short trace, then measured.

    layouts ─bound below the best─> pruned
            ─screened─> does not carry the best's goodput: an upper limit is all that is known of it
            ─finals─> goodput in the steady state with its interval (`metrics.Search`), for the best few with more runs

On a short trace goodput is too high, as queues have no time to grow: a layout that fails on it fails on the
whole. A layout's goodput on the short trace is therefore compared with the best layout's goodput there. Layouts are
tried in waves, highest bound first. A wave uses the best goodput of earlier waves only, so that the outcome does not
depend on the number of processes. A search starts from all earlier runs of its layout (`Trials`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec

from hydrainfer.core import Layout
from hydrainfer.judging import Search
from hydrainfer.machine import n_cores
from hydrainfer.planner.search.bound import Bounds
from hydrainfer.planner.search.layouts import method_of
from hydrainfer.planner.search.study import Attempt, Study, Trial, observe
from hydrainfer.planner.search.trials import Trials
from hydrainfer.processes import processes

_WAVE = 4
_SCREEN = 300  # requests
TOLERANCE = 0.03
"""Layouts that differ by less than this share count as equal."""
_NEAR = 0.95  # of the best goodput: layouts above it are measured
_AT_ONCE = 2  # finals after each wave


class SearchEffort(NamedTuple):
    """The effort of a search. `max_runs`, `tolerance`: of each final, see `metrics.Search`. `finals`: the number of
    layouts that get one, besides the layouts given as `first`. `decide`: run a second, exact final for EPD only, if it
    may be the best, and for the best of the others. `measured`: the number of layouts that are measured in all, the
    last of them roughly. `screening`: the tolerance of goodput on the short trace."""

    max_runs: int = 2
    tolerance: float = 0.15
    finals: int = 8
    decide: bool = True
    measured: int = 10
    screening: float = 0.1


COARSE, EXACT, QUICK = SearchEffort(), SearchEffort(3, 0.06), SearchEffort(1, 0.2, 2, False, 0, 0.2)


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the search for one layout. `goodput`: requests per second, within [`goodput_low`, `goodput_high`];
    None if only the upper limit `goodput_high` is known. `stage`: the last stage of the search that the layout reached
    ("pruned", "screened", "final"). `attempts`: the rates tried, in ascending order."""

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
"""A callback that gets the name of the current work, how much of it is done, and the total."""


def search(
    study: Study,
    candidates: Sequence[Layout],
    *,
    n_processes: int | None = None,
    exhaustive: bool = False,
    effort: SearchEffort = COARSE,
    first: Sequence[Layout] = (),
    trials: Trials | None = None,
    on_progress: OnProgress = lambda *_: None,
) -> list[Finding]:
    """The findings of all candidates, best first. `exhaustive`: nothing is pruned or screened. `effort`: that of the
    search. `first`: candidates that are likely to be best and are measured before the others. `trials`: the runs of
    earlier searches, to which this search adds its own."""
    of_study = Bounds(study)
    bounds = {layout: of_study.of(layout).rate for layout in candidates}
    order = sorted(candidates, key=lambda layout: -bounds[layout])
    with workers(n_processes) as run:
        if exhaustive:
            jobs = [(study, layout, bounds[layout], bounds[layout], effort) for layout in order]
            found = _told(run(measured, jobs), len(order), on_progress)
        else:
            waves = _Waves(study, order, bounds, run, effort, trials or Trials(), on_progress)
            found = waves.found(first)
    return sorted(found, key=lambda f: (-(f.goodput or 0.0) * (f.stage == "final"), -(f.goodput_high or 0.0)))


def _told(results: Iterator[Finding], n: int, on_progress: OnProgress) -> list[Finding]:
    findings = []
    for result in results:
        findings.append(result)
        on_progress("measure", len(findings), n)
    return findings


class _Waves:
    """Waves of screening, with finals between them."""

    def __init__(
        self,
        study: Study,
        order: Sequence[Layout],
        bounds: dict[Layout, float],
        run: RunJobs,
        effort: SearchEffort,
        trials: Trials,
        on_progress: OnProgress,
    ) -> None:
        self._effort = effort
        self._trials = trials
        self._study = study
        self._short = study.shortened(_SCREEN)
        self._order = order
        self._bounds = bounds
        self._run = run
        self._on_progress = on_progress
        self._screened: dict[Layout, Finding] = {}
        self._finals: dict[Layout, Finding] = {}

    def found(self, first: Sequence[Layout]) -> list[Finding]:
        n = len(self._order)
        n_finals = len(first) + self._effort.finals
        coarse = self._effort
        self._measure([(k, coarse) for k in first])
        for begin in range(0, n, _WAVE):
            end = begin + _WAVE
            self._on_progress("screen", begin, n)
            self._screen(self._order[begin:end])
            self._on_progress("screen", min(end, n), n)
            if len(self._finals) < n_finals:
                self._measure([(k, coarse) for k in self._promising()[:_AT_ONCE]])
        while len(self._finals) < n_finals and (promising := self._promising()):
            self._measure([(k, coarse) for k in promising[:_AT_ONCE]])
        epd = [k for k in self._order if method_of(k) == "EPD"]  # the baseline of all others
        self._measure([(k, coarse) for k in epd if k not in self._finals])
        # the longest jobs first
        jobs = [(k, EXACT) for k in self._close(epd)]
        jobs += [(k, QUICK) for k in self._runners_up()]
        self._measure(jobs)
        return [*(self._screened | self._finals).values()]

    @property
    def _best(self) -> float:
        return max((f.goodput or 0.0 for f in self._finals.values()), default=0.0)

    def _screen(self, wave: Sequence[Layout]) -> None:
        best = self._best
        tolerance = self._effort.screening
        jobs = dict[Layout, tuple[Any, ...]]()
        for k in wave:
            high = self._bounds[k]
            if high >= best:
                jobs[k] = (self._short, k, high, best * _NEAR, tolerance, self._trials.of(self._short, k, hurry=True))
            else:
                self._screened[k] = Finding(layout=str(k), stage="pruned", bound=high, goodput_high=high)
        for k, (found, new) in zip(jobs, self._run(_rough, [*jobs.values()])):
            self._screened[k] = found
            self._trials.add(self._short, k, new, hurry=True)

    def _measure(self, layouts: Sequence[tuple[Layout, SearchEffort]]) -> None:
        jobs = [
            (self._study, k, self._bounds[k], self._near(k), effort, self._trials.of(self._study, k))
            for k, effort in layouts
        ]
        if jobs:
            self._on_progress("measure", 0, len(jobs))
        for n, ((k, _), (found, new)) in enumerate(zip(layouts, self._run(_steady, jobs)), 1):
            self._finals[k] = found
            self._trials.add(self._study, k, new)
            self._on_progress("measure", n, len(jobs))

    def _near(self, layout: Layout) -> float:
        """The rate at which a final starts: the layout's earlier final or, if there is none, its goodput on the short
        trace divided by `_flattery`."""
        known = self._finals.get(layout) or self._screened.get(layout)
        if known is None or not known.goodput:
            return 0.8 * (known.goodput_high if known is not None and known.goodput_high else self._bounds[layout])
        if layout in self._finals:
            return known.goodput
        return known.goodput / self._flattery

    @property
    def _flattery(self) -> float:
        """The ratio of the best layout's goodput on the short trace to that in the steady state, at least 1; 1 if not
        known."""
        if self._best:
            return max(1.0, self._rough_best / self._best)
        return 1.0

    @property
    def _rough_best(self) -> float:
        """The best layout's goodput on the short trace; 0 if not known."""
        best = max(self._finals, key=lambda k: self._finals[k].goodput or 0.0, default=None)
        known = None if best is None else self._screened.get(best)
        return known.goodput or 0.0 if known is not None else 0.0

    def _promising(self) -> list[Layout]:
        """Layouts not measured yet whose goodput on the short trace is about as high as the best layout's; highest
        first."""
        rough = {k: f.goodput or 0.0 for k, f in self._screened.items()}
        least = max(self._best, self._rough_best) * _NEAR
        open_ = [k for k, rate in rough.items() if rate > least and k not in self._finals]
        return sorted(open_, key=lambda k: -rough[k])

    def _close(self, epd: Sequence[Layout]) -> list[Layout]:
        """Layouts that get an exact final: those of `epd` that may carry as much as the best, and the best of the
        others."""
        others = sorted((k for k in self._finals if k not in epd), key=lambda k: -(self._finals[k].goodput or 0.0))
        able = [k for k in epd if (self._finals[k].goodput_high or 0.0) >= self._best]
        return [*able, *others[:1]] if self._effort.decide else []

    def _runners_up(self) -> list[Layout]:
        """The unmeasured layouts with the highest upper limits, as many as are missing to `effort.measured`."""
        rest = [k for k in self._screened if k not in self._finals]
        high = {k: self._screened[k].goodput_high or self._bounds[k] for k in rest}
        n = max(0, self._effort.measured - len(self._finals))
        return sorted(rest, key=lambda k: (-high[k], -self._bounds[k]))[:n]


def _rough(
    study: Study, layout: Layout, bound: float, at_least: float, tolerance: float, known: Sequence[Trial]
) -> tuple[Finding, list[Trial]]:
    """The layout's goodput on a short trace within `tolerance`, or only an upper limit if the layout does not carry
    `at_least`; and the new runs. `known`: earlier runs."""
    new: list[Trial] = []

    def carries(rate: float) -> bool:
        new.append(observe(study, layout, rate, hurry=True))
        return new[-1].attempt.carried(study.target)

    attempts = [t.attempt for t in known]
    high = min((a.rate for a in attempts if not a.carried(study.target)), default=bound)
    low = max((a.rate for a in attempts if a.rate < high), default=0.0)
    finding = Finding(layout=str(layout), stage="screened", bound=bound)
    if high <= at_least or (low < at_least and not carries(at_least)):
        finding = msgspec.structs.replace(finding, goodput_high=min(high, at_least))
    else:
        low, high = bracket(carries, max(low, at_least), high, high)
        low, high = narrow(carries, low, high, tolerance)
        finding = msgspec.structs.replace(finding, goodput=low, goodput_low=low, goodput_high=high)
    return msgspec.structs.replace(finding, attempts=by_rate([*known, *new])), new


def measured(study: Study, layout: Layout, bound: float, near: float, effort: SearchEffort = COARSE) -> Finding:
    """The layout's goodput in the steady state, with its confidence interval; the search begins near the rate
    `near`."""
    return _steady(study, layout, bound, near, effort, ())[0]


def _steady(
    study: Study, layout: Layout, bound: float, near: float, effort: SearchEffort, known: Sequence[Trial]
) -> tuple[Finding, list[Trial]]:
    """The result of `measured`, starting from the `known` runs; and the new runs."""
    near = min(near, 0.95 * bound)
    new = list[Trial]()
    steady = Search(
        near, target=study.target, tolerance=effort.tolerance, bound=bound, max_runs=effort.max_runs, factor=1.15
    )
    for trial in known:
        steady.tell(trial.attempt.rate, trial.series)
    while (ask := steady.next()) is not None:
        new.append(observe(study.run(ask.times.bit_length() - 1), layout, ask.rate))
        steady.tell(ask.rate, new[-1].series)
    goodput = steady.result()
    finding = Finding(
        layout=str(layout),
        stage="final",
        bound=bound,
        goodput=goodput.rate_per_s,
        goodput_low=goodput.low or 0.0,
        goodput_high=goodput.high or bound,
        attempts=by_rate([*known, *new]),
    )
    return finding, new


def by_rate(trials: Sequence[Trial]) -> tuple[Attempt, ...]:
    """The attempts of the runs, in ascending order of the rate."""
    return tuple(sorted((t.attempt for t in trials), key=lambda a: a.rate))


def bracket(
    carries: Callable[[float], bool], low: float, near: float, most: float, factor: float = 1.5
) -> tuple[float, float]:
    """A rate that is carried and one that is not, tried from `near` on; (0, x) if not even a thousandth of `near` is
    carried. `low` counts as carried, `most` as not carried."""
    rate = near
    high = float("inf")
    while rate < most:
        if not carries(rate):
            high = rate
            break
        low = rate
        rate = rate * factor
    else:
        high = most
    while low == 0.0 and high > near / 1000:
        rate = high / factor
        if carries(rate):
            low = rate
        else:
            high = rate
            factor = factor * 1.3
    return low, high


def narrow(carries: Callable[[float], bool], low: float, high: float, tolerance: float) -> tuple[float, float]:
    """The carried `low` and the not carried `high`, with the gap halved on a log scale until it is within
    `tolerance`."""
    while low > 0.0 and high / low > 1.0 + tolerance:
        rate = (low * high) ** 0.5
        low, high = (rate, high) if carries(rate) else (low, rate)
    return low, high


RunJobs = Callable[[Callable[..., Any], Sequence[tuple[Any, ...]]], Iterator[Any]]


@contextmanager
def workers(n_processes: int | None) -> Iterator[RunJobs]:
    """A function that runs jobs in `n_processes` processes (default: one per core) and returns the results in order.
    With one process, jobs run in this process."""
    n = n_processes or n_cores()
    if n == 1:
        yield lambda call, jobs: (call(*job) for job in jobs)
        return
    with processes(n, preload=[__name__]) as pool:
        yield lambda call, jobs: pool.map(call, *zip(*jobs)) if jobs else iter(())
