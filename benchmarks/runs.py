"""What the experiments with loaded servers share: the checkpoint, starting servers, and one run against one of them."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace
from rich.console import Console

from benchmarks.comparison import metrics
from benchmarks.record import ROOT
from benchmarks.servers import QUIET_CORES, CpuWatch, Server, free_port
from hydrainfer.workload.client import Endpoint, LoadResult, run_load
from hydrainfer.workload.results import Percentiles, report_of
from hydrainfer.workload.sources import Arrivals, ChatRequest, Closed, Poisson, Replay, distinct_chats

SCRIPTS = ROOT / "benchmarks" / "peers"
BURST = "burst"
WORDS = ("repeat", BURST)
BURST_REQUESTS = 100
LOADS = (
    "N: clients, each of which asks once its last answer has ended; R/s: arrivals by chance; repeat: one client, new "
    f"questions about one picture; burst or burst/N: {BURST_REQUESTS} or N short texts at once, each fifth with a "
    "picture"
)


def add_load_options(
    parser: argparse.ArgumentParser, *, rounds: int, requests: int, loads: list[str] | None = None
) -> None:
    parser.add_argument("--model", type=Path, default=Path(".cache/models/llava-small"), help="made if absent")
    parser.add_argument("--rounds", type=int, default=rounds)
    if loads:
        parser.add_argument("--loads", nargs="+", default=loads, type=_load, help=LOADS)
    parser.add_argument(
        "--requests", type=int, default=requests, help="per run, at least; 3 per client if that is more"
    )
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--picture-px", type=int, default=336)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep-noisy", action="store_true", help="drop nothing: for a look at a busy machine")
    parser.add_argument("--pause-s", type=float, default=1.0, help="before each run")
    parser.add_argument("--start-limit-s", type=float, default=300.0)


def _load(value: str) -> str:
    if value in WORDS or re.fullmatch(r"[1-9]\d*|[\d.]+/s|burst/[1-9]\d*", value):
        return value
    words = " or ".join(WORDS)
    raise argparse.ArgumentTypeError(f"{value!r} is no load; write clients, such as 4, a rate, such as 0.4/s, {words}")


def make_model(path: Path) -> None:
    """The checkpoint of that name if it is not there: by vLLM's environment, so that it is the same for both, or by
    this one."""
    if not (path / "config.json").exists():
        python = Path(os.environ.get("PEERS_HOME", Path.home() / ".cache/hydrainfer-peers")) / "venv/bin/python"
        maker = [str(SCRIPTS / "make_models.py"), "--out", str(path.parent), "--only", path.name]
        subprocess.run([str(python) if python.exists() else sys.executable, *maker], check=True)


class Plan(NamedTuple):
    """A server to start."""

    name: str
    command: list[str]
    port: int
    env: dict[str, str]


def hydrainfer_plan(name: str, args: argparse.Namespace, flags: list[str]) -> Plan:
    port = free_port()
    words = [str(args.model), "--dtype", args.dtype, *flags]
    return Plan(name, serve_command(words, port), port, dict(os.environ))


def serve_command(words: Sequence[str], port: int) -> list[str]:
    """`hydrainfer serve WORDS` on a port of this host."""
    program = [sys.executable, "-m", "hydrainfer"]  # also where the project is not installed
    return [*program, "serve", *words, "--host", "127.0.0.1", "--port", str(port)]


def start(name: str, words: Sequence[str], log: Path, console: Console) -> Server:
    """Start `hydrainfer serve WORDS` on a free port, and print the command."""
    port = free_port()
    command = serve_command(words, port)
    console.print(f"starting {shown(command)}", soft_wrap=True)
    return Server(name, command, port, log, dict(os.environ))


def shown(command: list[str]) -> str:
    return shlex.join(command).replace(f"{ROOT}/", "")


class Bench:
    """Servers that all run while one at a time is loaded. `args`: the options of `add_load_options`."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self.servers: list[Server] = []
        self._models: dict[str, str] = {}

    @classmethod
    @contextlib.asynccontextmanager
    async def of(
        cls, plans: list[Plan], args: argparse.Namespace, logs: Path, console: Console
    ) -> AsyncIterator[Bench]:
        """Start the servers one after the other, so that start-up times are their own, and load each once: buffers
        made at first use are not what is measured. Raises `ServerFailed`."""
        bench = cls(args)
        with contextlib.ExitStack() as stack:
            for i, plan in enumerate(plans):
                console.print(f"starting {plan.name}: {shown(plan.command)}", soft_wrap=True)
                server = stack.enter_context(Server(plan.name, plan.command, plan.port, logs / str(i), plan.env))
                await server.wait_healthy(args.start_limit_s)
                bench.servers.append(server)
                bench._models[server.name] = await server.model()
            for server in bench.servers:
                await bench.run(server, str(max(int(n) if n.isdigit() else 1 for n in args.loads)), args.seed << 20)
            yield bench

    async def run(self, server: Server, load: str, seed: int) -> tuple[dict[str, Any], LoadResult]:
        """Load one server (`load`: see `LOADS`); what came of it, and whether the machine was quiet meanwhile."""
        chats, arrivals = self._asked(load, seed)
        run, result = await self._load(server, arrivals, chats, seed)
        firsts = [r.ttft_s for i, r in enumerate(result.records) if i % 5 and r.ttft_s is not None]
        if load.startswith(BURST) and run["metrics"] and (found := Percentiles.of(firsts)) is not None:
            run["metrics"] |= {"text_ttft_p90_s": found.p90, "total_s": run["report"]["duration_s"]}
        return {"load": load, **run}, result

    def _asked(self, load: str, seed: int) -> tuple[list[ChatRequest], Arrivals]:
        """The requests and their arrivals; the first request is for warming up."""
        n = self._args.requests
        if load.isdigit():
            return self.chats(max(n, 3 * int(load)) + 1, seed), Closed(int(load))
        if load.endswith("/s"):
            return self.chats(n + 1, seed), Poisson(float(load.removesuffix("/s")))
        if load == "repeat":
            chats = self.chats(n + 1, seed)
            return [replace(c, text=f"{i}: {c.text}", pictures=chats[0].pictures) for i, c in enumerate(chats)], Closed(
                1
            )
        n = int(load.partition("/")[2] or BURST_REQUESTS)
        pictured, tokens = self.chats(-(-n // 5), seed), self._args.output_tokens
        texts = [ChatRequest(text=f"{seed} {i}: what is the time?", max_tokens=tokens) for i in range(n + 1)]
        return [texts[0], *(pictured[i // 5] if i % 5 == 0 else texts[i + 1] for i in range(n))], Replay((0.0,))

    def chats(self, n: int, seed: int) -> list[ChatRequest]:
        """Requests with a picture each, which no other has."""
        args = self._args
        size = {"width": args.picture_px, "height": args.picture_px, "max_tokens": args.output_tokens}
        return distinct_chats(n, seed=seed, **size)

    async def _load(
        self, server: Server, arrivals: Arrivals, chats: Sequence[ChatRequest], seed: int
    ) -> tuple[dict[str, Any], LoadResult]:
        """The first of `chats` is sent by itself before the others."""
        args = self._args
        target = Endpoint(base_url=server.url, model=self._models[server.name])
        watch = CpuWatch(self.servers)
        result = await run_load(target, chats, arrivals, seed=seed, n_warmup=1)
        use = watch.stop()
        server.check_alive()
        idle = max((cores for name, cores in use.servers.items() if name != server.name), default=0.0)
        report = report_of(result)
        quiet = args.keep_noisy or max(use.others, idle) <= QUIET_CORES
        run = {
            "server": server.name,
            "seed": seed,
            "kept": quiet and report.n_ok == report.n_requests,
            "cores": asdict(use),
            "metrics": metrics(report, cpu_s=use.servers[server.name] * use.wall_s / len(chats)),
            "report": msgspec.to_builtins(report),
        }
        return run, result

    def facts(self) -> dict[str, dict[str, Any]]:
        """Per server: its command, version, start-up time and memory up to now."""
        return {
            s.name: {
                "startup_s": s.startup_s,
                "startup_hwm_bytes": s.startup_hwm_bytes,
                "command": shown(s.command),
                "version": s.version(),
                **s.memory(),
            }
            for s in self.servers
        }


def seed_of(args: argparse.Namespace, rank: int, load: str) -> int:
    """The same for every server of a round: they get the same pictures, which nobody gets twice."""
    return (args.seed << 20) + (rank + 1) * 1000 + args.loads.index(load)
