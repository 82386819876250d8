"""How does HydraInfer compare with vLLM on the same cores, in latency, throughput, memory and start-up?

Both servers run on all cores but are loaded in turn: ours, vLLM, ours, vLLM, … The same distinct pictures go to both in
a round and to nobody twice. A run during which other processes, or the idle server, took more than `QUIET_CORES` is
dropped and reported. Greedy token ids of both servers are compared request by request.

Needs `benchmarks/peers/setup_vllmcpu.sh` (run by `make bench-peers`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Console

from benchmarks.comparison import OURS, PEER, agreement, figure, line_of, metrics, summary, table
from benchmarks.record import ROOT, write_result
from benchmarks.servers import CpuWatch, Server, ServerFailed, free_port
from hydrainfer.workload import Closed, LoadResult, Target, distinct_chats, report_of, run_load

PEERS = ROOT / "benchmarks" / "peers"
QUIET_CORES = 0.1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path(".cache/models/llava-small"), help="made if absent")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--requests", type=int, default=6, help="per run, at least; 3 per client if that is more")
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--picture-px", type=int, default=336)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=["ours", "vllm"], help="a quick look at one server; nothing is compared")
    parser.add_argument("--keep-noisy", action="store_true", help="drop nothing: for a look at a busy machine")
    parser.add_argument("--ours-flags", default="", help="more flags for `hydrainfer serve`, as one string")
    parser.add_argument("--vllm-flags", default="", help="more flags for `vllm serve`, as one string")
    parser.add_argument("--pause-s", type=float, default=1.0, help="before each run")
    parser.add_argument("--start-limit-s", type=float, default=300.0)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/b01_side_by_side.json, none with --only")
    return parser.parse_args()


def make_model(path: Path) -> None:
    if not (path / "config.json").exists():
        python = Path(os.environ.get("PEERS_HOME", Path.home() / ".cache/hydrainfer-peers")) / "venv/bin/python"
        maker = [str(python), str(PEERS / "make_models.py"), "--out", str(path.parent), "--only", path.name]
        subprocess.run(maker, check=True)


class Plan(NamedTuple):
    """A server to start."""

    name: str
    command: list[str]
    port: int
    env: dict[str, str]


def plans(args: argparse.Namespace) -> list[Plan]:
    """Both servers, or the one asked for. vLLM gets none of the thread settings that suit ours."""
    found = []
    if args.only != "vllm":
        port = free_port()
        command = [str(Path(sys.executable).with_name("hydrainfer")), "serve", str(args.model), "--host", "127.0.0.1"]
        command += ["--port", str(port), "--dtype", args.dtype, *shlex.split(args.ours_flags)]
        found.append(Plan(OURS, command, port, dict(os.environ)))
    if args.only != "ours":
        port = free_port()
        command = ["bash", str(PEERS / "serve_vllm.sh"), str(args.model), str(port), *shlex.split(args.vllm_flags)]
        plain = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "KMP_", "TOKENIZERS_"))}
        found.append(Plan(PEER, command, port, plain | {"DTYPE": args.dtype}))
    return found


async def one_run(
    args: argparse.Namespace, server: Server, servers: list[Server], model: str, clients: int, seed: int
) -> tuple[dict[str, Any], LoadResult]:
    """Load one server; what came of it, and whether the machine was quiet meanwhile."""
    n = max(args.requests, 3 * clients)
    size = {"width": args.picture_px, "height": args.picture_px, "max_tokens": args.output_tokens}
    chats = distinct_chats(n + 1, seed=seed, **size)
    watch = CpuWatch(servers)
    result = await run_load(Target(base_url=server.url, model=model), chats, Closed(clients), seed=seed, n_warmup=1)
    use = watch.stop()
    server.check_alive()
    idle = max((cores for name, cores in use.servers.items() if name != server.name), default=0.0)
    report = report_of(result)
    quiet = args.keep_noisy or max(use.others, idle) <= QUIET_CORES
    run = {
        "server": server.name,
        "concurrency": clients,
        "seed": seed,
        "kept": quiet and report.n_ok == report.n_requests,
        "cores": asdict(use),
        "metrics": metrics(report),
        "report": msgspec.to_builtins(report),
    }
    return run, result


async def experiment(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    runs: list[dict[str, Any]] = []
    pairs: list[dict[str, Any]] = []
    servers: list[Server] = []
    models: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as logs, contextlib.ExitStack() as stack:
        for plan in plans(args):  # one after the other, so that start-up times are their own
            console.print(f"starting {plan.name}: {shown(plan.command)}", soft_wrap=True)
            server = stack.enter_context(Server(plan.name, plan.command, plan.port, Path(logs) / plan.name, plan.env))
            await server.wait_healthy(args.start_limit_s)
            servers.append(server)
            models[server.name] = await server.model()
        for server in servers:  # buffers made at first use are not what is measured
            await one_run(args, server, servers, models[server.name], max(args.concurrency), seed=args.seed << 20)
        for rank in range(args.rounds):
            for clients in args.concurrency:
                seed = (args.seed << 20) + (rank + 1) * 1000 + clients
                results = {}
                for server in servers:
                    await asyncio.sleep(args.pause_s)  # threads of the server before this one come to rest
                    run, results[server.name] = await one_run(args, server, servers, models[server.name], clients, seed)
                    runs.append({"round": rank, **run})
                    console.print(line_of(runs[-1]), soft_wrap=True)
                if len(results) == 2:
                    found = agreement(results[OURS], results[PEER])
                    pairs += [{"round": rank, "concurrency": clients, **pair} for pair in found]
        sizes = {
            s.name: {"startup_s": s.startup_s, "command": shown(s.command), "version": s.version(), **s.memory()}
            for s in servers
        }
    return {
        "servers": sizes,
        "summary": summary(runs, args.concurrency),
        "n_runs": len(runs),
        "n_dropped": sum(not r["kept"] for r in runs),
        "ids": {"compared": len(pairs), "equal": sum(p["equal"] for p in pairs)},
        "different_ids": [p for p in pairs if not p["equal"]],
        "runs": runs,
    }


def shown(command: list[str]) -> str:
    return shlex.join(command).replace(f"{ROOT}/", "")


def main() -> int:
    args = arguments()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    try:
        make_model(args.model)
        results = asyncio.run(experiment(args, console))
    except (ServerFailed, OSError, subprocess.CalledProcessError) as e:
        console.print(str(e), style="red", markup=False, soft_wrap=True)
        return 1
    console.print(table(results))
    if args.only and not args.out:
        return 0
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    path = write_result("b01_side_by_side", __doc__.splitlines()[0], settings, results, args.out)
    figure(path.with_suffix(".png"), results)
    console.print(f"wrote {path} and {path.with_suffix('.png').name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
