"""Three deployments simulated: the rates of the case study, and the TTFT with queues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.figure import Panel, save_bars
from benchmarks.prfaas.report import at_most, simulated
from benchmarks.prfaas.served import FCFS, PAPERS_OUTPUT, SHORT_OUTPUT, latencies, means, saturated
from benchmarks.prfaas.setting import ALL_FAR, BATCH, homogeneous, prfaas
from hydrainfer.planner.clusters import Arrangement, Clusters, solve, throughput
from hydrainfer.planner.clusters.simulated import Setup, simulate, trace_at
from hydrainfer.scheduler import Policy

TITLE = "Simulated: rates of three deployments, and the TTFT with queues"
HAS_FIGURE = True
N_SATURATED = 2000
N_REQUESTS, SEEDS, LOAD = 800, range(5), 0.84
_RATE = 0.03
_HALF = 0.5
ORDERS = {"rank": Policy(), "fcfs": FCFS}
TEXT = """\
Saturated, each deployment carries what the model says with E[T(L)], to 1 %. So the paper's ratios hold for the
production schedulers, not only on paper.

At 84 % of what 96 H20 carry, which is 54 % of what PrfaaS does, queues are in the TTFT: PrfaaS has 0.41 of the mean and
0.33 to 0.35 of the p90 (means of five seeds), and no seed is above half. Without queues the mean is half (Table 6), so
the rest is waiting that a busier deployment has. The order within an instance hardly matters: `rank`, as in production,
and `fcfs` are within 5 % of each other."""


def deployments() -> dict[str, tuple[Clusters, Arrangement]]:
    """The paper's three, the first two at their best arrangement."""
    return {
        "PrfaaS": (prfaas(), solve(prfaas()).arrangement),
        "homogeneous": (homogeneous(), solve(homogeneous()).arrangement),
        "all far": (prfaas(), ALL_FAR),
    }


def ttft(order: Policy, rate: float) -> dict[str, dict[str, list[float]]]:
    """Latencies of PrfaaS and homogeneous at a rate that both carry, one value per seed."""
    setup = Setup(batch=BATCH, n_output=SHORT_OUTPUT, policy=order)
    found = {}
    for name in ("PrfaaS", "homogeneous"):
        clusters, arrangement = deployments()[name]
        traces = [trace_at(clusters.lengths, SHORT_OUTPUT, rate, N_REQUESTS, seed) for seed in SEEDS]
        found[name] = latencies([simulate(clusters, arrangement, setup, trace) for trace in traces])
    return found


def compute() -> dict[str, Any]:
    """Saturated rates beside the model's, their ratios beside the paper's, and the TTFT at 84 % of the lower rate."""
    setup = Setup(batch=BATCH, n_output=PAPERS_OUTPUT, policy=FCFS)
    model, rates = {}, {}
    for name, (clusters, arrangement) in deployments().items():
        model[name] = throughput(clusters, arrangement).rate
        _, rates[name] = saturated(clusters, arrangement, setup, N_SATURATED)
    rows = [simulated(f"{name}: rate, req/s (model)", model[name], rates[name], tolerance=_RATE) for name in rates]
    for name, other, paper in (
        ("PrfaaS", "homogeneous", 1.54),
        ("all far", "homogeneous", 1.15),
        ("PrfaaS", "all far", 1.54 / 1.15),
    ):
        rows.append(simulated(f"{name} / {other} (paper)", paper, rates[name] / rates[other]))
    offered = LOAD * model["homogeneous"]
    by_order = {order: ttft(policy, offered) for order, policy in ORDERS.items()}
    table: list[list[str | float]] = [["order", "deployment", "mean TTFT, s", "p90, s", "second token p90, s"]]
    for order, found in by_order.items():
        far, alone = means(found["PrfaaS"]), means(found["homogeneous"])
        for cell, key in (("mean", "ttft_mean_s"), ("p90", "ttft_p90_s")):
            rows.append(at_most(f"TTFT {cell}, PrfaaS of homogeneous, {order}", _HALF, far[key] / alone[key]))
            worst = max(a / b for a, b in zip(found["PrfaaS"][key], found["homogeneous"][key], strict=True))
            rows.append(at_most(f"the same, the worst of {len(SEEDS)} seeds", _HALF, worst))
        for name, mean in (("PrfaaS", far), ("homogeneous", alone)):
            table.append([order, name, mean["ttft_mean_s"], mean["ttft_p90_s"], mean["second_p90_s"]])
    return {
        "rows": rows,
        "table": table,
        "model_per_s": model,
        "simulated_per_s": rates,
        "offered_per_s": offered,
        "n_requests": {"saturated": N_SATURATED, "ttft": N_REQUESTS},
        "seeds": list(SEEDS),
        "by_order": by_order,
    }


def draw(results: dict[str, Any], path: Path) -> None:
    """Rates, and the TTFT of each seed."""
    model, found = results["model_per_s"], results["simulated_per_s"]
    rates = {"model": [[v] for v in model.values()], "simulated": [[v] for v in found.values()]}
    panels = [Panel("requests/s, saturated", list(model), rates)]
    for key, title in (("ttft_mean_s", "mean TTFT, s"), ("ttft_p90_s", "p90 of the TTFT, s")):
        by_order = results["by_order"]
        series = {name: [by_order[order][name][key] for order in by_order] for name in ("PrfaaS", "homogeneous")}
        panels.append(Panel(f"{title}, {results['offered_per_s']:.2f} req/s", list(by_order), series))
    save_bars(path, TITLE, panels)
