"""Does a server that is asked for ten times what it can do still do it, and refuse the rest at once?

    python -m benchmarks.b19_overload [--factor 10] [--seconds 60]

The built-in model. First its capacity: answers per second with `--clients` requests always under way. Then requests
arrive at `--factor` times that rate, whatever becomes of them; `--obedient` of those who are refused come back once,
when `Retry-After` says. Another process asks `/health` all the while. Told: good answers (within `--limit-s`) per
second of the second half against the capacity, how long a refusal takes, `/health`, connections that broke, and who
came back and was served.

With `--roll` all instances are restarted meanwhile, one at a time (SIGUSR1), and nothing may fail:
`--factor 0.5 --roll --flags "--layout 2EPD --launcher ray"`.

The generator is a process of its own but shares the machine: it costs the server `generator_cores`. As a control, the
capacity is measured once more while such a generator sends its requests to a server that is nothing (`--control`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import random
import signal
import tempfile
import time
import urllib.request
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson
import uvloop
from rich.console import Console

from benchmarks.command import new_console, options
from benchmarks.figure import Panel, save_bars
from benchmarks.record import spread, write_result
from benchmarks.runs import shown, start
from benchmarks.servers import CpuWatch
from hydrainfer.judging import at_quantile

WORDS = ("How", "many", "circles", "squares", "red", "blue", "are", "there", "in", "this", "picture", "and", "why")
HEALTH_EVERY_S = 0.05
REFUSED = (429, 503)


class Exchange(asyncio.Protocol):
    """One kept connection, one exchange at a time: just enough HTTP for this server's whole answers."""

    def __init__(self) -> None:
        self.open = True
        self._data = b""
        self._done: asyncio.Future[tuple[int, float]] | None = None

    def ask(self, message: bytes) -> asyncio.Future[tuple[int, float]]:
        """The status and seconds of `Retry-After`."""
        self._done, self._data = asyncio.get_running_loop().create_future(), b""
        self.transport.write(message)  # type: ignore[attr-defined]
        return self._done

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, end, body = self._data.partition(b"\r\n\r\n")
        if not end or self._done is None or self._done.done():
            return
        headers = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        if len(body) >= int(headers.get(b"content-length", 0)):
            if headers.get(b"connection") == b"close":
                self.open = False
            self._done.set_result((int(head[9:12]), float(headers.get(b"retry-after", 0))))

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        if self._done is not None and not self._done.done():
            self._done.set_exception(exc or ConnectionResetError("closed before the answer"))


class Generator:
    """Open-loop arrivals at one server; what became of each is told in `records`."""

    def __init__(self, url: str, model: str, args: argparse.Namespace) -> None:
        at = urlsplit(url)
        self._host, self._port, self._model, self._args = at.hostname or "", at.port or 80, model, args
        self._idle: list[tuple[float, Exchange]] = []
        self.records: list[dict[str, Any]] = []

    async def run(self, rate: float, seconds: float, seed: int) -> None:
        """Send for `seconds`, then wait for every answer and, at most `--patience-s`, for those who come back."""
        rng, start_s, due_s = random.Random(seed), time.perf_counter(), 0.0
        tasks: set[asyncio.Task[None]] = set()
        while due_s < seconds:
            await asyncio.sleep(max(0.0, start_s + due_s - time.perf_counter()))
            obeys = rng.random() < self._args.obedient
            task = asyncio.create_task(self._client(self._body(rng), start_s, due_s, obeys, seconds))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            due_s += rng.expovariate(rate)
        await asyncio.gather(*tasks)

    async def _client(self, body: bytes, start_s: float, due_s: float, obeys: bool, seconds: float) -> None:
        record = {"due_s": due_s, **await self._ask(body, 0)}
        self.records.append(record)
        back_s = record["retry_after_s"]
        if obeys and record["status"] in REFUSED and due_s + back_s <= seconds + self._args.patience_s:
            await asyncio.sleep(back_s)
            again_s = time.perf_counter() - start_s
            record["again"] = {"due_s": again_s, **await self._ask(body, 1)}

    async def _ask(self, body: bytes, n_retries: int) -> dict[str, Any]:
        begin_s = time.perf_counter()
        try:
            async with asyncio.timeout(self._args.client_timeout_s):
                status, retry_after_s = await self._exchange(body, n_retries)
        except TimeoutError:
            status, retry_after_s = 0, 0.0
        except OSError:
            status, retry_after_s = -1, 0.0
        return {"status": status, "took_s": time.perf_counter() - begin_s, "retry_after_s": retry_after_s}

    async def _exchange(self, body: bytes, n_retries: int) -> tuple[int, float]:
        known = f"x-stainless-retry-count: {n_retries}\r\n" if self._args.say_retries else ""
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n{known}content-type: application/json\r\n"
        message = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
        connection = await self._connection()
        done = connection.ask(message)
        try:
            return await done
        finally:
            usable = done.done() and not done.cancelled() and done.exception() is None and connection.open
            if usable and not self._args.new_connections:
                self._idle.append((time.perf_counter(), connection))
            else:
                connection.transport.abort()  # type: ignore[attr-defined]

    async def _connection(self) -> Exchange:
        while self._idle:
            since_s, connection = self._idle.pop()
            if connection.open and time.perf_counter() - since_s < 3.0:
                return connection
            connection.transport.abort()  # type: ignore[attr-defined]
        _, made = await asyncio.get_running_loop().create_connection(Exchange, self._host, self._port)
        return made

    def _body(self, rng: random.Random) -> bytes:
        text = " ".join(rng.choices(WORDS, k=rng.randint(*self._args.words)))
        messages = [{"role": "user", "content": text}]
        fields = {"max_tokens": self._args.output_tokens, "ignore_eos": True}
        return orjson.dumps({"model": self._model, "messages": messages, **fields})

    async def closed(self, n_clients: int, seconds: float, seed: int) -> float:
        """Answers per second with so many requests always under way, the first fifth not counted."""
        rng, start_s, n = random.Random(seed), time.perf_counter(), 0

        async def client() -> None:
            nonlocal n
            while (since_s := time.perf_counter() - start_s) < seconds:
                record = await self._ask(self._body(rng), 0)
                self.records.append(record)
                ended_s = time.perf_counter() - start_s
                n += record["status"] == 200 and since_s >= 0 and 0.2 * seconds <= ended_s <= seconds

        await asyncio.gather(*(client() for _ in range(n_clients)))
        return n / (0.8 * seconds)


