"""How many requests per second do server, messages and instances carry when the devices cost nothing?

Real processes and a real server, in front of devices that are emulated (`--device emulated`) and so fast that the rest
is the bottleneck. An open-loop client sends streams at rising rates, then between the last rate that was carried and
the first that was not. A rate is carried if enough of its requests end well, and nearly all of them get their first
token soon after they were due. Who spends the processor time, server, instances or client, is read per process.

The client shares the machine: the highest rate is that of client and server together. A run in which the client itself
was late is marked.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.command import new_console, new_table, options, told
from benchmarks.comparison import cell
from benchmarks.figure import Panel, save_bars
from benchmarks.record import ROOT, spread, write_result
from benchmarks.runs import hydrainfer_plan, make_model, shown
from benchmarks.servers import CpuWatch, Server
from hydrainfer.workload.client import Endpoint, LoadResult, run_load
from hydrainfer.workload.results import Percentiles, report_of
from hydrainfer.workload.sources import ChatRequest, Poisson, distinct_chats, encoded

LATE_S = 0.05  # p99 of the client's own lag, beyond which it says more about the client than about the server
TRIES = 24  # per search, at most
WHO = ("server", "instances", "client")


def mixed_chats(n: int, share: float, args: argparse.Namespace, seed: int) -> list[ChatRequest]:
    """`share` of them with a picture that no other request has, evenly spread; the others without."""
    size = {"width": args.picture_px, "height": args.picture_px, "max_tokens": args.output_tokens}
    n_pictures = round(n * share)
    drawn = distinct_chats(n_pictures, seed=seed, **size)
    with_picture = iter(encoded(drawn))  # drawing them is not the client's work during a run
    without = iter(distinct_chats(n - n_pictures, seed=seed + 1, n_pictures=0, max_tokens=args.output_tokens))
    return [next(with_picture if (i + 1) * n_pictures // n > i * n_pictures // n else without) for i in range(n)]


def first_token_s(result: LoadResult) -> Percentiles | None:
    """Seconds from when a request was due, so that a late client does not flatter the server."""
    return Percentiles.of(r.chunk_s[0] - r.scheduled_s for r in result.records if r.ok and r.chunk_s)


def judge(result: LoadResult, args: argparse.Namespace) -> dict[str, Any]:
    """Whether the rate was carried, and why not."""
    report, waited = report_of(result), first_token_s(result)
    reasons = []
    if report.n_ok < args.completed * report.n_requests:
        reasons.append(f"{report.n_ok} of {report.n_requests} completed")
    if waited is None or waited.p99 > args.ttft_s:
        reasons.append(f"first token after {waited.p99:.2f} s (p99)" if waited else "no first token")
    late = report.late_s
    return {
        "carried": not reasons,
        "reasons": reasons,
        "client_late": late is not None and late.p99 > LATE_S,
        "first_token_s": msgspec.to_builtins(waited),
        "report": msgspec.to_builtins(report),
    }


class CpuSplit:
    """Processor time of the server, of the processes it started and of this client, from its creation to `stop`."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._watch = CpuWatch([server])
        self._before = server.cpu_by_process()

    def stop(self, n_requests: int) -> dict[str, Any]:
        after, use = self._server.cpu_by_process(), self._watch.stop()
        main, *children = ((name, cpu_s - self._before.get(pid, ("", 0.0))[1]) for pid, (name, cpu_s) in after.items())
        by_name: defaultdict[str, float] = defaultdict(float)
        for name, own_s in children:
            by_name[name] += own_s
        most = sorted(by_name.items(), key=itemgetter(1), reverse=True)[:8]
        cpu_s = {"server": main[1], "instances": sum(by_name.values()), "client": use.client * use.wall_s}
        return {
            "n_processes": len(after),
            "cpu_s": cpu_s,
            "cpu_s_per_request": {who: s / n_requests for who, s in cpu_s.items()},
            "children_cpu_s": dict(most),
            "cores": asdict(use),
        }


