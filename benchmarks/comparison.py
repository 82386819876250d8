"""What two servers' runs say side by side: metrics, ratios, agreement of ids; as a table and as a figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table

from benchmarks.figure import Panel, save_bars
from benchmarks.record import spread
from hydrainfer.workload import LoadResult, Report

OURS, PEER = "hydrainfer", "vllm"
METRICS = {  # name -> (label, factor to the unit shown)
    "ttft_p50_s": ("TTFT p50, ms", 1e3),
    "ttft_p90_s": ("TTFT p90, ms", 1e3),
    "tpot_p50_s": ("TPOT p50, ms", 1e3),
    "tpot_p90_s": ("TPOT p90, ms", 1e3),
    "itl_p99_s": ("ITL p99, ms", 1e3),
    "requests_per_s": ("requests/s", 1.0),
    "output_tokens_per_s": ("output tokens/s", 1.0),
}


def metrics(report: Report) -> dict[str, float]:
    if report.ttft_s is None or report.tpot_s is None or report.itl_s is None:
        return {}
    return {
        "ttft_p50_s": report.ttft_s.p50,
        "ttft_p90_s": report.ttft_s.p90,
        "tpot_p50_s": report.tpot_s.p50,
        "tpot_p90_s": report.tpot_s.p90,
        "itl_p99_s": report.itl_s.p99,
        "requests_per_s": report.requests_per_s,
        "output_tokens_per_s": report.output_tokens_per_s,
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


def summary(runs: list[dict[str, Any]], concurrencies: list[int]) -> dict[str, Any]:
    """Per concurrency and metric: each server's spread over kept runs, and that of the ratio ours / vLLM over rounds
    of which both runs were kept."""
    found: dict[str, Any] = {}
    for clients in concurrencies:
        by_server = {
            name: {
                r["seed"]: r["metrics"]
                for r in runs
                if (r["server"], r["concurrency"], r["kept"]) == (name, clients, True)
            }
            for name in (OURS, PEER)
        }
        both = sorted(by_server[OURS].keys() & by_server[PEER].keys())
        found[str(clients)] = {
            metric: {
                **{name: spread([m[metric] for m in by_server[name].values()]) for name in by_server},
                "ratio": spread([by_server[OURS][s][metric] / by_server[PEER][s][metric] for s in both]),
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
            shown.add_row(clients, label, *(_cell(cells[c], factor) for c in (OURS, PEER)), _cell(cells["ratio"], 1.0))
        shown.add_section()
    sizes = Table()
    for column in ("server", "start-up, s", "peak RSS (sum of VmHWM), MB", "PSS at the end, MB", "processes"):
        sizes.add_column(column, justify="right")
    for name, s in results["servers"].items():
        memory = [f"{s[k] / 1e6:.0f}" for k in ("hwm_sum_bytes", "pss_bytes")]
        sizes.add_row(name, f"{s['startup_s']:.1f}", *memory, str(s["processes"]))
    ids = results["ids"]
    return Group(shown, sizes, f"greedy ids equal: {ids['equal']} of {ids['compared']} requests")


def _cell(s: dict[str, float] | None, factor: float) -> str:
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
