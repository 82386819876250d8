"""The link simulated: the rate over its bandwidth, with the threshold solved again, left alone, or following."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.figure import Curves, save_curves
from benchmarks.prfaas.report import simulated
from benchmarks.prfaas.served import FCFS, PAPERS_OUTPUT, far_share, gb_per_request, saturated
from benchmarks.prfaas.setting import BATCH, PAPERS, prfaas
from hydrainfer.planner.clusters import Clusters, solve, throughput
from hydrainfer.planner.clusters.simulated import Setup

TITLE = "Simulated: the rate over the bandwidth of the link"
HAS_FIGURE = True
GBPS = (4.0, 6.0, 10.0, 100.0)
N_REQUESTS = 1000
_THRESHOLDS = 200
SOLVED, BARE, FIXED, LOOP = "solved again", "solved again, no host memory", "19.4K, fixed", "19.4K, short loop"
TEXT = """\
Every case gets 1.2 times what the model says it carries. A row counts the rate that prompts on both sides of the
threshold keep up with. The table also has all that ended, which counts a surplus of the side that has room.

At 100 Gbps all cases carry what the model says. Where the link limits, the strict rate is 7 to 14 % below it, and does
not hold; at 6 Gbps solved again, where decode limits, it does. All that ended is 1 to 6 % below with the threshold
solved again. Part of this is the measure: copies share the link equally, so an overloaded link has many of them half
done when the counting ends, and these bytes are carried but not counted. The bytes per request agree with the model to
2 %, and so does what the link allows by them.

Solving the threshold and the split again matters most. At 4 Gbps it carries 1.9 times what 19.4K does, at 6 Gbps 1.7
times, at 10 Gbps 1.1 times. The short loop, which can only move the threshold, gets part of it: 1.6, 1.2 and 1.1 times.
Its model is the best threshold at 3 P and 5 D.

Without host memory at each D, what crosses the link holds the memory of a D while it does, and 4 to 16 % of the rate is
lost where the link limits or nearly does. At 100 Gbps nothing is lost."""


def best_at_papers_split(clusters: Clusters) -> float:
    """The model's highest rate with the paper's 3 P and 5 D: what a loop that only moves the threshold can reach."""
    lengths = clusters.lengths
    thresholds = np.geomspace(lengths.shortest, lengths.longest, _THRESHOLDS)
    arrangements = [msgspec.structs.replace(PAPERS, threshold=float(t)) for t in thresholds]
    return max(throughput(clusters, arrangement).rate for arrangement in arrangements)


def at_bandwidth(gbps: float) -> list[dict[str, Any]]:
    """What is served with each way to set the threshold, beside the model."""
    clusters = prfaas(gbps)
    best = solve(clusters)
    at_split = best_at_papers_split(clusters)
    fixed = Setup(batch=BATCH, n_output=PAPERS_OUTPUT, policy=FCFS, adapts=False)
    bare = msgspec.structs.replace(fixed, host_bytes=0.0)
    loop = msgspec.structs.replace(fixed, adapts=True)
    cases = []
    for name, arrangement, setup, model in (
        (SOLVED, best.arrangement, fixed, best.throughput.rate),
        (BARE, best.arrangement, bare, best.throughput.rate),
        (FIXED, PAPERS, fixed, throughput(clusters, PAPERS).rate),
        (LOOP, PAPERS, loop, at_split),
    ):
        run, rate = saturated(clusters, arrangement, setup, N_REQUESTS, offered=model)
        cases.append(
            {
                "name": name,
                "gbps": gbps,
                "arrangement": msgspec.to_builtins(arrangement),
                "model_per_s": model,
                "simulated_per_s": rate,
                "ended_per_s": run.rate(),
                "far_share": far_share(run),
                "gb_per_request": gb_per_request(run),
            }
        )
    return cases


def table_of(cases: list[dict[str, Any]]) -> list[list[str | float]]:
    """What else there is to know of each case."""
    head = [
        "Gbps",
        "threshold",
        "P",
        "D",
        "t, tokens",
        "all that ended, req/s",
        "of the model's",
        "far, %",
        "GB per request",
    ]
    table: list[list[str | float]] = [[*head]]
    for case in cases:
        split = case["arrangement"]
        cells = [case["name"], f"{split['n_prefill']}", f"{split['n_decode']}", split["threshold"]]
        ended = [case["ended_per_s"], case["ended_per_s"] / case["model_per_s"]]
        table.append([f"{case['gbps']:g}", *cells, *ended, 100 * case["far_share"], case["gb_per_request"]])
    return table


def compute() -> dict[str, Any]:
    """Rates that all lengths keep up with, over the bandwidth."""
    cases = [case for gbps in GBPS for case in at_bandwidth(gbps)]
    rows = [
        simulated(f"{case['gbps']:g} Gbps, {case['name']}: req/s (model)", case["model_per_s"], case["simulated_per_s"])
        for case in cases
    ]
    return {"rows": rows, "table": table_of(cases), "n_requests": N_REQUESTS, "cases": cases}


def draw(results: dict[str, Any], path: Path) -> None:
    """The rate of each way to set the threshold, and the model's with the best."""

    def rates(name: str, key: str) -> list[float]:
        return [case[key] for case in results["cases"] if case["name"] == name]

    series = {name: rates(name, "simulated_per_s") for name in (SOLVED, BARE, FIXED, LOOP)}
    series = {"model, solved again": rates(SOLVED, "model_per_s"), **series}
    series["model, 19.4K fixed"] = rates(FIXED, "model_per_s")
    save_curves(path, [Curves(TITLE, "Gbps", "requests/s", list(GBPS), series, linear_y=True)])
