"""The runs simulated so far, so that no search repeats the runs of another."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from hydrainfer.core import Layout
from hydrainfer.planner.search.study import Study, Trial
from hydrainfer.scheduler import Budgets


class _Deployment(NamedTuple):
    layout: Layout
    budgets: tuple[tuple[str, Budgets], ...]
    hurry: bool


class Trials:
    """Runs of studies that differ only in their TTFT limit, which is at most the `patience_s` they share, and in the
    budgets that follow from it. `hurry`: runs on a trace of their own that were stopped as soon as too many requests
    had missed."""

    def __init__(self) -> None:
        self._of: dict[_Deployment, list[Trial]] = {}

    def of(self, study: Study, layout: Layout, *, hurry: bool = False) -> list[Trial]:
        """The runs of the layout, judged by the SLO of the study."""
        trials = self._of.get(_deployment(study, layout, hurry), ())
        return [trial.under(study.slo) for trial in trials]

    def add(self, study: Study, layout: Layout, new: Iterable[Trial], *, hurry: bool = False) -> None:
        self._of.setdefault(_deployment(study, layout, hurry), []).extend(new)


def _deployment(study: Study, layout: Layout, hurry: bool) -> _Deployment:
    return _Deployment(layout, tuple(study.budgets(layout).items()), hurry)
