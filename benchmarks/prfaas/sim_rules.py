"""The paper's rule and the rule `seconds`, simulated over load, with a link that has room and one that limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figure import Curves, save_curves
from benchmarks.prfaas.report import at_most
from benchmarks.prfaas.served import SHORT_OUTPUT, far_share, gb_per_request, latencies, means
from benchmarks.prfaas.setting import BATCH, prfaas
from hydrainfer.cluster.offload import Rule
from hydrainfer.planner.clusters import solve
from hydrainfer.planner.clusters.simulated import Setup, simulate, trace_at

TITLE = "Simulated: the paper's rule, and the cluster that is ready sooner"
HAS_FIGURE = True
GBPS = (100.0, 6.0)
LOADS = (0.5, 0.7, 0.84, 0.95)
RULES: tuple[Rule, ...] = ("length", "seconds")
N_REQUESTS, SEEDS = 500, range(2)
_NO_WORSE = 1.0
TEXT = """\
Loads are shares of the model's rate at each bandwidth, with the threshold and split that are best there; two seeds.
With `length`, the short loop is on. `seconds` sends a prompt where its KV is predicted to be ready sooner.

At 100 Gbps `seconds` is better only at half load and only in the mean: H200 are faster than H20, so it sends 76 to 95 %
of all prompts there, also short ones, and long prompts wait behind them. From 0.7 on it has 4 to 20 % more in the mean
and 7 to 21 % more in the p90 than the paper's rule, and sends more bytes.

At 6 Gbps it is the other way round for the first token: the best threshold, 40K, keeps most prompts on H20, and
`seconds` has 0.57 to 0.70 of the mean and 0.55 to 0.79 of the p90. But it sends 1.2 to 2 times the bytes, and the
second token comes 2 to 14 % later. A threshold that is best for the rate is not best for the TTFT."""


def case(gbps: float, load: float, rule: Rule) -> dict[str, Any]:
    """Latencies and what goes far, at a share of the rate that the model has for this bandwidth."""
    clusters = prfaas(gbps)
    best = solve(clusters)
    setup = Setup(batch=BATCH, n_output=SHORT_OUTPUT, rule=rule)
    rate = load * best.throughput.rate
    traces = [trace_at(clusters.lengths, SHORT_OUTPUT, rate, N_REQUESTS, seed) for seed in SEEDS]
    runs = [simulate(clusters, best.arrangement, setup, trace) for trace in traces]
    return {
        "gbps": gbps,
        "load": load,
        "rule": rule,
        "rate_per_s": rate,
        **means(latencies(runs)),
        "far_share": float(np.mean([far_share(run) for run in runs])),
        "gb_per_request": float(np.mean([gb_per_request(run) for run in runs])),
    }


def compute() -> dict[str, Any]:
    """All cases, and the latencies of `seconds` relative to those of the paper's rule."""
    cases = [case(gbps, load, rule) for gbps in GBPS for load in LOADS for rule in RULES]
    rows = []
    for by_length, by_seconds in zip(cases[::2], cases[1::2], strict=True):
        where = f"{by_length['gbps']:g} Gbps, load {by_length['load']:g}"
        for cell, key in (
            ("mean TTFT", "ttft_mean_s"),
            ("TTFT p90", "ttft_p90_s"),
            ("second token p90", "second_p90_s"),
        ):
            ratio = by_seconds[key] / by_length[key]
            rows.append(at_most(f"{where}: {cell}, seconds of length", _NO_WORSE, ratio))
    head = ["Gbps", "load", "rule", "mean TTFT, s", "p90, s", "second token p90, s", "far, %", "GB per request"]
    table: list[list[str | float]] = [[*head]]
    for one in cases:
        seconds = [one["ttft_mean_s"], one["ttft_p90_s"], one["second_p90_s"]]
        cells = [*seconds, 100 * one["far_share"], one["gb_per_request"]]
        table.append([f"{one['gbps']:g}", f"{one['load']:g}", one["rule"], *cells])
    return {"rows": rows, "table": table, "n_requests": N_REQUESTS, "seeds": list(SEEDS), "cases": cases}


def draw(results: dict[str, Any], path: Path) -> None:
    """Mean and p90 of the TTFT over load, per bandwidth."""
    panels = []
    for gbps in GBPS:
        series = {}
        for rule in RULES:
            cases = [one for one in results["cases"] if one["gbps"] == gbps and one["rule"] == rule]
            series[f"{rule}, mean"] = [one["ttft_mean_s"] for one in cases]
            series[f"{rule}, p90"] = [one["ttft_p90_s"] for one in cases]
        title = f"TTFT at {gbps:g} Gbps"
        panels.append(Curves(title, "load, of the model's rate", "s", list(LOADS), series, log=False))
    save_curves(path, panels)