def generate(pipe: Connection) -> None:
    """The process of a generator: carries out what `pipe` asks."""
    while (job := pipe.recv()) is not None:
        what, url, model, args, values = job
        generator, begin_s = Generator(url, model, args), time.process_time()
        wall_s = time.perf_counter()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            found = runner.run(getattr(generator, what)(*values))
        cores = (time.process_time() - begin_s) / (time.perf_counter() - wall_s)
        pipe.send((found, generator.records, cores))


def watch_health(pipe: Connection, url: str) -> None:
    """The process that asks `/health` until it is told to stop."""
    asyncio.run(_watch_health(pipe, urlsplit(url).port or 80))


async def _watch_health(pipe: Connection, port: int) -> None:
    took_s, n_failed = [], 0
    while not pipe.poll():
        begin_s = time.perf_counter()
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            ok = (await reader.read()).startswith(b"HTTP/1.1 200")
            writer.close()
            n_failed += not ok
        took_s.append(time.perf_counter() - begin_s)
        await asyncio.sleep(max(0.0, HEALTH_EVERY_S - took_s[-1]))
    pipe.send((took_s, n_failed))


class Process:
    """A child process and the pipe to it; ended on exit."""

    def __init__(self, target: Any, *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, there = context.Pipe()
        self._process = context.Process(target=target, args=(there, *args), daemon=True)
        self._process.start()

    def __enter__(self) -> Connection:
        return self.pipe

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self.pipe.send(None)
        self._process.join(5)
        self._process.kill()


def judged(records: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """The figures of one run for its clients. Good answers are counted by when they ended, in the second half: before,
    the queue fills."""
    back = [r["again"] for r in records if "again" in r]
    ended = [(r["due_s"] + r["took_s"], r) for r in [*records, *back]]
    n_good = sum(_good(r, args) for end_s, r in ended if args.seconds / 2 <= end_s <= args.seconds)
    admitted = [r for _, r in ended if r["status"] not in REFUSED]
    refused = [r for r in [*records, *back] if r["status"] in REFUSED]
    told = [r["retry_after_s"] for r in records if r["status"] in REFUSED]
    early = [r for r in back if r["due_s"] <= args.seconds]
    return {
        "statuses": {str(k): n for k, n in sorted(Counter(r["status"] for r in [*records, *back]).items())},
        "goodput_per_s": n_good / (0.5 * args.seconds),
        "answers_s": percentiles([r["took_s"] for r in records if r["status"] == 200]),
        "refusals_s": percentiles([r["took_s"] for r in refused]),
        "retry_after_s": percentiles(told),
        "admitted_in_time": share(admitted, args),
        "n_broken": sum(r["status"] == -1 for r in [*records, *back]),
        "n_unanswered": sum(r["status"] == 0 for r in [*records, *back]),
        "n_came_back": len(back),
        "came_back_served": share(back, args),
        "came_back_during_the_flood_served": share(early, args),
    }


def _good(record: dict[str, Any], args: argparse.Namespace) -> bool:
    return bool(record["status"] == 200 and record["took_s"] <= args.limit_s)


def share(records: list[dict[str, Any]], args: argparse.Namespace) -> float | None:
    return sum(_good(r, args) for r in records) / len(records) if records else None


def percentiles(seconds: list[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    ordered = sorted(seconds)
    ranks = {name: at_quantile(ordered, q) for name, q in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))}
    return {"n": len(ordered), **ranks, "max": ordered[-1]}


async def nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A server's part that refuses everything, as cheaply as asyncio can."""
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        while head := await reader.readuntil(b"\r\n\r\n"):
            await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r", 1)[0]))
            writer.write(b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 1000\r\ncontent-length: 0\r\n\r\n")


def serve_nothing(pipe: Connection) -> None:
    async def serve() -> None:
        server = await asyncio.start_server(nothing, "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[1])
        await asyncio.get_running_loop().run_in_executor(None, pipe.recv)

    uvloop.run(serve())


async def experiment(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory() as logs,
        start("built-in", args.flags.split(), Path(logs) / "server", console) as server,
        Process(generate) as generator,
        Process(generate) as flood,
    ):
        await server.wait_healthy(300.0)
        model = await server.model()

        def ask(pipe: Connection, what: str, url: str, *values: Any) -> None:
            pipe.send((what, url, model, args, values))

        ask(generator, "closed", server.url, args.clients, 3.0, args.seed)  # buffers made at first use
        generator.recv()
        rounds = []
        for rank in range(args.rounds):
            seed = args.seed + 10 * rank
            before_s = server.cpu_s()
            ask(generator, "closed", server.url, args.clients, args.capacity_s, seed)
            capacity, records, cores = generator.recv()
            found: dict[str, Any] = {"capacity_per_s": capacity, "client_cores": cores}
            found["cpu_s_per_answer"] = (server.cpu_s() - before_s) / max(1, len(records))
            found["beside_nothing_per_s"] = None
            if args.control:
                with Process(serve_nothing) as null:
                    nowhere = f"http://127.0.0.1:{null.recv()}"
                    ask(flood, "run", nowhere, args.factor * capacity, args.capacity_s, seed + 1)
                    ask(generator, "closed", server.url, args.clients, args.capacity_s, seed + 2)
                    found["beside_nothing_per_s"] = generator.recv()[0]
                    flood.recv()
            before = server.memory()["pss_bytes"]
            with Process(watch_health, server.url) as health:
                ask(flood, "run", server.url, args.factor * capacity, args.seconds, seed + 3)
                incarnations = instances(server.url) if args.roll else {}
                if args.roll:
                    os.kill(server.pid, signal.SIGUSR1)
                await asyncio.sleep(args.seconds / 2)
                watch = CpuWatch([server])
                await asyncio.sleep(args.seconds / 2)
                use = watch.stop()
                health.send("stop")
                took_s, n_failed = health.recv()
                _, records, cores = flood.recv()
            server.check_alive()
            if args.roll:
                found["n_restarted"] = sum(n > incarnations[name] for name, n in instances(server.url).items())
            found |= judged(records, args)
            found |= {"health_s": percentiles(took_s), "n_health_failed": n_failed, "generator_cores": cores}
            found |= {"server_cores": use.servers["built-in"], "other_cores": use.others}
            await asyncio.sleep(args.pause_s)
            found["pss_bytes"] = [before, server.memory()["pss_bytes"]]
            found["memory_growth"] = found["pss_bytes"][1] / before - 1.0
            n_good = found["goodput_per_s"] * args.seconds / 2
            found["flood_cpu_s_per_answer"] = use.servers["built-in"] * use.wall_s / max(1.0, n_good)
            found["goodput_share"] = found["goodput_per_s"] / capacity
            control = found["beside_nothing_per_s"]
            found["goodput_share_beside_nothing"] = found["goodput_per_s"] / control if control else None
            console.print(line_of(found), soft_wrap=True)
            rounds.append(found)
    return {"summary": summary(rounds), "rounds": rounds, "command": shown(server.command)}


def instances(url: str) -> dict[str, int]:
    """The incarnation of each that runs."""
    with urllib.request.urlopen(f"{url}/v1/instances", timeout=10) as answer:
        cards = orjson.loads(answer.read())["data"]
    return {card["id"]: card["incarnation"] for card in cards}


def line_of(r: dict[str, Any]) -> str:
    def ms(key: str) -> str:
        return f"{r[key]['p50'] * 1e3:.0f}/{r[key]['p95'] * 1e3:.0f}/{r[key]['p99'] * 1e3:.0f} ms" if r[key] else "-"

    beside, beside_share = r["beside_nothing_per_s"] or 0.0, r["goodput_share_beside_nothing"] or 0.0
    back, early = r["came_back_served"] or 0.0, r["came_back_during_the_flood_served"] or 0.0
    told = r["retry_after_s"] or {"p50": 0.0, "max": 0.0}
    return "; ".join(
        (
            f"capacity {r['capacity_per_s']:.1f}/s (beside a flood elsewhere {beside:.1f})",
            f"goodput {r['goodput_per_s']:.1f}/s ({r['goodput_share']:.2f}; {beside_share:.2f})",
            f"p50/p95/p99 of answers {ms('answers_s')}, of refusals {ms('refusals_s')}, of /health {ms('health_s')}",
            f"broken {r['n_broken']}, unanswered {r['n_unanswered']}",
            f"Retry-After {told['p50']:.0f} s, at most {told['max']:.0f}",
            f"admitted and in time {r['admitted_in_time'] or 0.0:.3f}, memory {r['memory_growth']:+.1%}",
            f"{r['n_came_back']} came back, served {back:.2f}, during the flood {early:.2f}",
            f"CPU ms per answer {r['cpu_s_per_answer'] * 1e3:.1f}, flooded {r['flood_cpu_s_per_answer'] * 1e3:.1f}",
            f"cores: server {r['server_cores']:.2f}, client {r['generator_cores']:.2f}, others {r['other_cores']:.2f}",
            *([f"{r['n_restarted']} instances restarted"] if "n_restarted" in r else []),
            str(r["statuses"]),
        )
    )


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    plain: tuple[str, ...] = (
        "capacity_per_s",
        "beside_nothing_per_s",
        "goodput_share",
        "goodput_share_beside_nothing",
        "n_broken",
    )
    plain += ("came_back_served", "came_back_during_the_flood_served", "generator_cores")
    plain += ("admitted_in_time", "memory_growth")
    found = {name: spread([r[name] for r in rounds if r[name] is not None]) for name in plain}
    for name in ("answers_s", "refusals_s", "health_s", "retry_after_s"):
        found |= {f"{name}_{q}": spread([r[name][q] for r in rounds if r[name]]) for q in ("p50", "p95", "p99")}
    return found


def arguments() -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--factor", type=float, default=10.0, help="arrivals, as a multiple of the capacity")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the flood of a round")
    parser.add_argument("--capacity-s", type=float, default=15.0, help="of each measurement of the capacity")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=64, help="requests under way when the capacity is measured")
    parser.add_argument("--words", type=int, nargs=2, default=[4, 24], help="least and most of a prompt")
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--limit-s", type=float, default=15.0, help="a later answer is no good one")
    parser.add_argument("--client-timeout-s", type=float, default=30.0)
    parser.add_argument("--obedient", type=float, default=1.0, help="share of the refused that come back when told")
    parser.add_argument(
        "--patience-s", type=float, default=20.0, help="nobody comes back later after the end than this"
    )
    parser.add_argument("--say-retries", action="store_true", help="send x-stainless-retry-count, as the openai client")
    parser.add_argument("--new-connections", action="store_true", help="one per request instead of kept ones")
    parser.add_argument("--control", action="store_true", help="measure the capacity beside a flood elsewhere, too")
    parser.add_argument("--roll", action="store_true", help="restart the instances, one at a time, meanwhile")
    parser.add_argument("--flags", default="", help="further options of the server")
    parser.add_argument("--pause-s", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    args, console = arguments(), new_console()
    results = asyncio.run(experiment(args, console))
    path = write_result("b19_overload", __doc__, args, results)
    rounds = results["rounds"]
    shares = Panel("goodput / capacity", ["goodput"], {"": [[r["goodput_share"] for r in rounds]]})
    waits = {"": [[r[key]["p95"] * 1e3 for r in rounds if r[key]] for key in ("refusals_s", "health_s")]}
    title = f"{args.factor:g} times what the server can do"
    save_bars(path.with_suffix(".png"), title, [shares, Panel("p95, ms", ["refusals", "/health"], waits)])
    console.print(f"wrote {path}")


if __name__ == "__main__":
    main()
