"""Which overlap mode and which budgets suit this machine?

Variants of `hydrainfer serve`, written MODE/TOKENS as in `off/2048` (--overlap off --token-budget 2048), with /RUNNING
(--max-running) or @SLO (slice/2048@tpot=0.03: --slo tpot=0.03), all run; one at a time is loaded, in rounds, whose
order moves on by one each time. In a round all get the same pictures. Runs that other processes disturbed are dropped
as in b01. Ratios are to the first variant, within a round.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.command import new_console, new_table, options, told
from benchmarks.comparison import METRICS, cell, kept_metrics, line_of, ratio
from benchmarks.figure import Panel, save_bars
from benchmarks.record import spread, write_result
from benchmarks.runs import Bench, Plan, add_load_options, hydrainfer_plan, make_model, seed_of

VARIANTS = ["slice/2048", "off/2048", "free/2048", "step/2048", "off/256"]
MODES = ("slice", "off", "free", "step")
SHOWN = (
    "ttft_p50_s",
    "tpot_p50_s",
    "tpot_p90_s",
    "itl_p90_s",
    "itl_p99_s",
    "requests_per_s",
    "text_ttft_p90_s",
    "total_s",
)


def arguments() -> argparse.Namespace:
    parser = options(__doc__)
    add_load_options(parser, rounds=5, requests=12, loads=["1", "4", "0.4/s", "burst"])
    parser.add_argument("--variants", nargs="+", default=VARIANTS, metavar="MODE/TOKENS[/RUNNING][@SLO]")
    args = parser.parse_args()
    for variant in args.variants:
        mode, *sizes = variant.partition("@")[0].split("/")
        if mode not in MODES or len(sizes) not in (1, 2) or not all(n.isdigit() for n in sizes):
            parser.error(f"{variant!r} is no variant; write MODE/TOKENS, such as off/2048, or MODE/TOKENS/RUNNING")
    return args


def plan(variant: str, args: argparse.Namespace) -> Plan:
    sizes, _, slo = variant.partition("@")
    mode, tokens, *running = sizes.split("/")
    flags = ["--slo", slo] if slo else []
    flags += ["--overlap", mode, "--token-budget", tokens, "--max-queue-s", "600"]
    return hydrainfer_plan(variant, args, flags + [word for n in running for word in ("--max-running", n)])


async def experiment(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    runs: list[dict[str, Any]] = []
    plans = [plan(variant, args) for variant in args.variants]
    with tempfile.TemporaryDirectory() as logs:
        async with Bench.of(plans, args, Path(logs), console) as bench:
            for rank in range(args.rounds):
                first = rank % len(bench.servers)
                for load in args.loads:
                    for server in bench.servers[first:] + bench.servers[:first]:
                        await asyncio.sleep(args.pause_s)
                        run, _ = await bench.run(server, load, seed_of(args, rank, load))
                        runs.append({"round": rank, **run})
                        console.print(line_of(runs[-1]), soft_wrap=True)
            servers = bench.facts()
    return {
        "servers": servers,
        "summary": summary(runs, args.variants, args.loads),
        "n_runs": len(runs),
        "n_dropped": sum(not r["kept"] for r in runs),
        "runs": runs,
    }


def summary(runs: list[dict[str, Any]], variants: list[str], loads: list[str]) -> dict[str, Any]:
    """Per concurrency, variant and metric: the spread over kept runs, and that of the ratio to the first variant."""
    found: dict[str, Any] = {}
    for load in loads:
        kept = {v: kept_metrics(runs, v, load) for v in variants}
        found[load] = {
            v: {
                metric: {
                    "value": spread([m[metric] for m in kept[v].values()]),
                    "ratio": ratio(kept[v], kept[variants[0]], metric),
                }
                for metric in METRICS
                if all(metric in m for m in kept[v].values())
            }
            for v in variants
        }
    return found


def table(results: dict[str, Any]) -> Table:
    shown = new_table(
        f"{results['n_runs']} runs, {results['n_dropped']} dropped; median (least–greatest) over rounds",
        ("load", "overlap/tokens", *(METRICS[m][0] for m in SHOWN)),
    )
    for load, by_variant in results["summary"].items():
        for variant, cells in by_variant.items():
            shown.add_row(
                load, variant, *(cell(cells[m]["value"] if m in cells else None, METRICS[m][1]) for m in SHOWN)
            )
        shown.add_section()
    return shown


def figure(path: Path, results: dict[str, Any], variants: list[str], loads: list[str]) -> None:
    kept = [r for r in results["runs"] if r["kept"]]
    panels = []
    for metric in SHOWN:
        label, factor = METRICS[metric]
        series = {
            f"load {load}": [
                [
                    r["metrics"][metric] * factor
                    for r in kept
                    if (r["server"], r["load"]) == (v, load) and metric in r["metrics"]
                ]
                for v in variants
            ]
            for load in loads
        }
        panels.append(Panel(label, variants, series))
    save_bars(path, "Overlap mode / token budget", panels)


def main() -> None:
    args, console = arguments(), new_console()
    with told(console):
        make_model(args.model)
        results = asyncio.run(experiment(args, console))
    console.print(table(results))
    path = write_result("b05_overlap_and_budgets", __doc__, args, results)
    figure(path.with_suffix(".png"), results, args.variants, args.loads)
    console.print(f"wrote {path} and {path.with_suffix('.png').name}")


if __name__ == "__main__":
    main()
