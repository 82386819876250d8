"""Is anything lost or left when a server is used, abused, overloaded and killed for half an hour?

    make soak [ARGS="--minutes 10"]

The built-in model, an instance per process. All the while chats come at `--rate`: texts, pictures, schemas, streams and
whole answers, clients that leave, pictures that are none, bodies with something wrong; every `--burst-s` far more than
the server takes; every `--kill-s` SIGKILL to one of the instances. Lost is a request that ends otherwise than with its
whole answer or a typed error, in time. Every `--sample-s` the server's memory and sockets are counted. At the end all
blocks have to be back, and after the server has stopped nothing of it may be left: no process, shared memory or folder.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import orjson
from rich.console import Console

from benchmarks.b10_random_kills import Killer, left_behind, n_recovered, wait_whole
from benchmarks.command import new_console, options, told
from benchmarks.record import write_result
from benchmarks.runs import shown, start
from benchmarks.servers import Server
from hydrainfer.core import InternalError
from tests.fuzz import inputs

QUESTION = __doc__.splitlines()[0]
REFUSED = (429, 503)
TYPED = (400, 404, 413, 415, 422, 504)
WARM = 0.3  # share of the time whose samples do not count
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
MIX = {"text": 4, "picture": 3, "schema": 1, "leaves": 2, "bad picture": 2, "bad body": 1}
ALLOWED_GROWTH = 0.05
ALLOWED_SOCKETS = 4
"""Between two looks at an idle server: connections that clients keep, and those to instances that have come back."""


class Load:
    """Asks and judges. `verdicts`: by kind of request."""

    def __init__(self, client: httpx.AsyncClient, args: argparse.Namespace) -> None:
        self._client, self._args = client, args
        self._rng = random.Random(args.seed)
        self.verdicts: dict[str, Counter[str]] = {kind: Counter() for kind in (*MIX, "burst")}
        self.lost: list[str] = []

    async def run(self, until_s: float) -> None:
        """Open loop until `time.perf_counter()` says so; then waits for all that was asked."""
        burst_s = time.perf_counter() + self._args.burst_s
        async with asyncio.TaskGroup() as group:
            while (now := time.perf_counter()) < until_s:
                kind = self._rng.choices(list(MIX), list(MIX.values()))[0]
                group.create_task(self._one(kind))
                if now >= burst_s:
                    burst_s += self._args.burst_s
                    for _ in range(self._args.burst):
                        group.create_task(self._one("burst"))
                await asyncio.sleep(self._rng.expovariate(self._args.rate))

    async def _one(self, kind: str) -> None:
        begin_s = time.perf_counter()
        try:
            async with asyncio.timeout(self._args.deadline_s + 10.0):
                verdict = await self._ask(kind)
        except TimeoutError:
            verdict = "LOST: no end"
        except httpx.HTTPError as e:
            verdict = f"LOST: {type(e).__name__}"
        self.verdicts[kind][verdict] += 1
        if verdict.startswith("LOST"):
            self.lost.append(f"{kind} after {time.perf_counter() - begin_s:.1f} s: {verdict}")

    async def _ask(self, kind: str) -> str:
        if kind == "bad body":
            path, data = inputs.body(self._rng)
            answer = await self._client.post(path, content=data)
            return _judged(answer.status_code, answer.text)
        body = self._body(kind)
        if not body["stream"]:
            answer = await self._client.post("/v1/chat/completions", json=body)
            if answer.status_code == 200 and not answer.json()["choices"][0]["finish_reason"]:
                return "LOST: no finish reason"
            return _judged(answer.status_code, answer.text)
        leave_s = self._rng.uniform(0.0, 1.5) if kind == "leaves" else None
        return await self._stream(body, leave_s)

    async def _stream(self, body: dict[str, Any], leave_s: float | None) -> str:
        text = ""
        with contextlib.suppress(TimeoutError):
            async with (
                asyncio.timeout(leave_s),
                self._client.stream("POST", "/v1/chat/completions", json=body) as answer,
            ):
                async for piece in answer.aiter_text():
                    text += piece
                if answer.status_code == 200 and not text.rstrip().endswith("data: [DONE]") and '"error"' not in text:
                    return "LOST: the stream broke off"
                return _judged(answer.status_code, text)
        return "left"

    def _body(self, kind: str) -> dict[str, Any]:
        rng = self._rng
        content: Any = " ".join(rng.choices(("how", "many", "red", "circles", "are", "there", "and", "why"), k=20))
        if "picture" in kind:
            data = inputs.picture(rng) if kind == "bad picture" else rng.choice(inputs.pictures())
            url = "data:image/png;base64," + base64.b64encode(data).decode()
            content = [{"type": "text", "text": content}, {"type": "image_url", "image_url": {"url": url}}]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": rng.randint(4, 64)}
        body |= {"stream": kind == "leaves" or rng.random() < 0.5, "temperature": rng.choice([0.0, 1.0])}
        if kind == "schema":
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
        elif kind != "bad picture":
            body["ignore_eos"] = True
        return body


def _judged(status: int, text: str) -> str:
    if InternalError.type in text or (status not in (200, *REFUSED, *TYPED)):
        return f"LOST: {status} {text[:200]}"
    if status == 200:
        return "error in the stream" if '"error":' in text else "answered"
    return f"{status}"


class Watch:
    """Samples of the server's process and of all its processes."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.samples: list[dict[str, float]] = []

    async def run(self, every_s: float) -> None:
        start_s = time.perf_counter()
        while True:
            sample = await asyncio.to_thread(self.look)
            self.samples.append({"at_s": time.perf_counter() - start_s, **sample})
            await asyncio.sleep(every_s)

    def look(self) -> dict[str, float]:
        """Bytes and counts now."""
        folder = Path(f"/proc/{self._server.pid}")
        lines = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        return {
            "rss_bytes": int(lines["VmRSS"].split()[0]) * 1024,
            "threads": int(lines["Threads"]),
            "sockets": sum(_is_socket(fd) for fd in (folder / "fd").iterdir()),
            "all_pss_bytes": self._server.memory()["pss_bytes"],
        }

    def growth(self, what: str) -> float | None:
        """The growth from the first third of the samples that count to the last, of medians, as a share."""
        counted = [s[what] for s in self.samples if s["at_s"] >= WARM * self.samples[-1]["at_s"]]
        third = len(counted) // 3
        if not third:
            return None
        return statistics.median(counted[-third:]) / statistics.median(counted[:third]) - 1.0


