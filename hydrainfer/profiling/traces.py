"""The requests that a plan is made with."""

from __future__ import annotations

from hydrainfer.planner.inputs import PromptRules, trace_of
from hydrainfer.planner.nouns import TraceRequest
from hydrainfer.profiling.options import REQUESTS, ProfileQuestion
from hydrainfer.workload.sources import OpenLoop, TooFewRequests, Workload


def requests_of(
    q: ProfileQuestion, workload: Workload, prompts: PromptRules, arrivals: OpenLoop | None = None
) -> tuple[TraceRequest, ...]:
    """As many requests of the workload as were asked for; by default `REQUESTS`, or all that a recording or a dataset
    has if those are fewer. Raises `ConfigError`."""
    n = q.requests or REQUESTS
    try:
        return tuple(trace_of(workload, prompts, n, q.seed, arrivals))
    except TooFewRequests as e:
        if q.requests is not None:
            raise
        return tuple(trace_of(workload, prompts, e.n_there, q.seed, arrivals))


def fewer_than_usual(q: ProfileQuestion, n: int) -> str:
    """A note if a recording or a dataset has fewer requests than plans have by default; else empty."""
    if q.requests is not None or n >= REQUESTS:
        return ""
    return f"Planned with all {n} requests that the workload has; by default there are {REQUESTS:,}, which decide more."
