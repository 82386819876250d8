"""How many requests per second does the planner simulate, and how long does a whole search take?

Deployments of rising size serve the same kind of request (one picture, a short question, about 40 answer tokens) at
about two thirds of what they carry, on the virtual clock; then the planner searches all 141 layouts of 8 devices with
1,000-request traces, in as many processes as there are cores. Cost models are the illustrative ones of configs/costs.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.figure import Panel, save_bars
from benchmarks.record import RESULTS, ROOT, spread, write_result
from benchmarks.servers import CpuWatch
from hydrainfer.cache import CacheSpec
from hydrainfer.config import Slo
from hydrainfer.config.cost import read_cost_model
from hydrainfer.core import CostModel, Layout, Role, Stage
from hydrainfer.core.stage import ROLE_NAMES
from hydrainfer.planner.layouts import StageWork, layouts
from hydrainfer.planner.search import search
from hydrainfer.planner.simulator import Simulator
from hydrainfer.planner.study import Station, Study
from hydrainfer.planner.trace import TraceRequest, as_requests, at_rate
from hydrainfer.scheduler import Budgets

QUESTION = "How many requests per second does the planner simulate, and how long does a whole search take?"
QUIET_CORES = 0.1
COSTS = ROOT / "configs" / "costs" / "illustrative-h100-llava-7b.yaml"
PICTURE, TEXT, BATCHED = 576, 40, 256
KV = CacheSpec.full(layers=32, kv_heads=32, head_dim=128, dtype="float16")
EMBED = CacheSpec.embed(width=4096, dtype="float16")


def trace_of(n: int, seed: int) -> tuple[TraceRequest, ...]:
    """Poisson at 1/s; answers of about 40 tokens, log-normal."""
    rng, at_s, found = random.Random(seed), 0.0, []
    for _ in range(n):
        at_s += rng.expovariate(1.0)
        n_output = max(1, int(rng.lognormvariate(3.5, 0.6)))
        found.append(TraceRequest(arrival_s=at_s, n_text=TEXT, pictures=(PICTURE,), n_output=n_output))
    return tuple(found)


def stations(cost: CostModel) -> dict[str, Station]:
    found = {}
    for name in ROLE_NAMES:
        role, blocks = Role.parse(name), {}
        if role.runs(Stage.ENCODE) or role.runs(Stage.PREFILL):
            blocks[EMBED] = 2000
        if role.runs(Stage.PREFILL) or role.runs(Stage.DECODE):
            blocks[KV] = 6000
        found[name] = Station(cost=cost, blocks=blocks, budgets=Budgets(tokens=700, images=4))
    return found


def work_of(cost: CostModel, trace: tuple[TraceRequest, ...]) -> StageWork:
    n_prompt, n_output = PICTURE + TEXT, sum(t.n_output for t in trace) / len(trace)
    return StageWork(
        encode_s=cost.encode_s([PICTURE] * 8) / 8,
        prefill_s=cost.prefill_token_s * n_prompt + cost.prefill_attention_s * n_prompt**2,
        decode_s=n_output * cost.language_s(0, 0, BATCHED, BATCHED * (n_prompt + 40)) / BATCHED,
    )


def one(study: Study, layout: str, rate: float) -> dict[str, float]:
    """One deployment at one rate, every request to its end."""
    requests = as_requests(at_rate(study.trace, rate))
    simulator = Simulator(study.instances(Layout.parse(layout)), study.link)
    watch, begin_s, cpu_s = CpuWatch([]), time.perf_counter(), time.process_time()
    served = simulator.run(requests)
    wall_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - cpu_s
    assert all(s.finish == "length" for s in served)
    return {
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "virtual_s": simulator.now,
        "turns": simulator.n_turns,
        "requests_per_s": len(requests) / wall_s,
        "turns_per_s": simulator.n_turns / wall_s,
        "other_cores": watch.stop().others,
    }


def experiment(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    cost = read_cost_model(args.cost_model)
    runs = []
    for text in args.deployments:
        layout, rate, n = text.split(":")
        study = Study(stations=stations(cost), trace=trace_of(int(n), args.seed), slo=Slo(ttft_s=0.25, tpot_s=0.04))
        rounds = [one(study, layout, float(rate)) for _ in range(args.rounds)]
        found = {key: spread([r[key] for r in rounds]) for key in rounds[0]}
        runs.append({"layout": layout, "rate": float(rate), "n": int(n), **found, "runs": rounds})
        console.print(f"{layout}: {runs[-1]['requests_per_s']['median']:.0f} requests/s simulated")
    searches = []
    for devices in args.devices:
        trace = trace_of(args.requests, args.seed)
        study = Study(stations=stations(cost), trace=trace, slo=Slo(ttft_s=0.25, tpot_s=0.04))
        watch, begin_s, candidates = CpuWatch([]), time.perf_counter(), layouts(devices)
        found = search(study, candidates, work_of(cost, trace))
        use, wall_s = watch.stop(), time.perf_counter() - begin_s
        attempts = [a for f in found for a in f.attempts]
        searches.append(
            {
                "devices": devices,
                "layouts": len(candidates),
                "wall_s": wall_s,
                "attempts": len(attempts),
                "requests_judged": sum(a.n for a in attempts),
                "best": found[0].layout,
                "goodput": found[0].goodput,
                "other_cores": max(0.0, use.others),
            }
        )
        console.print(f"{devices} devices, {len(candidates)} layouts: {wall_s:.1f} s")
    return {"deployments": runs, "searches": searches}


def table(results: dict[str, Any]) -> Table:
    shown = Table(title="one deployment, one process; medians")
    for column in ("layout", "rate", "requests", "wall, s", "requests/s", "turns/s", "virtual s per s"):
        shown.add_column(column, justify="right")
    for r in results["deployments"]:
        wall, virtual = r["wall_s"]["median"], r["virtual_s"]["median"]
        cells = (f"{r['requests_per_s']['median']:.0f}", f"{r['turns_per_s']['median']:.0f}", f"{virtual / wall:.1f}")
        shown.add_row(r["layout"], f"{r['rate']:g}", str(r["n"]), f"{wall:.2f}", *cells)
    return shown


def figure(results: dict[str, Any], path: Path) -> None:
    runs = results["deployments"]
    names = [r["layout"] for r in runs]
    rates = Panel(
        "requests/s simulated", names, {"one process": [[x["requests_per_s"] for x in r["runs"]] for r in runs]}
    )
    walls = Panel("seconds", names, {"all requests": [[x["wall_s"] for x in r["runs"]] for r in runs]})
    found = Panel(
        "search, s",
        [f"{s['layouts']} layouts of {s['devices']}" for s in results["searches"]],
        {"all cores": [[s["wall_s"]] for s in results["searches"]]},
    )
    save_bars(path, "How fast the planner simulates", [rates, walls, found])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=QUESTION)
    parser.add_argument("--cost-model", type=Path, default=COSTS)
    default = ["1EPD:12:1000", "8EPD:100:1000", "2E2P4D:80:1000", "64EPD:800:10000", "8E24P32D:800:10000"]
    parser.add_argument("--deployments", nargs="*", default=default, help="LAYOUT:RATE:REQUESTS")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--devices", type=int, nargs="*", default=[4, 8], help="searched, all layouts of each")
    parser.add_argument("--requests", type=int, default=1000, help="of the search's trace")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    args, console = arguments(), Console(soft_wrap=True, highlight=False)
    results = experiment(args, console)
    console.print(table(results))
    args.cost_model = args.cost_model.relative_to(ROOT) if args.cost_model.is_relative_to(ROOT) else args.cost_model
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    path = write_result("b14_simulator_speed", QUESTION, settings, results, args.out)
    figure(results, RESULTS / "b14_simulator_speed.png" if args.out is None else args.out.with_suffix(".png"))
    noise = max((r["other_cores"]["max"] for r in results["deployments"]), default=0.0)
    if noise > QUIET_CORES:
        console.print(f"not quiet: other processes took up to {noise:.2f} cores", style="red")
    console.print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