def _is_socket(fd: Path) -> bool:
    try:
        return os.readlink(fd).startswith("socket:")
    except OSError:
        return False


async def experiment(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    words = ["--layout", args.layout, "--launcher", args.launcher, "--request-timeout-s", str(args.deadline_s)]
    words += ["--max-waiting", str(args.max_waiting), "--no-access-log", *args.flags.split()]
    with (
        tempfile.TemporaryDirectory() as logs,
        start("soak", words, Path(logs) / "server", console) as server,
    ):
        await server.wait_healthy(args.start_limit_s)
        # the server closes an idle connection after 5 s; a request on its way just then is nobody's loss
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=20, keepalive_expiry=3.0)
        headers = {"Content-Type": "application/json"}
        killer, watch, begin_s = Killer(server, args), Watch(server), time.perf_counter()
        async with httpx.AsyncClient(base_url=server.url, timeout=None, limits=limits, headers=headers) as client:
            load = Load(client, args)
            warm = await client.post("/v1/chat/completions", json={"messages": inputs.HI, "max_tokens": 4})
            assert warm.status_code == 200, warm.text
        sockets = watch.look()["sockets"]
        async with httpx.AsyncClient(base_url=server.url, timeout=None, limits=limits, headers=headers) as client:
            load = Load(client, args)
            beside = [asyncio.create_task(watch.run(args.sample_s))]
            if args.kills:
                beside.append(asyncio.create_task(killer.run()))
            try:
                await load.run(begin_s + 60 * args.minutes)
            finally:
                for task in beside:
                    task.cancel()
            failed = [r for r in await asyncio.gather(*beside, return_exceptions=True) if isinstance(r, Exception)]
        server.check_alive()
        end = await wait_whole(server, args.start_limit_s)
        idle, recovered = watch.look(), n_recovered(server)
        left = left_behind(server, killer)
    return {
        "summary": {
            "minutes": (time.perf_counter() - begin_s) / 60,
            "requests": sum(n for counts in load.verdicts.values() for n in counts.values()),
            "verdicts": {kind: dict(counts.most_common()) for kind, counts in load.verdicts.items()},
            "lost": load.lost,
            "kills": len(killer.kills),
            "recovered": recovered,
            "rss_growth": watch.growth("rss_bytes"),
            "all_pss_growth": watch.growth("all_pss_bytes"),
            "sockets_idle": [sockets, idle["sockets"]],
            "not_whole": end["not_whole"],
            "left": left,
            "exit_status": server.status,
            "watching_failed": [repr(e) for e in failed],
        },
        "command": shown(server.command),
        "samples": watch.samples,
    }


