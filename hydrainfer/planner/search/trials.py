"""The runs so far, so that no search simulates again what another knows."""

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
    """Runs of studies that differ only in their limit of TTFT, which is at most the `patience_s` of all, and in the
    budgets that follow from it. `hurry`: runs that were given up as soon as too many requests had missed, on a trace of
    their own."""

    def __init__(self) -> None:
        self._of: dict[_Deployment, list[Trial]] = {}

    def of(self, study: Study, layout: Layout, *, hurry: bool = False) -> list[Trial]:
        """The runs of the layout, judged by the SLO of the study."""
        found = self._of.get(_deployment(study, layout, hurry), ())
        return [trial.under(study.slo.ttft_s) for trial in found]

    def add(self, study: Study, layout: Layout, new: Iterable[Trial], *, hurry: bool = False) -> None:
        self._of.setdefault(_deployment(study, layout, hurry), []).extend(new)


def _deployment(study: Study, layout: Layout, hurry: bool) -> _Deployment:
    return _Deployment(layout, tuple(study.budgets(layout).items()), hurry)