async def run_at(server: Server, model: str, rate: float, share: float, args: argparse.Namespace, seed: int) -> dict:
    n = max(args.requests, round(rate * args.seconds))
    chats = mixed_chats(n, share, args, seed)
    target = Endpoint(base_url=server.url, model=model, timeout_s=args.timeout_s)
    cpu = CpuSplit(server)
    result = await run_load(target, chats, Poisson(rate), seed=seed)
    split = cpu.stop(n)
    server.check_alive()
    return {"rate_per_s": rate, "picture_share": share, "seed": seed, **judge(result, args), **split}


def next_rate(tried: Sequence[tuple[float, bool]], first: float, factor: float, tolerance: float) -> float | None:
    """The rate to try next, given (rate, carried) of all before: grows by `factor` until one fails, then halves the gap
    on a log scale; None when it is known within `tolerance`, or when `first / factor**6` was too much as well."""
    failed = min((rate for rate, carried in tried if not carried), default=None)
    carried = max((rate for rate, ok in tried if ok and (failed is None or rate < failed)), default=None)
    if failed is None:
        return first if carried is None else carried * factor
    if carried is None:
        return failed / factor if failed > first / factor**6 * 1.001 else None
    return (failed * carried) ** 0.5 if failed / carried > 1 + tolerance else None


async def search(
    server: Server, model: str, share: float, args: argparse.Namespace, seed: int, console: Console
) -> list[dict[str, Any]]:
    """The runs of one search, in order."""
    runs: list[dict[str, Any]] = []
    while len(runs) < TRIES:
        tried = [(r["rate_per_s"], r["carried"]) for r in runs]
        rate = next_rate(tried, args.first_rate, args.factor, args.tolerance)
        if rate is None:
            break
        await asyncio.sleep(args.pause_s)
        runs.append(await run_at(server, model, rate, share, args, seed + len(runs)))
        console.print(line_of(runs[-1]), soft_wrap=True)
    return runs


def line_of(run: dict[str, Any]) -> str:
    per_request = ", ".join(f"{who} {s * 1e3:.2f}" for who, s in run["cpu_s_per_request"].items())
    verdict = "carried" if run["carried"] else "; ".join(run["reasons"])
    late = " (the client was late)" if run["client_late"] else ""
    return f"{run['rate_per_s']:7.1f} req/s, pictures {run['picture_share']:.0%}: {verdict}{late}; CPU ms {per_request}"


