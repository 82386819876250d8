"""What servers' runs say side by side: metrics, ratios, agreement of ids; as a table and as a figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table

from benchmarks.figure import Panel, save_bars
from benchmarks.footprint import described
from benchmarks.record import spread
from hydrainfer.workload.client import LoadResult
from hydrainfer.workload.results import LoadReport

OURS = "hydrainfer"
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
    "text_ttft_p90_s": ("texts' TTFT p90, ms", 1e3),
    "total_s": ("total, s", 1.0),
}
MORE_IS_BETTER = ("requests_per_s", "output_tokens_per_s")


def metrics(report: LoadReport, cpu_s: float) -> dict[str, float]:
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


def kept_metrics(runs: list[dict[str, Any]], server: str, load: str) -> dict[int, dict[str, float]]:
    """seed → metrics of a server's kept runs. Runs of one round have one seed."""
    return {r["seed"]: r["metrics"] for r in runs if (r["server"], r["load"], r["kept"]) == (server, load, True)}


def ratio(a: dict[int, dict[str, float]], b: dict[int, dict[str, float]], metric: str) -> dict[str, float] | None:
    """Spread of a / b over the rounds of which both runs were kept."""
    return spread([a[s][metric] / b[s][metric] for s in sorted(a.keys() & b.keys())])


def summary(runs: list[dict[str, Any]], servers: list[str], loads: list[str]) -> dict[str, Any]:
    """Per load and metric: each server's spread over kept runs, that of the ratio of the first server to each other,
    and the peer whose median is the best."""
    found: dict[str, Any] = {}
    for load in loads:
        kept = {name: kept_metrics(runs, name, load) for name in servers}
        had = [m for m in METRICS if all(m in run for of_one in kept.values() for run in of_one.values())]
        found[load] = {metric: _compared(kept, metric) for metric in had}
    return found


def _compared(kept: dict[str, dict[int, dict[str, float]]], metric: str) -> dict[str, Any]:
    ours, *peers = kept
    values = {name: spread([m[metric] for m in of_one.values()]) for name, of_one in kept.items()}
    medians = {name: value["median"] for name in peers if (value := values[name]) is not None}
    best = (max if metric in MORE_IS_BETTER else min)(medians, key=medians.__getitem__) if medians else None
    return {"values": values, "ratios": {p: ratio(kept[ours], kept[p], metric) for p in peers}, "best": best}


def line_of(run: dict[str, Any]) -> str:
    """One run in one line, as it ends."""
    m, cores = run["metrics"], run["cores"]
    idle = max((c for name, c in cores["servers"].items() if name != run["server"]), default=0.0)
    head = f"round {run['round']} load {run['load']} {run['server']:<10}"
    if not m:
        return f"{head} failed: {run['report']['failure_examples']}"
    numbers = (
        f"TTFT {m['ttft_p50_s'] * 1e3:.0f} ms  TPOT {m['tpot_p50_s'] * 1e3:.1f} ms  {m['requests_per_s']:.3f} req/s"
    )
    noise = f"others {cores['others']:.2f} cores, idle server {idle:.2f}"
    return f"{head} {numbers}  {noise}{'' if run['kept'] else '  DROPPED'}"


def table(results: dict[str, Any]) -> Group:
    """Medians with (least–greatest) over kept runs."""
    ours, *peers = results["servers"]
    title = f"{results['n_runs']} runs, {results['n_dropped']} dropped; ratio = {ours} / the best of the others"
    shown = Table(title=title)
    for column in ("load", "metric", ours, *peers, "ratio"):
        shown.add_column(column, justify="left" if column == "metric" else "right")
    for load, by_metric in results["summary"].items():
        for name, found in by_metric.items():
            label, factor = METRICS[name]
            best = cell(found["ratios"][found["best"]]) if found["best"] else "–"
            shown.add_row(load, label, *(cell(found["values"][c], factor) for c in (ours, *peers)), best)
        shown.add_section()
    sizes = Table()
    for column in ("server", "start-up, s", "peak RSS (sum of VmHWM), MB", "PSS at the end, MB", "processes"):
        sizes.add_column(column, justify="right")
    for name, s in results["servers"].items():
        memory = [f"{s[k] / 1e6:.0f}" for k in ("hwm_sum_bytes", "pss_bytes")]
        sizes.add_row(name, f"{s['startup_s']:.1f}", *memory, str(s["processes"]))
    check = [described(results["memory_check"])] if "memory_check" in results else []
    ids = [
        f"greedy ids equal to {p}'s: {found['equal']} of {found['compared']} requests"
        for p, found in results["ids"].items()
    ]
    return Group(shown, sizes, *check, *ids)


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
    loads = list(results["summary"])
    panels = []
    for metric in ("ttft_p50_s", "tpot_p50_s", "tpot_p90_s", "requests_per_s"):
        label, factor = METRICS[metric]
        series = {
            name: [
                [r["metrics"][metric] * factor for r in kept if (r["server"], r["load"]) == (name, load)]
                for load in loads
            ]
            for name in results["servers"]
        }
        panels.append(Panel(label, loads, series))
    save_bars(path, " against ".join(results["servers"]), panels)
