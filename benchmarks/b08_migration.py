"""What does disaggregation cost a single request: first token, migrations, total?

One `hydrainfer serve` with one EPD instance and one per layout under test, each instance with the same number of
threads, so that at concurrency 1 every stage has the same cores; they are asked in turns. A request asks for `timings`:
migrations are what the server reports, from the end of a stage to the arrival at the instance of the next one; times to
the first token are the client's.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
from rich.console import Console

from benchmarks.command import new_console, options
from benchmarks.figure import Panel, save_bars
from benchmarks.record import RESULTS, write_result
from benchmarks.runs import Plan, add_load_options, hydrainfer_plan, make_model, shown
from benchmarks.servers import QUIET_CORES, CpuWatch, Server
from hydrainfer.core import Layout
from hydrainfer.judging import at_quantile
from hydrainfer.workload.sources import BodyOptions, ChatRequest, distinct_chats

ON_ONE_GPU = ["--gpu-share", "0.25", "--kv-cache-gib", "4", "--image-cache-gib", "1"]
OPTIONS = BodyOptions(extra={"timings": True})


def arguments() -> argparse.Namespace:
    parser = options(__doc__)
    add_load_options(parser, rounds=6, requests=6)
    parser.add_argument("--layouts", nargs="+", default=["1E1P1D"])
    parser.add_argument("--threads", type=int, default=2, help="of each instance")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: all instances on one GPU")
    return parser.parse_args()


def layout_file(layout: str, threads: int, folder: Path) -> Path:
    path = folder / f"{layout}.yaml"
    lines = [f"  - {{role: {role}, threads: {threads}}}" for role in Layout.parse(layout).instances]
    path.write_text("\n".join(["instances:", *lines]) + "\n")
    return path


def plans(args: argparse.Namespace, folder: Path) -> Iterator[Plan]:
    common = ["--device", args.device, *(ON_ONE_GPU if args.device == "cuda" else [])]
    yield hydrainfer_plan("1EPD", args, [*common, "--threads", str(args.threads)])
    for layout in args.layouts:
        file = layout_file(layout, args.threads, folder)
        yield hydrainfer_plan(layout, args, [*common, "--layout", str(file), "--transport", args.transport])


async def ask(client: httpx.AsyncClient, url: str, model: str, chat: ChatRequest) -> dict[str, float]:
    """Seconds of one request: the client's, and the server's own breakdown."""
    timings: dict[str, float] = {}
    start_s, first_s = time.perf_counter(), 0.0
    body = OPTIONS.body(chat, model)
    headers = {"Content-Type": "application/json"}
    async with client.stream("POST", f"{url}/v1/chat/completions", content=body, headers=headers) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = orjson.loads(line[6:])
            if not first_s and chunk["choices"] and chunk["choices"][0].get("token_ids"):
                first_s = time.perf_counter() - start_s
            timings = (chunk.get("usage") or {}).get("hydrainfer") or timings
    total_s = time.perf_counter() - start_s
    migration_s = timings["ep_migration_s"] + timings["pd_migration_s"]
    return {
        "ttft_s": first_s,
        "total_s": total_s,
        "ep_migration_s": timings["ep_migration_s"],
        "pd_migration_s": timings["pd_migration_s"],
        "migration_share": migration_s / timings["e2e_s"],
        "server_ttft_s": timings["ttft_s"],
    }


async def experiment(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        servers = []
        try:
            for i, plan in enumerate(plans(args, Path(folder))):
                console.print(f"starting {plan.name}: {shown(plan.command)}", soft_wrap=True)
                servers.append(Server(plan.name, plan.command, plan.port, Path(folder) / str(i), plan.env))
                await servers[-1].wait_healthy(args.start_limit_s)
            models = [await s.model() for s in servers]
            async with httpx.AsyncClient(timeout=120) as client:
                for rank in range(-1, args.rounds):  # the first warms up
                    for i in range(len(servers)):
                        server, model = servers[(i + rank) % len(servers)], models[(i + rank) % len(servers)]
                        size = {"width": args.picture_px, "height": args.picture_px, "max_tokens": args.output_tokens}
                        chats = distinct_chats(args.requests, seed=(args.seed << 20) + rank + 1, **size)
                        watch = CpuWatch(servers)
                        asked = [await ask(client, server.url, model, chat) for chat in chats]
                        others = watch.stop().others
                        if rank >= 0:
                            kept = args.keep_noisy or others <= QUIET_CORES
                            runs.append({"round": rank, "server": server.name, "kept": kept, "requests": asked})
                            ttft = statistics.median(a["ttft_s"] for a in asked)
                            console.print(f"round {rank} {server.name}: ttft {ttft:.3f} s, others {others:.2f} cores")
        finally:
            for server in servers:
                server.stop()
    return {"summary": summary(runs, args.layouts), "runs": runs}


def summary(runs: list[dict[str, Any]], layouts: list[str]) -> dict[str, Any]:
    """Per layout: medians over kept requests, migration's p95, and the added time to the first token, by round."""
    found: dict[str, Any] = {}
    medians = {
        (run["server"], run["round"]): statistics.median(a["ttft_s"] for a in run["requests"])
        for run in runs
        if run["kept"]
    }
    for layout in ["1EPD", *layouts]:
        asked = [a for run in runs if run["server"] == layout and run["kept"] for a in run["requests"]]
        if not asked:
            continue
        found[layout] = {key: statistics.median(a[key] for a in asked) for key in asked[0]}
        for key in ("ep_migration_s", "pd_migration_s", "migration_share"):
            found[layout][f"{key}_p95"] = at_quantile(sorted(a[key] for a in asked), 0.95)
        added = [t - medians["1EPD", rank] for (name, rank), t in medians.items() if name == layout]
        found[layout]["added_ttft_s"] = statistics.median(added)
        found[layout]["n_requests"] = len(asked)
    return found


def figure(results: dict[str, Any], names: list[str], path: Path) -> None:
    def samples(key: str, scale: float) -> list[list[float]]:
        return [
            [a[key] * scale for run in results["runs"] if run["server"] == n and run["kept"] for a in run["requests"]]
            for n in names
        ]

    panels = [
        Panel("time to first token, ms", names, {"": samples("ttft_s", 1e3)}),
        Panel("E→P migration, ms", names, {"": samples("ep_migration_s", 1e3)}),
        Panel("P→D migration, ms", names, {"": samples("pd_migration_s", 1e3)}),
        Panel("migration, % of the request", names, {"": samples("migration_share", 1e2)}),
    ]
    save_bars(path, "One request at a time", panels)


def main() -> None:
    args, console = arguments(), new_console()
    make_model(args.model)
    results = asyncio.run(experiment(args, console))
    path = write_result("b08_migration", __doc__, args, results)
    if args.out is None:
        figure(results, ["1EPD", *args.layouts], RESULTS / "b08_migration.png")
    for name, line in results["summary"].items():
        console.print(name, {k: round(v, 4) for k, v in line.items()})
    console.print(f"wrote {path}")


if __name__ == "__main__":
    main()
