"""What two servers' runs say side by side: metrics, ratios, agreement of ids; as a table and as a figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table

from benchmarks.figure import Panel, save_bars
from benchmarks.footprint import described
from benchmarks.record import spread
from hydrainfer.workload.client import LoadResult
from hydrainfer.workload.results import Report

OURS, PEER = "hydrainfer", "vllm"
METRICS = {  # name -> (label, factor to the unit shown)
    "ttft_p50_s": ("TTFT p50, ms", 1e3),
    "ttft_p90_s": ("TTFT p90, ms", 1e3),
    "tpot_p50_s": ("TPOT p50, ms", 1e3),
    "tpot_p90_s": ("TPOT p90, ms", 1e3),
    "itl_p50_s": ("ITL p50, ms", 1e3),
    "itl_p90_s": ("ITL p90, ms", 1e3),
    "itl_p99_s": ("ITL p99, ms", 1e3),
    "requests_per_s": ("requests/s", 1.0),
    "output_tokens_per_s": ("output tokens/s", 1.0),
    "cpu_s_per_request": ("CPU s/request", 1.0),
}


def metrics(report: Report, cpu_s: float) -> dict[str, float]:
    """`cpu_s`: processor time of the server per request. Empty if nothing was answered."""
    if report.ttft_s is None or report.tpot_s is None or report.itl_s is None:
        return {}
    return {
        "ttft_p50_s": report.ttft_s.p50,
        "ttft_p90_s": report.ttft_s.p90,
        "tpot_p50_s": report.tpot_s.p50,
        "tpot_p90_s": report.tpot_s.p90,
        "itl_p50_s": report.itl_s.p50,
        "itl_p90_s": report.itl_s.p90,
        "itl_p99_s": report.itl_s.p99,
        "requests_per_s": report.requests_per_s,
        "output_tokens_per_s": report.output_tokens_per_s,
        "cpu_s_per_request": cpu_s,
    }


def agreement(a: LoadResult, b: LoadResult) -> list[dict[str, Any]]:
    """Per request that both answered with ids: whether they are equal, and else the first place where they differ."""
    pairs = []
    for x, y in zip(a.records, b.records, strict=True):
        if x.token_ids is not None and y.token_ids is not None:
            different = [i for i, (p, q) in enumerate(zip(x.token_ids, y.token_ids, strict=False)) if p != q]
            equal = x.token_ids == y.token_ids
            first = None if equal else min(different, default=min(len(x.token_ids), len(y.token_ids)))
            pairs.append({"index": x.index, "equal": equal, "first_difference": first})
    return pairs


def kept_metrics(runs: list[dict[str, Any]], server: str, clients: int) -> dict[int, dict[str, float]]:
    """seed → metrics of a server's kept runs. Runs of one round have one seed."""
    return {
        r["seed"]: r["metrics"] for r in runs if (r["server"], r["concurrency"], r["kept"]) == (server, clients, True)
    }


def ratio(a: dict[int, dict[str, float]], b: dict[int, dict[str, float]], metric: str) -> dict[str, float] | None:
    """Spread of a / b over the rounds of which both runs were kept."""
    return spread([a[s][metric] / b[s][metric] for s in sorted(a.keys() & b.keys())])


def summary(runs: list[dict[str, Any]], concurrencies: list[int]) -> dict[str, Any]:
    """Per concurrency and metric: each server's spread over kept runs, and that of the ratio ours / vLLM."""
    found: dict[str, Any] = {}
    for clients in concurrencies:
        by_server = {name: kept_metrics(runs, name, clients) for name in (OURS, PEER)}
        found[str(clients)] = {
            metric: {
                **{name: spread([m[metric] for m in by_server[name].values()]) for name in by_server},
                "ratio": ratio(by_server[OURS], by_server[PEER], metric),
            }
            for metric in METRICS
        }
    return found


def line_of(run: dict[str, Any]) -> str:
    """One run in one line, as it ends."""
    m, cores = run["metrics"], run["cores"]
    idle = max((c for name, c in cores["servers"].items() if name != run["server"]), default=0.0)
    head = f"round {run['round']} concurrency {run['concurrency']} {run['server']:<10}"
    if not m:
        return f"{head} failed: {run['report']['failure_examples']}"
    numbers = (
        f"TTFT {m['ttft_p50_s'] * 1e3:.0f} ms  TPOT {m['tpot_p50_s'] * 1e3:.1f} ms  {m['requests_per_s']:.3f} req/s"
    )
    noise = f"others {cores['others']:.2f} cores, idle server {idle:.2f}"
    return f"{head} {numbers}  {noise}{'' if run['kept'] else '  DROPPED'}"


def table(results: dict[str, Any]) -> Group:
    """Medians with (least–greatest) over kept runs."""
    shown = Table(title=f"{results['n_runs']} runs, {results['n_dropped']} dropped; ratio = {OURS} / {PEER}")
    for column in ("concurrency", "metric", OURS, PEER, "ratio"):
        shown.add_column(column, justify="left" if column == "metric" else "right")
    for clients, by_metric in results["summary"].items():
        for name, cells in by_metric.items():
            label, factor = METRICS[name]
            shown.add_row(clients, label, *(cell(cells[c], factor) for c in (OURS, PEER)), cell(cells["ratio"]))
        shown.add_section()
    sizes = Table()
    for column in ("server", "start-up, s", "peak RSS (sum of VmHWM), MB", "PSS at the end, MB", "processes"):
        sizes.add_column(column, justify="right")
    for name, s in results["servers"].items():
        memory = [f"{s[k] / 1e6:.0f}" for k in ("hwm_sum_bytes", "pss_bytes")]
        sizes.add_row(name, f"{s['startup_s']:.1f}", *memory, str(s["processes"]))
    ids = results["ids"]
    check = [described(results["memory_check"])] if "memory_check" in results else []
    return Group(shown, sizes, *check, f"greedy ids equal: {ids['equal']} of {ids['compared']} requests")


def cell(s: dict[str, float] | None, factor: float = 1.0) -> str:
    """The median and, in brackets, least–greatest."""
    if s is None:
        return "–"
    digits = 1 if s["median"] * factor >= 10 else 2
    median, least, greatest = (f"{s[k] * factor:.{digits}f}" for k in ("median", "min", "max"))
    return f"{median} ({least}–{greatest})"


def figure(path: Path, results: dict[str, Any]) -> None:
    """Bars at the median of kept runs, a dot per run."""
    kept = [r for r in results["runs"] if r["kept"]]
    clients = list(results["summary"])
    panels = []
    for metric in ("ttft_p50_s", "tpot_p50_s", "requests_per_s"):
        label, factor = METRICS[metric]
        series = {
            name: [
                [r["metrics"][metric] * factor for r in kept if (r["server"], str(r["concurrency"])) == (name, c)]
                for c in clients
            ]
            for name in results["servers"]
        }
        panels.append(Panel(label, [f"concurrency {c}" for c in clients], series))
    save_bars(path, " against ".join(results["servers"]), panels)
