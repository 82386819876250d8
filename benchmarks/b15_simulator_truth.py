"""How far is the simulator from the servers that it simulates?

Real servers (processes, sockets, migrations) get open-loop load at several rates; the simulator then serves the same
requests, as the server's own processor counts them, at the times at which the client sent them, with the server's own
options. Part `emulated`: devices that take the time a cost model says, so that only the rest can differ. Part `cpu`:
a model whose batches take tens of milliseconds, on cores of its own, by a cost model measured just before. Part
`built-in`: the same with the built-in model, whose batches take a millisecond or two, as does all else a server does.

What a server takes beside batches is measured with one request at a time (`Beside`) and added; nothing is fitted to
the loads. Every load is compared by mean and 90th percentile of TTFT and TPOT. A server that has been measured is kept
in a journal, and not measured again by the same command.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.command import new_console, new_table, options, say_noise, told
from benchmarks.figure import COLOURS
from benchmarks.record import write_result
from benchmarks.runs import make_model, serve_command, shown
from benchmarks.servers import CpuWatch, Server, ServerFailed, free_port
from benchmarks.twin import Sent, Times, Twin, times_of
from hydrainfer.builtin import MODEL
from hydrainfer.config import ServeConfig
from hydrainfer.config.cost import read_cost_model
from hydrainfer.core import CostModel
from hydrainfer.costing.copies import measure_copies
from hydrainfer.costing.grid import Grid
from hydrainfer.costing.measure import measure_model
from hydrainfer.judging import at_quantile
from hydrainfer.planner.costs import CostFile, fit_cost, link_of
from hydrainfer.planner.nouns import Link
from hydrainfer.workload.client import Endpoint, run_load
from hydrainfer.workload.sources import Arrivals, ChatRequest, Closed, Constant, Poisson, distinct_chats, encoded

METRICS = ("ttft_mean", "ttft_p90", "tpot_mean", "tpot_p90")
PARTS = {"emulated": 0.10, "cpu": 0.25, "built-in": 0.25}
"""With the error that is allowed; beside real cores also that by which rounds differ."""
IDLE = "one at a time"
WARMUP = 3  # requests
CORES = {  # layouts of the last two parts: every instance on a core of its own
    "1EPD": [{"role": "EPD", "cores": [0]}],
    "1EP1D": [{"role": "EP", "cores": [0]}, {"role": "D", "cores": [1]}],
    "1E1PD": [{"role": "E", "cores": [0]}, {"role": "PD", "cores": [1]}],
}


@dataclass(frozen=True)
class Deployment:
    """`options`: of `hydrainfer serve`. `rates`: requests per second."""

    name: str
    part: str
    options: dict[str, Any]
    rates: list[float]
    seconds: float
    rounds: int
    picture_px: int
    n_output: tuple[int, int]
    seed: int = field(default=1)


def deployments(args: argparse.Namespace, folder: Path) -> list[Deployment]:
    common: dict[str, Any] = {"dtype": "float32", "launcher": "ray", "max_running": 256}
    found = []
    for text in args.emulated:
        layout, _, rates = text.partition("@")
        options = common | {"model": str(args.model), "device": "emulated", "cost_model": str(args.cost_model)}
        options |= {"layout": layout, "kv_cache_gib": 1.5, "image_cache_gib": 0.5}
        shape = ([float(r) for r in rates.split(",")], args.seconds, args.rounds, 112, (8, 56))
        found.append(Deployment(layout, "emulated", options, *shape, args.seed))
    for part, texts, model, seconds, px in (
        ("cpu", args.cpu, args.cpu_model, args.cpu_seconds, 336),
        ("built-in", args.built_in, MODEL, args.built_in_seconds, 96),
    ):
        for text in texts:
            layout, _, rates = text.partition("@")
            path = folder / f"{layout}.yaml"
            path.write_text(yaml.safe_dump({"instances": CORES[layout]}))
            options = common | {"model": str(model), "device": "cpu", "layout": str(path)}
            options |= {"kv_cache_gib": 0.25, "image_cache_gib": 0.0625}
            shape = ([float(r) for r in rates.split(",")], seconds, args.cpu_rounds, px, (8, 56))
            found.append(Deployment(layout, part, options, *shape, args.seed))
    return found


# ---- the real one


def command_of(options: dict[str, Any], port: int) -> list[str]:
    rest = {k: v for k, v in options.items() if k != "model"}
    flags = [part for k, v in rest.items() for part in (f"--{k.replace('_', '-')}", str(v))]
    return serve_command([options["model"], *flags], port)


def chats_of(d: Deployment, n: int, seed: int) -> list[ChatRequest]:
    """A picture each, that no other request has, and answers of different lengths."""
    rng = random.Random(seed)
    drawn = distinct_chats(n, seed=seed, width=d.picture_px, height=d.picture_px)
    return encoded(msgspec.structs.replace(c, max_tokens=rng.randint(*d.n_output)) for c in drawn)


def plan_of(d: Deployment, args: argparse.Namespace) -> Iterator[tuple[str, Arrivals, int, int, int]]:
    """Label, arrivals, how many, seed, round. Rounds differ in pictures and answers, not in times of arrival."""
    if d.part == "emulated":
        yield IDLE, Closed(1), args.idle, d.seed << 20, 0
    else:  # with pauses, as between requests that come by chance: a core that has slept is slower at first
        yield IDLE, Constant(1.0), args.cpu_idle, d.seed << 20, 0
    for i, rate in enumerate(d.rates):
        n, seed = max(args.requests, round(rate * d.seconds)), (d.seed << 20) + 100 * (i + 1)
        for rank in range(d.rounds):
            yield f"{rate:g}/s #{rank}", Poisson(rate), n, seed, rank


async def observe(d: Deployment, args: argparse.Namespace, console: Console) -> tuple[list[Sent], dict[str, Any]]:
    """All loads in the order sent, the one of single requests first."""
    port = free_port()
    command = command_of(d.options, port)
    console.print(f"starting {shown(command)}", soft_wrap=True)
    sent: list[Sent] = []
    quiet: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory() as logs,
        Server(d.name, command, port, Path(logs) / "server", dict(os.environ)) as server,
    ):
        await server.wait_healthy(args.start_limit_s)
        target = Endpoint(base_url=server.url, model=await server.model(), timeout_s=120.0)
        origin_s = time.perf_counter()
        for label, arrivals, n, seed, rank in plan_of(d, args):
            n_warmup = WARMUP if label == IDLE else 0
            chats = chats_of(d, n + n_warmup, seed + rank)
            await asyncio.sleep(args.pause_s)
            watch, begin_s = CpuWatch([server]), time.perf_counter() - origin_s
            result = await run_load(target, chats, arrivals, seed=seed, n_warmup=n_warmup)
            quiet[label] = asdict(watch.stop())
            server.check_alive()
            failed = [r.failure for r in result.records if not r.ok]
            if failed:
                raise ServerFailed(f"{d.name}, {label}: {len(failed)} requests failed, the first with {failed[0]}")
            sent.append(Sent(label, begin_s, chats[n_warmup:], result.records))
            console.print(f"{d.name:<8} {label:<14} {n} requests, others {quiet[label]['others']:.2f} cores")
    return sent, {"command": shown(command).replace(d.options["layout"], d.name), "cores": quiet}


# ---- both


def measured_cost(d: Deployment, args: argparse.Namespace, console: Console) -> CostFile:
    """Of its model with one thread on one core. Fitted to medians: what else there is to do on this machine
    counts as load even where it gives way."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    grid = Grid(
        sizes=((d.picture_px, d.picture_px),),
        pictures=(1, 2, 4),
        chunks=(16, 64, 128, 256, 512) if d.part == "cpu" else (16, 64, 128, 256),
        starts=(0, 256) if d.part == "cpu" else (0,),
        decodes=(1, 2, 4, 8, 16, 32),
        contexts=(600, 640, 680) if d.part == "cpu" else (96, 160, 320),
        mixed=(4, 16),
        beside=(),
    )
    model = str(d.options["model"])
    try:
        config = ServeConfig(model=model, device="cpu", threads=1)
        console.print(f"measuring {Path(model).name} on one core for {args.measure_minutes:g} minutes")
        file = measure_model(model, minutes=args.measure_minutes, config=config, grid=grid, transports=())
        fitted = fit_cost(file.points)
        return msgspec.structs.replace(file, cost=fitted.cost, errors=fitted.errors, note="")
    finally:
        os.sched_setaffinity(0, before)


