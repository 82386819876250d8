"""How much of a core do the server and `bench` take for a request, for its pictures and for each token of its answer?

    python -m benchmarks.b25_server_cpu [--requests 300] [--clients 16] [--rounds 3]

`hydrainfer serve` with emulated devices, so that nothing is computed but what serving takes: processor time over loads
that differ in one thing, of one instance, of two in the server's process and of two Ray actors; told apart are the
server's process, those that prepare pictures, and all others (the instances, Ray). With one client every token is a
step: what the instances take of it then is a step's. What comes out, medians of the rounds, is `server` of
configs/engines/hydrainfer.yaml and, of the client, the constant in `hydrainfer/profiling/live.py`.
"""

from __future__ import annotations

import asyncio
import os
import statistics
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

_WARM = 20
_IDLE_S = 5.0
_DEPLOYMENTS = {
    "one instance": ("--layout", "1EPD"),
    "two, threads": ("--layout", "2EPD", "--launcher", "inproc"),
    "two, Ray actors": ("--layout", "2EPD"),
}
_ALONE = "one client"
_WORKER = b"hydrainfer.processor.workers.worker"


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


class Seconds(NamedTuple):
    """Processor time of the server's process, of those that prepare pictures, of all others and of this client."""

    process: float
    preparing: float
    others: float
    client: float

    @staticmethod
    def of(server: Server) -> Seconds:
        parts = {"process": 0.0, "preparing": 0.0, "others": 0.0}
        for pid, (_, seconds) in server.cpu_by_process().items():
            parts["process" if pid == server.pid else "preparing" if _prepares(pid) else "others"] += seconds
        return Seconds(**parts, client=time.process_time())

    def per(self, n: float, before: Seconds) -> dict[str, float]:
        return {name: (b - a) / n for name, a, b in zip(self._fields, before, self, strict=True)}


def _prepares(pid: int) -> bool:
    try:
        return _WORKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


async def measure(chats: dict[Load, list[ChatRequest]], n_clients: int, flags: tuple[str, ...]) -> dict[str, Any]:
    """Seconds of a core per request of each load, by process; and, `idle`, per second without any."""
    port, found = free_port(), dict[str, Any]()
    own = ["--device", "emulated", "--cost-model", str(ROOT / "configs" / "costs" / "fast.yaml"), "--port", str(port)]
    command = [sys.executable, "-m", "hydrainfer", "serve", str(MODEL), *own, "--max-queue-s", "600", *flags]
    with (
        tempfile.TemporaryDirectory() as logs,
        Server("ours", command, port, Path(logs) / "log", dict(os.environ)) as it,
    ):
        await it.wait_healthy(120)
        target = Endpoint(base_url=it.url, model=await it.model())
        for load, own_chats in chats.items():
            await run_load(target, own_chats[:_WARM], Closed(n_clients))
            before = Seconds.of(it)
            result = await run_load(target, own_chats[_WARM:], Closed(n_clients))
            assert all(r.failure is None for r in result.records), result.records[0]
            found[str(load)] = Seconds.of(it).per(len(own_chats) - _WARM, before)
        before = Seconds.of(it)
        await asyncio.sleep(_IDLE_S)
        found["idle"] = Seconds.of(it).per(_IDLE_S, before)
    return found


def _token_s(found: dict[str, Any], *parts: str) -> float:
    short, long = (sum(found[str(load)][part] for part in parts) for load in (SHORT, LONG))
    return (long - short) / (LONG.tokens - SHORT.tokens)


def solved(found: dict[str, Any], *parts: str) -> dict[str, float]:
    """What these parts take together."""
    short, jpeg, png = (sum(found[str(load)][part] for part in parts) for load in (SHORT, JPEG, PNG))
    token_s, megapixels = _token_s(found, *parts), JPEG.width * JPEG.height / 1e6
    return {
        "request_s": short - SHORT.tokens * token_s,
        "token_s": token_s,
        "megapixel_s": (jpeg - short) / megapixels,
        "png_megapixel_s": (png - short) / megapixels,
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--alone", type=int, default=60, help="requests of one client")
    parser.add_argument("--rounds", type=int, default=3)
    args, console = parser.parse_args(), new_console()
    chats = {load: encoded(load.chats(args.requests + _WARM, k)) for k, load in enumerate((SHORT, LONG, JPEG, PNG))}
    few = {load: chats[load][: args.alone + _WARM] for load in (SHORT, LONG)}
    asked = {name: (chats, args.clients, flags) for name, flags in _DEPLOYMENTS.items()}
    asked[_ALONE] = (few, 1, _DEPLOYMENTS["two, Ray actors"])
    rounds = [{name: _measured(*each) for name, each in asked.items()} for _ in range(args.rounds)]
    medians = {name: _medians([found[name] for found in rounds]) for name in asked}
    results: dict[str, Any] = {}
    for name in _DEPLOYMENTS:
        found = medians[name]
        parts = {part: solved(found, part) for part in Seconds._fields}
        server = solved(found, "process", "preparing", "others")
        results[name] = {"seconds_per_request": found, "server": server} | parts
        console.print(name, results[name])
    alone, apart = results["one instance"], results["two, Ray actors"]
    own = ("process", "preparing")
    results["passing"] = {k: sum(apart[part][k] - alone[part][k] for part in own) for k in alone["server"]}
    results[_ALONE] = {part: _token_s(medians[_ALONE], part) for part in Seconds._fields}
    console.print(results["passing"], results[_ALONE])
    console.print(f"wrote {write_result('b25_server_cpu', __doc__, args, results).name}")


def _medians(rounds: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    return {
        load: {part: statistics.median(found[load][part] for found in rounds) for part in parts}
        for load, parts in rounds[0].items()
    }


def _measured(chats: dict[Load, list[ChatRequest]], n_clients: int, flags: tuple[str, ...]) -> dict[str, Any]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(measure(chats, n_clients, flags))


if __name__ == "__main__":
    main()
