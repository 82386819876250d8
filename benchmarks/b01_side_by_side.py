"""How does HydraInfer compare with vLLM, OpenVINO and llama.cpp on the same cores, in latency, throughput and memory?

All servers run on all cores but are loaded in turn, in rounds. The same pictures go to all of them in a round and to
nobody twice. A run during which other processes, or an idle server, took more than `servers.QUIET_CORES` is dropped and
reported. Ratios are of the first server to each other one, within a round. Greedy token ids are compared request by
request. `--dtype` is the dtype of all; each server has the settings that suit it (`benchmarks/peers/serve_*.sh`).

Needs `benchmarks/peers/setup_vllmcpu.sh` and `setup_openvino.sh` (run by `make bench-peers`). llama.cpp takes part
where `LLAMA_SERVER` names a `llama-server` of an installed package.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.command import new_console, options, told
from benchmarks.comparison import OURS, agreement, figure, line_of, summary, table
from benchmarks.footprint import memory_check
from benchmarks.record import write_result
from benchmarks.runs import SCRIPTS, Bench, Plan, add_load_options, hydrainfer_plan, make_model, seed_of
from benchmarks.servers import free_port

PEERS = ("vllm", "openvino", "llamacpp")
INSTALLED = PEERS if os.environ.get("LLAMA_SERVER") else PEERS[:-1]
INT8 = "int8"  # ours with weights in 8 bits, as a server beside the others


def arguments() -> argparse.Namespace:
    parser = options(__doc__)
    add_load_options(parser, rounds=5, requests=6, loads=["1", "4", "0.4/s", "repeat"])
    parser.add_argument("--servers", nargs="+", choices=[OURS, INT8, *PEERS], default=[OURS, *INSTALLED])
    for server in (OURS, INT8, *PEERS):
        parser.add_argument(f"--{server}-flags", default="", help="more flags for its command, as one string")
    return parser.parse_args()


def plan(server: str, args: argparse.Namespace) -> Plan:
    """Peers get none of the thread settings that suit ours."""
    flags = shlex.split(vars(args)[f"{server}_flags"])
    if server in (OURS, INT8):
        return hydrainfer_plan(server, args, ["--quantization", "int8", *flags] if server == INT8 else flags)
    port = free_port()
    command = ["bash", str(SCRIPTS / f"serve_{server}.sh"), str(args.model), str(port), *flags]
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "KMP_", "TOKENIZERS_"))}
    return Plan(server, command, port, plain | {"DTYPE": args.dtype})


async def experiment(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    runs: list[dict[str, Any]] = []
    pairs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as logs:
        async with Bench.of([plan(s, args) for s in args.servers], args, Path(logs), console) as bench:
            for rank, load in product(range(args.rounds), args.loads):
                results = {}
                for server in bench.servers:
                    await asyncio.sleep(args.pause_s)  # threads of the server before this one come to rest
                    run, results[server.name] = await bench.run(server, load, seed_of(args, rank, load))
                    runs.append({"round": rank, **run})
                    console.print(line_of(runs[-1]), soft_wrap=True)
                first, *others = results
                for peer in others:
                    found = agreement(results[first], results[peer])
                    pairs += [{"round": rank, "load": load, "peer": peer, **pair} for pair in found]
            servers = bench.facts()
    check = {"memory_check": memory_check(args.model, args.dtype, servers[OURS])} if OURS in servers else {}
    equal = {peer: [p["equal"] for p in pairs if p["peer"] == peer] for peer in args.servers[1:]}
    return {
        "servers": servers,
        **check,
        "summary": summary(runs, args.servers, args.loads),
        "n_runs": len(runs),
        "n_dropped": sum(not r["kept"] for r in runs),
        "ids": {peer: {"compared": len(found), "equal": sum(found)} for peer, found in equal.items()},
        "different_ids": [p for p in pairs if not p["equal"]],
        "runs": runs,
    }


def main() -> None:
    args, console = arguments(), new_console()
    with told(console):
        make_model(args.model)
        results = asyncio.run(experiment(args, console))
    console.print(table(results))
    path = write_result("b01_side_by_side", __doc__, args, results)
    figure(path.with_suffix(".png"), results)
    console.print(f"wrote {path} and {path.with_suffix('.png').name}")


if __name__ == "__main__":
    main()
