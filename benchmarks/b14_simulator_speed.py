"""How many requests per second does the planner simulate, and how long does a whole search take?

Deployments of rising size serve the first workload at a share of what bounds them, on the virtual clock; then the
planner searches all layouts of 4 and of 8 devices (141) with 1,000-request traces, in as many processes as there are
cores. Devices and their batches are those of `hydrainfer profile` for published peaks: rooflines, no measurement.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.command import new_console, new_table, options, say_noise
from benchmarks.figure import Panel, save_bars
from benchmarks.record import spread, write_result
from benchmarks.servers import CpuWatch
from hydrainfer.config import locate, read_slo
from hydrainfer.core import Layout
from hydrainfer.planner.costs import read_hardware
from hydrainfer.planner.inputs import prompts_of, shape_of, trace_of
from hydrainfer.planner.search import Bounds, Study, candidates_of, search, study_of
from hydrainfer.planner.simulation import Simulator, as_requests, at_rate
from hydrainfer.workload.sources import read_workload


def study_for(case: str, n: int, seed: int) -> Study:
    """The study that `hydrainfer profile` makes of MODEL:WORKLOAD:DEVICE, with the SLOs of configs/slo."""
    model, dataset, device = case.split(":")
    trace = trace_of(read_workload(dataset), prompts_of(model), n, seed)
    return study_of(shape_of(model), read_hardware(device), trace, read_slo(locate("slo", model), dataset))


def one(study: Study, layout: Layout, rate: float) -> dict[str, float]:
    """One deployment at one rate, every request to its end."""
    requests = as_requests(at_rate(study.trace, rate))
    simulator = Simulator(study.instances(layout), study.link)
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


def deployment(text: str, args: argparse.Namespace) -> dict[str, Any]:
    name, n = text.split(":")
    study, layout = study_for(args.cases[0], int(n), args.seed), Layout.parse(name)
    rate = args.load * Bounds(study).of(layout).rate
    rounds = [one(study, layout, rate) for _ in range(args.rounds)]
    found = {key: spread([r[key] for r in rounds]) for key in rounds[0]}
    return {"layout": name, "rate": rate, "n": int(n), **found, "runs": rounds}


def whole_search(case: str, devices: int, args: argparse.Namespace) -> dict[str, Any]:
    """Search in as many processes as there are cores."""
    study = study_for(case, args.requests, args.seed)
    candidates = candidates_of(study, devices)
    watch, begin_s = CpuWatch([]), time.perf_counter()
    found = search(study, candidates)
    use, wall_s = watch.stop(), time.perf_counter() - begin_s
    attempts = [a for f in found for a in f.attempts]
    stages = Counter(f.stage for f in found)
    return {
        "case": case,
        "devices": devices,
        "layouts": len(candidates),
        "wall_s": wall_s,
        "attempts": len(attempts),
        "requests_judged": sum(a.n for a in attempts),
        "stages": dict(stages),
        "best": found[0].layout,
        "goodput": found[0].goodput,
        "busy_cores": use.others + use.client,
    }


def experiment(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    runs = []
    for text in args.deployments:
        runs.append(deployment(text, args))
        console.print(f"{text}: {runs[-1]['requests_per_s']['median']:.0f} requests/s simulated")
    searches = []
    for case in args.cases:
        for devices in args.devices:
            searches.append(whole_search(case, devices, args))
            s = searches[-1]
            console.print(
                f"{case}, {devices} devices: {s['layouts']} layouts in {s['wall_s']:.1f} s, "
                f"{s['attempts']} attempts; best {s['best']} with {s['goodput']:.1f}/s"
            )
    return {"deployments": runs, "searches": searches}


def table(results: dict[str, Any]) -> Table:
    shown = new_table(
        "one deployment, one process; medians",
        ("layout", "rate", "requests", "wall, s", "requests/s", "turns/s", "virtual s per s"),
    )
    for r in results["deployments"]:
        wall, virtual = r["wall_s"]["median"], r["virtual_s"]["median"]
        cells = (f"{r['requests_per_s']['median']:.0f}", f"{r['turns_per_s']['median']:.0f}", f"{virtual / wall:.1f}")
        shown.add_row(r["layout"], f"{r['rate']:.4g}", str(r["n"]), f"{wall:.2f}", *cells)
    return shown


def figure(results: dict[str, Any], path: Path) -> None:
    runs = results["deployments"]
    names = [r["layout"] for r in runs]
    rates = Panel(
        "requests/s simulated", names, {"one process": [[x["requests_per_s"] for x in r["runs"]] for r in runs]}
    )
    walls = Panel("seconds", names, {"all requests": [[x["wall_s"] for x in r["runs"]] for r in runs]})
    found = Panel(
        "search of so many layouts, s",
        [f"{s['case'].split(':')[1]} {s['layouts']}" for s in results["searches"]],
        {"all cores": [[s["wall_s"]] for s in results["searches"]]},
    )
    save_bars(path, "How fast the planner simulates", [rates, walls, found])


def arguments() -> argparse.Namespace:
    parser = options(__doc__)
    cases = ["llava-1.5-7b:textcaps:h100", "llava-next-7b:pope:h800"]
    parser.add_argument("--cases", nargs="+", default=cases, help="MODEL:WORKLOAD:DEVICE")
    default = ["1EPD:1000", "8EPD:1000", "2E2P4D:1000", "64EPD:10000", "8E24P32D:10000"]
    parser.add_argument("--deployments", nargs="*", default=default, help="LAYOUT:REQUESTS")
    parser.add_argument("--load", type=float, default=0.6, help="of the bound of a deployment")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--devices", type=int, nargs="*", default=[4, 8], help="searched, all layouts of each")
    parser.add_argument("--requests", type=int, default=1000, help="of the search's trace")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args, console = arguments(), new_console()
    results = experiment(args, console)
    console.print(table(results))
    path = write_result("b14_simulator_speed", __doc__, args, results)
    figure(results, path.with_suffix(".png"))
    noise = max((r["other_cores"]["max"] for r in results["deployments"]), default=0.0)
    say_noise(console, noise)
    console.print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
