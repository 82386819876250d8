"""The latency breakdown of an answer: `usage.hydrainfer`, for requests with `timings`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydrainfer.metrics import INTERVALS, Timeline


def breakdown(timelines: Sequence[Timeline | None]) -> dict[str, Any] | None:
    """The times of the first choice and, if there are several choices, of each under `choices`. None where the engine
    has not reported them in time."""
    each = [None if timeline is None else _one(timeline) for timeline in timelines]
    return each[0] if len(each) == 1 else {**(each[0] or {}), "choices": each}


def _one(timeline: Timeline) -> dict[str, Any]:
    return {
        "ttft_s": _rounded(timeline.ttft_s),
        "e2e_s": _rounded(timeline.e2e_s),
        **{f"{name}_s": _rounded(timeline.intervals_s.get(name, 0.0)) for name in INTERVALS},
        "n_preemptions": timeline.n_preemptions,
        "n_migrations": timeline.n_migrations,
        "n_recoveries": timeline.n_recoveries,
        "n_steps": timeline.n_steps,
        "n_drafted": timeline.n_drafted,
        "n_accepted": timeline.n_accepted,
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
