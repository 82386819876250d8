"""What the simulated parts share: how they serve clusters, saturated or at a rate, and what they read off the runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hydrainfer.planner.clusters import Arrangement, Clusters, throughput
from hydrainfer.planner.clusters.simulated import Floats, Run, Setup, simulate, trace_at
from hydrainfer.scheduler import Policy

OVERLOAD = 1.2  # of the model's rate, so that what limits is always busy
FCFS = Policy(order="fcfs")
PAPERS_OUTPUT = 1024  # tokens of an answer
SHORT_OUTPUT = 128
"""An eighth of the paper's answers in steps that take eight times as long: D are as busy, a run takes half the time."""
_BEGIN, _END = 0.3, 0.95  # of the arrivals, between which ends are counted


def saturated(
    clusters: Clusters, arrangement: Arrangement, setup: Setup, n: int, offered: float | None = None
) -> tuple[Run, float]:
    """A run with more load than the model says can be served, and the rate that all lengths keep up with (see
    `sustained`). `offered`: requests per second that `OVERLOAD` multiplies; None for the model's rate."""
    rate = offered or throughput(clusters, arrangement).rate
    trace = trace_at(clusters.lengths, setup.n_output, OVERLOAD * rate, n, even=True)
    run = simulate(clusters, arrangement, setup, trace)
    return run, sustained(run, arrangement.threshold)


def sustained(run: Run, threshold: float) -> float:
    """Requests per second that prompts up to `threshold` and longer ones both keep up with: of each kind, those that
    ended per second over its share of all requests, and the lesser of the two. `Run.rate` would count a surplus of
    the kind that has room."""
    is_long = np.array([one.request.n_prompt > threshold for one in run.served])
    ends_s = np.array([one.token_s[-1] for one in run.served])
    from_s, to_s = _BEGIN * run.arrivals_s[-1], _END * run.arrivals_s[-1]
    is_counted = (ends_s >= from_s) & (ends_s < to_s)
    kinds = [kind for kind in (is_long, ~is_long) if kind.any()]
    return min(float(np.count_nonzero(is_counted & kind) / (to_s - from_s) / kind.mean()) for kind in kinds)


def far_share(run: Run) -> float:
    """The share of the requests that was not prefilled at home."""
    return 1.0 - run.n_prefilled["home"] / len(run.served)


def gb_per_request(run: Run) -> float:
    """10⁹ bytes that crossed links to home for the average request."""
    return run.sent_bytes / len(run.served) / 1e9


def p90(values: Floats) -> float:
    return float(np.quantile(values, 0.9))


def latencies(runs: Sequence[Run]) -> dict[str, list[float]]:
    """Seconds until the first token and the second one, of each run."""
    return {
        "ttft_mean_s": [float(run.ttft_s.mean()) for run in runs],
        "ttft_p90_s": [p90(run.ttft_s) for run in runs],
        "second_mean_s": [float(run.second_s.mean()) for run in runs],
        "second_p90_s": [p90(run.second_s) for run in runs],
    }


def means(samples: dict[str, list[float]]) -> dict[str, Any]:
    """The mean over runs of each of `latencies`."""
    return {name: float(np.mean(values)) for name, values in samples.items()}
