"""How does HydraInfer compare with vLLM on the same cores, in latency, throughput, memory and start-up?

Both servers run on all cores but are loaded in turn: ours, vLLM, ours, vLLM, … The same distinct pictures go to both in
a round and to nobody twice. A run during which other processes, or the idle server, took more than `runs.QUIET_CORES`
is dropped and reported. Greedy token ids of both servers are compared request by request.

Needs `benchmarks/peers/setup_vllmcpu.sh` (run by `make bench-peers`).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.comparison import OURS, PEER, agreement, figure, line_of, summary, table
from benchmarks.footprint import memory_check
from benchmarks.record import write_result
from benchmarks.runs import PEERS, Bench, Plan, add_load_options, hydrainfer_plan, make_model, seed_of
from benchmarks.servers import ServerFailed, free_port


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_load_options(parser, rounds=5, concurrency=[1, 4], requests=6)
    parser.add_argument("--only", choices=["ours", "vllm"], help="a quick look at one server; nothing is compared")
    parser.add_argument("--ours-flags", default="", help="more flags for `hydrainfer serve`, as one string")
    parser.add_argument("--vllm-flags", default="", help="more flags for `vllm serve`, as one string")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/b01_side_by_side.json, none with --only")
    return parser.parse_args()


def plans(args: argparse.Namespace) -> list[Plan]:
    """Both servers, or the one asked for. vLLM gets none of the thread settings that suit ours."""
    found = []
    if args.only != "vllm":
        found.append(hydrainfer_plan(OURS, args, shlex.split(args.ours_flags)))
    if args.only != "ours":
        port = free_port()
        command = ["bash", str(PEERS / "serve_vllm.sh"), str(args.model), str(port), *shlex.split(args.vllm_flags)]
        plain = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "KMP_", "TOKENIZERS_"))}
        found.append(Plan(PEER, command, port, plain | {"DTYPE": args.dtype}))
    return found


async def experiment(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    runs: list[dict[str, Any]] = []
    pairs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as logs:
        async with Bench.of(plans(args), args, Path(logs), console) as bench:
            for rank in range(args.rounds):
                for clients in args.concurrency:
                    results = {}
                    for server in bench.servers:
                        await asyncio.sleep(args.pause_s)  # threads of the server before this one come to rest
                        run, results[server.name] = await bench.run(server, clients, seed_of(args, rank, clients))
                        runs.append({"round": rank, **run})
                        console.print(line_of(runs[-1]), soft_wrap=True)
                    if len(results) == 2:
                        found = agreement(results[OURS], results[PEER])
                        pairs += [{"round": rank, "concurrency": clients, **pair} for pair in found]
            servers = bench.facts()
    check = {"memory_check": memory_check(args.model, args.dtype, servers[OURS])} if OURS in servers else {}
    return {
        "servers": servers,
        **check,
        "summary": summary(runs, args.concurrency),
        "n_runs": len(runs),
        "n_dropped": sum(not r["kept"] for r in runs),
        "ids": {"compared": len(pairs), "equal": sum(p["equal"] for p in pairs)},
        "different_ids": [p for p in pairs if not p["equal"]],
        "runs": runs,
    }


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
