"""How much of a core do the server and `bench` take for a request, for its pictures and for each token of its answer?

    python -m benchmarks.b25_server_cpu [--requests 300]

`hydrainfer serve` with an emulated device, so that nothing is computed but what serving takes: processor time of all
its processes over loads that differ in one thing. What comes out is `request_s`, `megapixel_s` and `token_s` of
configs/engines/hydrainfer.yaml and, of the client, of `hydrainfer/profiling/live.py`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal, NamedTuple

import uvloop

from benchmarks.command import new_console, options
from benchmarks.record import ROOT, write_result
from benchmarks.servers import Server, free_port
from hydrainfer.builtin import MODEL
from hydrainfer.workload.client import Endpoint, run_load
from hydrainfer.workload.sources import ChatRequest, Closed, DrawnPicture, encoded

_CLIENTS, _WARM = 4, 20


class Load(NamedTuple):
    """`width`, `height`: of one picture, in pixels; 0 without."""

    tokens: int
    width: int = 0
    height: int = 0
    encoding: Literal["png", "jpeg"] = "jpeg"

    def __str__(self) -> str:
        return f"{self.tokens} tokens" + (f", {self.width} x {self.height} {self.encoding}" if self.width else "")

    def chats(self, n: int, seed: int) -> list[ChatRequest]:
        """Requests with a picture each that no other has, or none."""
        first, size = seed << 32, (self.width, self.height, self.encoding)
        return [
            ChatRequest(
                text=f"{i}: What is in the picture?",
                pictures=(DrawnPicture(first + i, *size),) if self.width else (),
                max_tokens=self.tokens,
            )
            for i in range(n)
        ]


SHORT, LONG, JPEG, PNG = Load(2), Load(66), Load(2, 1024, 768), Load(2, 1024, 768, "png")


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
        for k, load in enumerate((SHORT, LONG, JPEG, PNG)):
            chats = encoded(load.chats(n + _WARM, k))
            await run_load(target, chats[:_WARM], Closed(_CLIENTS))
            before_s, mine_s = it.cpu_s(), time.process_time()
            result = await run_load(target, chats[_WARM:], Closed(_CLIENTS))
            assert all(r.failure is None for r in result.records), result.records[0]
            name = str(load)
            servers[name], clients[name] = (it.cpu_s() - before_s) / n, (time.process_time() - mine_s) / n
    return servers, clients


def solved(seconds: dict[str, float]) -> dict[str, float]:
    short, long, jpeg, png = seconds.values()
    token_s, megapixels = (long - short) / (LONG.tokens - SHORT.tokens), JPEG.width * JPEG.height / 1e6
    return {
        "request_s": short - SHORT.tokens * token_s,
        "token_s": token_s,
        "megapixel_s": (jpeg - short) / megapixels,
        "png_megapixel_s": (png - short) / megapixels,
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--requests", type=int, default=300)
    args, console = parser.parse_args(), new_console()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        server, client = runner.run(measure(args.requests))
    results: dict[str, Any] = {
        name: {"seconds_per_request": seconds, **solved(seconds)}
        for name, seconds in (("server", server), ("client", client))
    }
    console.print(results)
    console.print(f"wrote {write_result('b25_server_cpu', __doc__, args, results).name}")


if __name__ == "__main__":
    main()
