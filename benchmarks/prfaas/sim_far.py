"""One, two and four far clusters, simulated: the same devices and bandwidth in more places, and one slow link."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from benchmarks.figure import Panel, save_bars
from benchmarks.prfaas.report import simulated
from benchmarks.prfaas.served import FCFS, PAPERS_OUTPUT, SHORT_OUTPUT, latencies, means, saturated
from benchmarks.prfaas.setting import BATCH, GBIT, LINK_GBPS, prfaas
from hydrainfer.planner.clusters import Cluster, ClusterLink, Clusters, solve
from hydrainfer.planner.clusters.simulated import Setup, simulate, trace_at

TITLE = "Simulated: several far clusters, and one slow link"
HAS_FIGURE = True
N_INSTANCES = 4  # of all far clusters
SCARCE_GBPS = 16.0
_SLOW = 0.25
N_SATURATED, N_REQUESTS, SEEDS, LOAD = 1000, 500, range(1), 0.84
_TOLERANCE = 0.05
LABELS = ("1", "2", "4", "4, one slow", "4, 16 Gbps in all", "the same, one slow")
"""The names of `cases` in the figure."""
TEXT = """\
32 H200 and their bandwidth in one, two and four places. Saturated, all carry the same, to 1 %, and as the model says.
With 100 Gbps in all, one link of four at a quarter of its rate costs nothing, as it still has room. With 16 Gbps in
all, it costs 8 % (model: 5 %), and the best threshold is 25.8K in place of 19.7K.

The TTFT does not hold up: at 84 % of the rate, two and four clusters have more than twice the mean of one. The rule
chooses between clusters by the predicted seconds of the prompt. An instance that has not prefilled yet has no measured
seconds per token, and is taken to need 0.5 ms, six to nine times what an H200 needs. So clusters that were not used
stay unused until the first one has a queue of tens of seconds, and the run is short (500 requests, one seed). Inside a
cluster, instances are compared by their queues only, so this does not happen."""


def several(n_far: int, gbps: float = LINK_GBPS, slow: float = 1.0) -> Clusters:
    """The case study with its 32 H200 and its bandwidth divided among `n_far` clusters. `slow`: the share of its rate
    that the first link has."""
    one = prfaas()
    (cluster,) = one.far
    far: list[Cluster] = []
    links: list[ClusterLink] = []
    for i in range(n_far):
        name = f"far{i}"
        rate = gbps * GBIT / n_far
        if i == 0:
            rate *= slow
        far.append(msgspec.structs.replace(cluster, name=name, instances=N_INSTANCES // n_far))
        links.append(ClusterLink(source=name, target=one.home.name, bytes_per_s=rate))
    return Clusters(home=one.home, far=tuple(far), links=tuple(links), lengths=one.lengths)


def cases() -> dict[str, Clusters]:
    """By name."""
    return {
        "1 × 32 H200, 100 Gbps": several(1),
        "2 × 16 H200, 50 Gbps": several(2),
        "4 × 8 H200, 25 Gbps": several(4),
        "the same, one at 6.25": several(4, slow=_SLOW),
        "4 × 8 H200, 4 Gbps": several(4, SCARCE_GBPS),
        "the same, one at 1": several(4, SCARCE_GBPS, slow=_SLOW),
    }


def served(clusters: Clusters) -> dict[str, Any]:
    """The saturated rate at the best arrangement, and latencies at 84 % of what the model has for one cluster."""
    best = solve(clusters)
    setup = Setup(batch=BATCH, n_output=PAPERS_OUTPUT, policy=FCFS)
    _, rate = saturated(clusters, best.arrangement, setup, N_SATURATED)
    production = Setup(batch=BATCH, n_output=SHORT_OUTPUT)
    offered = LOAD * best.throughput.rate
    traces = [trace_at(clusters.lengths, SHORT_OUTPUT, offered, N_REQUESTS, seed) for seed in SEEDS]
    runs = [simulate(clusters, best.arrangement, production, trace) for trace in traces]
    return {
        "arrangement": msgspec.to_builtins(best.arrangement),
        "model_per_s": best.throughput.rate,
        "simulated_per_s": rate,
        "offered_per_s": offered,
        **means(latencies(runs)),
    }


def compute() -> dict[str, Any]:
    """Rates beside the model's, and relative to one far cluster."""
    found = {name: served(clusters) for name, clusters in cases().items()}
    first = next(iter(found.values()))
    rows, table = (
        [],
        [["far clusters", "t, tokens", "rate of one cluster's", "mean TTFT, s", "p90", "second token p90"]],
    )
    for name, one in found.items():
        rows.append(
            simulated(f"{name}: req/s (model)", one["model_per_s"], one["simulated_per_s"], tolerance=_TOLERANCE)
        )
        relative = one["simulated_per_s"] / first["simulated_per_s"]
        seconds = [one["ttft_mean_s"], one["ttft_p90_s"], one["second_p90_s"]]
        table.append([name, one["arrangement"]["threshold"], relative, *seconds])
    n_requests = {"saturated": N_SATURATED, "latencies": N_REQUESTS}
    return {"rows": rows, "table": table, "n_requests": n_requests, "seeds": list(SEEDS), "cases": found}


def draw(results: dict[str, Any], path: Path) -> None:
    """Rates and latencies of each case."""
    found = results["cases"]
    rates = {
        "model": [[one["model_per_s"]] for one in found.values()],
        "simulated": [[one["simulated_per_s"]] for one in found.values()],
    }
    panels = [Panel("requests/s, saturated", [*LABELS], rates)]
    for key, title in (("ttft_mean_s", "mean TTFT, s, load 0.84"), ("second_p90_s", "second token p90, s")):
        panels.append(Panel(title, [*LABELS], {"simulated": [[one[key]] for one in found.values()]}))
    save_bars(path, TITLE, panels)