def best_of(runs: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The run at the highest rate carried."""
    return max((r for r in runs if r["carried"]), key=lambda r: r["rate_per_s"], default=None)


async def experiment(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    flags = ["--layout", args.layout, "--device", "emulated", "--cost-model", str(args.cost_model), *args.flags.split()]
    plan = hydrainfer_plan(args.layout, args, flags)
    console.print(f"starting {shown(plan.command)}", soft_wrap=True)
    searches: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory() as logs,
        Server(plan.name, plan.command, plan.port, Path(logs) / "server", plan.env) as server,
    ):
        await server.wait_healthy(args.start_limit_s)
        model = await server.model()
        for share in args.picture_shares:  # buffers made at first use are not what is measured
            await run_at(server, model, args.first_rate, share, args, args.seed << 20)
        for rank in range(args.rounds):
            for i, share in enumerate(args.picture_shares):
                seed = (args.seed << 20) + (rank + 1) * 10_000 + (i + 1) * 1000
                runs = await search(server, model, share, args, seed, console)
                searches.append({"round": rank, "picture_share": share, "runs": runs})
        facts = {"startup_s": server.startup_s, "command": shown(plan.command), "version": server.version()}
        facts |= server.memory()
    return {"server": facts, "summary": summary(searches, args.picture_shares), "searches": searches}


def summary(searches: list[dict[str, Any]], shares: list[float]) -> dict[str, Any]:
    """Per share of pictures: spreads over rounds, of each round's highest rate carried."""
    found = {}
    for share in shares:
        best = [b for s in searches if s["picture_share"] == share and (b := best_of(s["runs"])) is not None]
        waited = [b["first_token_s"]["p50"] for b in best]
        found[label(share)] = {
            "rate_per_s": spread([b["rate_per_s"] for b in best]),
            "output_tokens_per_s": spread([b["report"]["output_tokens_per_s"] for b in best]),
            "first_token_p50_s": spread(waited),
            "first_token_p99_s": spread([b["first_token_s"]["p99"] for b in best]),
            **{f"{who}_cpu_s_per_request": spread([b["cpu_s_per_request"][who] for b in best]) for who in WHO},
            "rates_per_s": [b["rate_per_s"] for b in best],
            "cpu_s_per_request": {who: [b["cpu_s_per_request"][who] for b in best] for who in WHO},
            "n_client_late": sum(b["client_late"] for b in best),
        }
    return found


def label(share: float) -> str:
    return "text" if share == 0 else "a picture each" if share == 1 else f"{share:.0%} with a picture"


COLUMNS = {
    "rate_per_s": ("req/s", 1.0),
    "output_tokens_per_s": ("tokens/s", 1.0),
    "first_token_p50_s": ("first token p50, ms", 1e3),
    "first_token_p99_s": ("p99, ms", 1e3),
    **{f"{who}_cpu_s_per_request": (f"{who} CPU, ms/req", 1e3) for who in WHO},
}


def table(results: dict[str, Any], layout: str) -> Table:
    shown = new_table(
        f"{layout}, emulated: highest rate carried; median (least–greatest) over rounds",
        ("requests", *(title for title, _ in COLUMNS.values())),
    )
    for name, r in results["summary"].items():
        shown.add_row(name, *(cell(r[key], factor) for key, (_, factor) in COLUMNS.items()))
    return shown


def figure(path: Path, results: dict[str, Any], layout: str) -> None:
    by_mix = results["summary"]
    rates = Panel("highest rate, req/s", list(by_mix), {layout: [r["rates_per_s"] for r in by_mix.values()]})
    cpu = {name: [[s * 1e3 for s in r["cpu_s_per_request"][who]] for who in WHO] for name, r in by_mix.items()}
    save_bars(path, f"{layout} on emulated devices", [Panel("CPU per request, ms", list(WHO), cpu), rates])


def arguments() -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--model", type=Path, default=Path(".cache/models/llava-small"), help="made if absent")
    parser.add_argument("--layout", default="8EPD")
    parser.add_argument("--cost-model", type=Path, default=ROOT / "configs" / "costs" / "fast.yaml")
    parser.add_argument("--flags", default="", help="more flags for `hydrainfer serve`, as one string")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--picture-shares", type=float, nargs="+", default=[0.0, 1.0], help="searched one by one")
    parser.add_argument("--picture-px", type=int, default=112)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--first-rate", type=float, default=8.0, help="requests per second")
    parser.add_argument("--factor", type=float, default=1.5, help="from rate to rate while all are carried")
    parser.add_argument("--tolerance", type=float, default=0.08, help="between carried and not carried")
    parser.add_argument("--completed", type=float, default=0.98, help="share of the requests that must end well")
    parser.add_argument("--ttft-s", type=float, default=0.5, help="p99 from due to first token, at most")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of a run")
    parser.add_argument("--requests", type=int, default=40, help="per run, at least")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pause-s", type=float, default=1.0, help="before each run")
    parser.add_argument("--timeout-s", type=float, default=60.0, help="of one request")
    parser.add_argument("--start-limit-s", type=float, default=300.0)
    return parser.parse_args()


def main() -> None:
    args, console = arguments(), new_console()
    with told(console):
        make_model(args.model)
        results = asyncio.run(experiment(args, console))
    console.print(table(results, args.layout))
    path = write_result("b09_emulated_cluster", __doc__, args, results)
    figure(path.with_suffix(".png"), results, args.layout)
    console.print(f"wrote {path} and {path.with_suffix('.png').name}")


if __name__ == "__main__":
    main()