def measured_link(d: Deployment, cost: CostModel, seconds: float) -> Link:
    """Blocks of this model between two processes of this machine, as its instances move them. A message takes what
    `Link` says unless told otherwise."""
    spec = Twin(d.options, cost, Link()).kv_spec
    return link_of(measure_copies([spec], ["shared-memory"], "cpu", seconds))


def compare(d: Deployment, sent: Sequence[Sent], cost: CostModel, link: Link) -> dict[str, Any]:
    """Points by rate, over the rounds."""
    twin = Twin(d.options, cost, link)
    beside = twin.beside(sent[0])
    said = twin.served(sent, beside)
    points = []
    for rate in d.rates:
        loads = [s for s in sent if s.label.startswith(f"{rate:g}/s #")]
        real = [numbers([times_of(r) for r in s.records]) for s in loads]
        simulated = [numbers(said[s.label]) for s in loads]
        point: dict[str, Any] = {"rate": rate, "n": sum(len(s.records) for s in loads), "metrics": {}}
        for m in METRICS:
            mine, theirs = (statistics.fmean(x[m] for x in some) for some in (real, simulated))
            spread = max(r[m] for r in real) / min(r[m] for r in real) - 1.0
            metric = {"measured_s": mine, "simulated_s": theirs, "error": theirs / mine - 1.0, "spread": spread}
            point["metrics"][m] = metric | {"runs": [[a[m], b[m]] for a, b in zip(real, simulated)]}
        points.append(point)
    idle = numbers([times_of(r) for r in sent[0].records]), numbers(said[IDLE])
    return {"beside": msgspec.to_builtins(beside), "idle": dict(zip(("measured", "simulated"), idle)), "points": points}


