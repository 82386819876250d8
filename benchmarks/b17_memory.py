"""Does a server keep memory for each distinct text that it is asked?

    python -m benchmarks.b17_memory [--requests 100000] [--clients 16]

The built-in model is asked in chats of one output token each: first the same prompt over and over, which grows all that
any load grows (threads' heaps, buffers of connections), then `--requests` prompts that differ from each other. The
resident memory of the server's process is read every `--every` answers. Most texts have less than 256 bytes: longer
ones no tokenizer keeps.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
import time
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.command import new_console, options
from benchmarks.figure import save_lines
from benchmarks.record import write_result
from benchmarks.runs import shown, start
from benchmarks.servers import Server, ServerFailed
from hydrainfer.workload.client import ChatClient, Endpoint
from hydrainfer.workload.sources import BodyOptions, ChatRequest

QUESTIONS = ("How many circles are there?", "Which colour has the square?", "Is the digit a seven?", "What is this?")
SETTLED = 0.2  # of the distinct prompts: what came before is not judged
LIMIT_BYTES_PER_PROMPT = 50.0
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--requests", type=int, default=100_000, help="distinct prompts")
    parser.add_argument("--same", type=int, default=10_000, help="equal prompts before them")
    parser.add_argument("--every", type=int, default=2_000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--characters", type=int, nargs=2, default=[20, 300], help="least and most of a prompt")
    parser.add_argument("--flags", default="", help="further options of the server")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    console = new_console()
    results = asyncio.run(experiment(args, console))
    path = write_result("b17_memory", __doc__, args, results)
    x = [n / 1000 for n in results["distinct"]["n_prompts"]]
    y = [n / 2**20 for n in results["distinct"]["resident_bytes"]]
    title = "Resident memory of the server's process"
    save_lines(path.with_suffix(".png"), title, "thousand distinct prompts", "MiB", x, {"built-in": y}, log=False)
    verdict = "flat" if results["bytes_per_prompt"] <= LIMIT_BYTES_PER_PROMPT else "NOT FLAT"
    console.print(f"{verdict}: {results['bytes_per_prompt']:.1f} bytes per distinct prompt; wrote {path}")


async def experiment(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory() as logs,
        start("built-in", args.flags.split(), Path(logs) / "server", console) as server,
    ):
        await server.wait_healthy(300.0)
        target = Endpoint(base_url=server.url, model=await server.model())
        async with ChatClient(target, time.perf_counter) as client:
            load = Load(client, target.model, server, args, console)
            same = await load.run("same", repeat(QUESTIONS[0], args.same))
            distinct = await load.run("distinct", distinct_texts(args))
    return {
        "same": same,
        "distinct": distinct,
        "bytes_per_prompt": bytes_per_prompt(distinct),
        "command": shown(server.command),
    }


def distinct_texts(args: argparse.Namespace) -> Iterator[str]:
    """Each begins with its number, so that no two are alike from the first word on."""
    rng = random.Random(args.seed)
    for i in range(args.requests):
        n = rng.randint(*args.characters)
        text = f"{i} {rng.choice(QUESTIONS)}"
        while len(text) < n:
            text += f" {rng.getrandbits(24):x}"
        yield text


class Load:
    """Asks, and reads the server's memory."""

    def __init__(
        self, client: ChatClient, model: str, server: Server, args: argparse.Namespace, console: Console
    ) -> None:
        self._client, self._model, self._server, self._args, self._console = client, model, server, args, console

    async def run(self, name: str, texts: Iterator[str]) -> dict[str, Any]:
        """One request of each text, `--clients` at a time. Raises `ServerFailed` if one fails."""
        begin_s = time.perf_counter()
        self._n, self._points = 0, [(0, resident_bytes(self._server.pid))]
        async with asyncio.TaskGroup() as group:
            for _ in range(self._args.clients):
                group.create_task(self._ask(name, texts))
        return {
            "seconds": time.perf_counter() - begin_s,
            "n_prompts": [n for n, _ in self._points],
            "resident_bytes": [size for _, size in self._points],
        }

    async def _ask(self, name: str, texts: Iterator[str]) -> None:
        for text in texts:
            body = BodyOptions().body(ChatRequest(text=text, max_tokens=1), self._model)
            record = await self._client.chat(body, index=self._n, n_asked=1, scheduled_s=time.perf_counter())
            if not record.ok:
                raise ServerFailed(f"a request failed: {record.failure}\n{self._server.log_tail()}")
            self._n += 1
            if self._n % self._args.every == 0:
                self._points.append((self._n, resident_bytes(self._server.pid)))
                self._console.print(f"{name} {self._n}: {self._points[-1][1] / 2**20:.1f} MiB")


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES


def bytes_per_prompt(run: dict[str, Any]) -> float:
    """Slope of a straight line through the points after the first `SETTLED` of them, by least squares."""
    first = int(SETTLED * run["n_prompts"][-1])
    points = [(n, size) for n, size in zip(run["n_prompts"], run["resident_bytes"], strict=True) if n >= first]
    mean_n, mean_size = (sum(values) / len(points) for values in zip(*points, strict=True))
    spread = sum((n - mean_n) ** 2 for n, _ in points)
    return sum((n - mean_n) * (size - mean_size) for n, size in points) / spread if spread else 0.0


if __name__ == "__main__":
    main()
