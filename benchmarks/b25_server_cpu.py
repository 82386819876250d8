"""How much of a core do the server and `bench` take for a request, for its pictures and for each token of its answer?

    python -m benchmarks.b25_server_cpu [--requests 300]

`hydrainfer serve` with an emulated device, so that nothing is computed but what serving takes: processor time of all
its processes over loads that differ in one thing. What comes out is `request_s`, `megapixel_s` and `token_s` of
configs/engines/hydrainfer.yaml and, of the client, of `hydrainfer/profiling/live.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import uvloop
from rich.console import Console

from benchmarks.record import ROOT, write_result
from benchmarks.servers import Server, free_port
from hydrainfer.builtin import MODEL
from hydrainfer.workload.client import Endpoint, run_load
from hydrainfer.workload.sources import Closed, distinct_chats, encoded

QUESTION = (__doc__ or "").partition("\n")[0]
_CLIENTS, _WARM = 4, 20


class Load(NamedTuple):
    """`side`: of one picture, in pixels; 0 without."""

    tokens: int
    side: int


SHORT, LONG, SMALL, LARGE = Load(2, 0), Load(66, 0), Load(2, 448), Load(2, 1344)


async def measure(n: int) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of a core per request of each load, of the server and of this client."""
    port, servers, clients = free_port(), dict[str, float](), dict[str, float]()
    flags = ["--device", "emulated", "--cost-model", str(ROOT / "configs" / "costs" / "fast.yaml"), "--port", str(port)]
    command = [sys.executable, "-m", "hydrainfer", "serve", str(MODEL), *flags, "--max-queue-s", "600"]
    with (
        tempfile.TemporaryDirectory() as logs,
        Server("ours", command, port, Path(logs) / "log", dict(os.environ)) as it,
    ):
        await it.wait_healthy(120)
        target = Endpoint(base_url=it.url, model=await it.model())
        for k, load in enumerate((SHORT, LONG, SMALL, LARGE)):
            drawn = distinct_chats(
                n + _WARM,
                seed=k,
                max_tokens=load.tokens,
                n_pictures=int(load.side > 0),
                width=max(load.side, 1),
                height=max(load.side, 1),
            )
            chats = encoded(drawn)
            await run_load(target, chats[:_WARM], Closed(_CLIENTS))
            before_s, mine_s = it.cpu_s(), time.process_time()
            result = await run_load(target, chats[_WARM:], Closed(_CLIENTS))
            assert all(r.failure is None for r in result.records), result.records[0]
            name = f"{load.tokens} tokens, {load.side} px"
            servers[name], clients[name] = (it.cpu_s() - before_s) / n, (time.process_time() - mine_s) / n
    return servers, clients


def solved(seconds: dict[str, float]) -> dict[str, float]:
    short, long, small, large = seconds.values()
    token_s = (long - short) / (LONG.tokens - SHORT.tokens)
    megapixel_s = (large - small) / ((LARGE.side**2 - SMALL.side**2) / 1e6)
    return {"request_s": short - SHORT.tokens * token_s, "token_s": token_s, "megapixel_s": megapixel_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--out", type=Path)
    args, console = parser.parse_args(), Console(soft_wrap=True, highlight=False)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        server, client = runner.run(measure(args.requests))
    results: dict[str, Any] = {
        name: {"seconds_per_request": seconds, **solved(seconds)}
        for name, seconds in (("server", server), ("client", client))
    }
    console.print(results)
    console.print(
        f"wrote {write_result('b25_server_cpu', QUESTION, {'requests': args.requests}, results, args.out).name}"
    )


if __name__ == "__main__":
    main()