def violations(s: dict[str, Any]) -> list[str]:
    """One line for each thing that a run must not have; none if all is well."""
    found = [f"lost: {what}" for what in s["lost"]]
    found += [f"{name} is not whole" for name in s["not_whole"]]
    found += [f"{kind} left: {', '.join(names)}" for kind, names in s["left"].items() if names]
    found += [f"watching failed: {e}" for e in s["watching_failed"]]
    if s["rss_growth"] is not None and s["rss_growth"] >= ALLOWED_GROWTH and s["minutes"] >= 5:
        found.append(f"the server's memory grew by {s['rss_growth']:.1%}")
    before, after = s["sockets_idle"]
    if after > before + ALLOWED_SOCKETS:
        found.append(f"{after} sockets instead of {before}")
    return found + ([f"the server ended with {s['exit_status']}"] if s["exit_status"] else [])


def report(s: dict[str, Any], command: str) -> str:
    """The summary as Markdown."""
    wrong = violations(s)
    growth = "too short to say" if s["rss_growth"] is None else f"{s['rss_growth']:+.1%}"
    rows = [
        ("minutes", f"{s['minutes']:.1f}"),
        *(("requests", s["requests"]), ("lost", len(s["lost"])), ("kills", s["kills"]), ("recovered", s["recovered"])),
        ("growth of the server's memory after the first third", growth),
        ("sockets, idle, before and after", " / ".join(str(int(n)) for n in s["sockets_idle"])),
        ("instances with blocks that did not come back", len(s["not_whole"])),
        *((f"{kind} left", len(names)) for kind, names in s["left"].items()),
    ]
    lines = [f"# {QUESTION}", "", f"`{command}`", "", "| | |", "|---|---|", *(f"| {n} | {v} |" for n, v in rows), ""]
    lines += ["| requests | how they ended |", "|---|---|"]
    lines += [f"| {k} | {', '.join(f'{n} {v}' for v, n in c.items())} |" for k, c in s["verdicts"].items()]
    return "\n".join([*lines, "", *(f"- **{w}**" for w in wrong or ["nothing is lost or left behind"]), ""])


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--layout", default="2EP2D")
    parser.add_argument("--launcher", default="ray")
    parser.add_argument("--flags", default="", help="more flags for `hydrainfer serve`, as one string")
    parser.add_argument("--rate", type=float, default=4.0, help="requests per second")
    parser.add_argument("--max-waiting", type=int, default=100, help="of the server: what more comes is refused")
    parser.add_argument("--burst", type=int, default=300, help="requests at once")
    parser.add_argument("--burst-s", type=float, default=60.0)
    parser.add_argument("--kill-s", type=float, default=45.0, help="between kills, about; 0: none")
    parser.add_argument("--down", type=int, default=2, help="instances down at once, at most")
    parser.add_argument("--last", type=float, default=0.1, help="share of kills that may take the last one of a stage")
    parser.add_argument("--sample-s", type=float, default=5.0)
    parser.add_argument("--deadline-s", type=float, default=60.0)
    parser.add_argument("--start-limit-s", type=float, default=180.0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    args.kills = 10**9 if args.kill_s else 0
    args.every_s = (0.5 * args.kill_s, 1.5 * args.kill_s)
    return args


def main() -> int:
    args, console = arguments(), new_console()
    with told(console):
        results = asyncio.run(experiment(args, console))
    path = write_result("b29_soak", __doc__, args, results)
    said = report(results["summary"], orjson.loads(path.read_bytes())["command"])
    path.with_suffix(".md").write_text(said)
    console.print(said, markup=False)
    return bool(violations(results["summary"]))


if __name__ == "__main__":
    sys.exit(main())
