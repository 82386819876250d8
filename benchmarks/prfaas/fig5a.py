"""Figure 5a: the rate over the split of the home cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.figure import save_lines
from benchmarks.prfaas.report import row
from benchmarks.prfaas.setting import prfaas
from hydrainfer.planner.clusters import Arrangement, Service, solve, throughput

TITLE = "Figure 5a: prefill and decode at home"
HAS_FIGURE = True
N_HOME = 8
TEXT = """\
The threshold is that of the optimum. Left of the peak home prefill limits, right of it decode. The optimum is flat: 4
P and 4 D carry 2.2 % less by the equations, and 0.6 % less for a queue."""


def curves(service: Service) -> dict[str, list[float]]:
    """Rates over 1 to 7 P at the best threshold: of both prefill stages, of decode, and of all."""
    clusters = prfaas()
    threshold = solve(clusters, service=service).arrangement.threshold
    prefill, decode, rate = [], [], []
    for n_prefill in range(1, N_HOME):
        split = Arrangement(threshold=threshold, n_prefill=n_prefill, n_decode=N_HOME - n_prefill)
        found = throughput(clusters, split, service)
        assert found.far_per_s is not None and found.home_per_s is not None
        prefill.append(min(found.far_per_s / found.far_share, found.home_per_s / (1.0 - found.far_share)))
        decode.append(found.decode_per_s)
        rate.append(found.rate)
    return {"prefill": prefill, "decode": decode, "rate": rate}


def compute() -> dict[str, Any]:
    """The curves, and where their peaks are."""
    equations, queue = curves("mean_length"), curves("mean_time")
    peak, queue_peak = (1 + max(range(N_HOME - 1), key=found["rate"].__getitem__) for found in (equations, queue))
    rows = [
        row("P at the peak, of 8", 3, peak, queue_peak, tolerance=0.0),
        row("rate at the peak, req/s", 3.24, max(equations["rate"]), max(queue["rate"])),
    ]
    return {"rows": rows, "n_prefill": list(range(1, N_HOME)), "equations": equations, "queue": queue}


def draw(results: dict[str, Any], path: Path) -> None:
    """The equations' curves, and the queue's rate."""
    names = {"prefill": "both prefill stages", "decode": "decode", "rate": "all"}
    series = {name: results["equations"][key] for key, name in names.items()}
    series["all, queue"] = results["queue"]["rate"]
    save_lines(path, TITLE, "P, of 8 instances", "requests/s", results["n_prefill"], series, log=False)