def numbers(times: Sequence[Times]) -> dict[str, float]:
    found = {}
    for name in ("ttft", "tpot"):
        values = sorted(v for t in times if (v := getattr(t, f"{name}_s")) is not None)
        found[f"{name}_mean"] = statistics.fmean(values)
        found[f"{name}_p90"] = at_quantile(values, 0.9)
    return found


# ---- all of them


class Journal:
    """Results by deployment, found again by the next run with the same settings."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found = json.loads(path.read_text()) if path.exists() else {}

    def get(self, key: str) -> Any:
        return self._found.get(key)

    def put(self, key: str, value: Any) -> Any:
        self._found[key] = value
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self._found))
        return value


async def experiment(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    journal, results = Journal(args.journal), {}
    with tempfile.TemporaryDirectory() as folder:
        for d in deployments(args, Path(folder)):
            key = repr(msgspec.to_builtins(d) | {"options": {**d.options, "layout": d.name}})
            if (known := journal.get(key)) is not None:
                results[f"{d.part} {d.name}"] = known
                console.print(f"{d.part} {d.name}: found in the journal")
                continue
            if d.part == "emulated":
                cost = read_cost_model(args.cost_model)
            else:
                kind = f"cost {d.part}"
                said = journal.get(kind) or journal.put(kind, msgspec.to_builtins(measured_cost(d, args, console)))
                cost = msgspec.convert(said, CostFile).cost
            kind = f"link {d.part}"
            said = journal.get(kind) or journal.put(kind, msgspec.to_builtins(measured_link(d, cost, 6.0)))
            link = msgspec.convert(said, Link)
            sent, facts = await observe(d, args, console)
            found = {"part": d.part, "layout": d.name, "cost": msgspec.to_builtins(cost), "link": said}
            found |= compare(d, sent, cost, link) | facts
            results[f"{d.part} {d.name}"] = journal.put(key, found)
    fits = {}
    for part in PARTS:
        if (measured := journal.get(f"cost {part}")) is not None:
            fits[part] = {k: measured[k] for k in ("date", "model", "threads", "cost", "errors", "points")}
    return {"deployments": results, "summary": summary(results), "measurements": fits}


def summary(results: dict[str, Any]) -> dict[str, Any]:
    """Per part: points, those within the limit, and the worst of each metric."""
    found = {}
    for part, limit in PARTS.items():
        points = [p["metrics"] for r in results.values() if r["part"] == part for p in r["points"]]
        if points:
            inside = [all(within(p[m], limit, part) for m in METRICS) for p in points]
            worst = {m: max((p[m]["error"] for p in points), key=abs) for m in METRICS}
            found[part] = {"points": len(points), "within": sum(inside), "limit": limit, "worst": worst}
    return found


def within(metric: dict[str, Any], limit: float, part: str) -> bool:
    return abs(metric["error"]) <= max(limit, 0.0 if part == "emulated" else metric["spread"])


def table(results: dict[str, Any]) -> Table:
    shown_ = new_table("measured -> simulated, ms (error)", ("part", "layout", "rate", *METRICS))
    for r in results["deployments"].values():
        for p in r["points"]:
            cells = [
                f"{x['measured_s'] * 1e3:.4g} -> {x['simulated_s'] * 1e3:.4g} ({x['error']:+.1%})"
                for x in (p["metrics"][m] for m in METRICS)
            ]
            shown_.add_row(r["part"], r["layout"], f"{p['rate']:g}", *cells)
    return shown_


def figure(path: Path, results: dict[str, Any]) -> None:
    """Simulated over measured, both on a log scale; the band is the limit of the part."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

    parts = {part: limit for part, limit in PARTS.items() if part in results["summary"]}
    drawn, axes = plt.subplots(len(parts), 4, figsize=(13, 3.1 * len(parts)), squeeze=False)
    for row, (part, limit) in zip(axes, parts.items()):
        some = [r for r in results["deployments"].values() if r["part"] == part]
        for axis, metric in zip(row, METRICS):
            for colour, r in zip(COLOURS, some):
                xy = [[p["metrics"][metric][k] * 1e3 for p in r["points"]] for k in ("measured_s", "simulated_s")]
                axis.plot(*xy, "o-", color=colour, label=r["layout"], linewidth=0.8, markersize=4)
            ends = sorted(x for line in axis.lines for x in (*line.get_xdata(), *line.get_ydata()))
            band = [ends[0] * 0.85, ends[-1] * 1.15]
            axis.plot(band, band, color="black", linewidth=0.6)
            axis.fill_between(band, [x * (1 - limit) for x in band], [x * (1 + limit) for x in band], alpha=0.15)
            axis.set_xscale("log")
            axis.set_yscale("log")
            for scale in (axis.xaxis, axis.yaxis):
                scale.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
                scale.set_minor_locator(NullLocator())
                scale.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
            axis.set_title(f"{part}: {metric.replace('_', ' ')}, ms (+-{limit:.0%})", fontsize=9)
        row[0].set_ylabel("simulated")
        row[0].legend(frameon=False, fontsize=8)
    for axis in axes[-1]:
        axis.set_xlabel("measured")
    drawn.suptitle("The simulator against real servers", fontsize=11)
    drawn.tight_layout()
    drawn.savefig(path, dpi=130)
    plt.close(drawn)


def arguments() -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--model", type=Path, default=Path(".cache/models/llava-small"), help="made if absent")
    parser.add_argument("--cost-model", type=Path, default=Path("configs/costs/illustrative-h100-llava-7b-x10.yaml"))
    emulated = ["4EPD@4,9,14", "2EP2D@3,6.5,10", "1E2P1D@3,6.5,10"]
    parser.add_argument("--emulated", nargs="*", default=emulated, help="LAYOUT@RATE,RATE,...")
    parser.add_argument("--cpu", nargs="*", default=["1EPD@0.5,1", "1EP1D@0.5,1", "1E1PD@0.5,1"], help="as --emulated")
    parser.add_argument("--cpu-model", type=Path, default=Path(".cache/models/llava-mid"), help="made if absent")
    built_in = ["1EPD@4,10", "1EP1D@4,10", "1E1PD@4,10"]
    parser.add_argument("--built-in", nargs="*", default=built_in, help="as --emulated")
    parser.add_argument("--seconds", type=float, default=18.0, help="length of an emulated load")
    parser.add_argument("--rounds", type=int, default=3, help="of every emulated load")
    parser.add_argument("--cpu-seconds", type=float, default=60.0)
    parser.add_argument("--built-in-seconds", type=float, default=10.0)
    parser.add_argument("--cpu-rounds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=50, help="per load, at least")
    parser.add_argument("--idle", type=int, default=6, help="requests one at a time")
    parser.add_argument("--cpu-idle", type=int, default=20, help="as --idle, on real cores")
    parser.add_argument("--measure-minutes", type=float, default=1.0, help="of each model")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pause-s", type=float, default=1.0)
    parser.add_argument("--start-limit-s", type=float, default=300.0)
    parser.add_argument("--journal", type=Path, default=Path(".cache/b15_simulator_truth.json"))
    return parser.parse_args()


def main() -> None:
    args, console = arguments(), new_console()
    with told(console):
        for model in (args.model, *([args.cpu_model] if args.cpu else [])):
            make_model(model)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers are stopped on the way out
        results = asyncio.run(experiment(args, console))
    console.print(table(results))
    for part, s in results["summary"].items():
        console.print(f"{part}: {s['within']} of {s['points']} points within {s['limit']:.0%}")
    noise = max(use["others"] for r in results["deployments"].values() for use in r["cores"].values())
    say_noise(console, noise)
    path = write_result("b15_simulator_truth", __doc__, args, results)
    figure(path.with_suffix(".png"), results)
    console.print(f"wrote {path.name} and {path.with_suffix('.png').name}")


if __name__ == "__main__":
    main()
