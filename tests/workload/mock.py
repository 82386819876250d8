"""An OpenAI-style server without a model: it streams tokens at set times, queues if told to, misbehaves on demand.

It also shows what the client itself costs on a machine (`benchmarks/b04_client_overhead.py`), and
`python -m tests.workload.mock --ttft-ms lognormal:50:0.3 --itl-ms 10` starts a server to try `hydrainfer bench` on.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hydrainfer.workload.sources import Spread


@dataclass(frozen=True)
class Script:
    """The course of one answer. `service_s`: how long it holds one of the server's slots before `ttft_s` begins.
    `*_after`: counts of token chunks. `itl_s`: the gap after each chunk, or one gap for each, or a function that draws
    one. `timings`: the content of `usage.hydrainfer`. `refuses`: a body with one of these fields gets a 400, as does
    one that asks for more than `most_tokens`."""

    service_s: float = 0.0
    ttft_s: float = 0.0
    itl_s: float | tuple[float, ...] | Callable[[], float] = 0.0
    n_tokens: int | None = None
    tokens_per_chunk: int = 1
    role_first: bool = True
    text: bool = True
    token_ids: bool = True
    usage: bool = True
    usage_offset: int = 0
    timings: dict[str, float] | None = None
    done: bool = True
    status: int = 200
    error_body: bytes = b'{"error":{"message":"too many requests","type":"rate_limit_error"}}'
    refuses: tuple[str, ...] = ()
    most_tokens: int | None = None
    cut_after: int | None = None
    garbage_after: int | None = None
    error_after: int | None = None
    fragment: bool = False
    crlf: bool = False
    keep_alive: bool = True

    def refusal(self, body: dict[str, Any], asked: int) -> str | None:
        """The reason to refuse a body that asks for `asked` tokens; None if there is none."""
        if self.most_tokens is not None and asked > self.most_tokens:
            return f"the maximum context length leaves room for {self.most_tokens} tokens, not {asked}"
        return next((f"unknown field {name}" for name in self.refuses if name in body), None)

    def gap_s(self, i: int) -> float:
        if callable(self.itl_s):
            return self.itl_s()
        return self.itl_s[i] if isinstance(self.itl_s, tuple) else self.itl_s


@dataclass
class Served:
    """The server's own record of a request, by its own clock."""

    body: dict[str, Any]
    received_s: float
    role_s: float = 0.0
    token_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    token_ids: list[int] = field(default_factory=list)


class MockServer:
    """The server, as `async with MockServer(script) as server: server.url`. `script` may be a function of the request's
    rank. `slots`: requests in service at once, first come, first served; None for no limit. `pages`: bodies of GET
    paths."""

    def __init__(
        self,
        script: Script | Callable[[int], Script],
        *,
        slots: int | None = None,
        port: int = 0,
        pages: dict[str, str] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._script: Callable[[int], Script] = script if callable(script) else lambda _: script
        self._slots = contextlib.nullcontext() if slots is None else asyncio.Semaphore(slots)
        self._port, self._clock = port, clock
        self._pages = {"/health": "{}", "/v1/models": '{"data":[{"id":"mock"}]}', "/version": '{"version":"mock"}'}
        self._pages |= pages or {}
        self.served: list[Served] = []
        self.n_connections = 0
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> MockServer:
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", self._port, limit=2**26, backlog=1024)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.die()
        await self._server.wait_closed()

    def die(self) -> None:
        """Die like a killed process: the port closes, and every connection breaks."""
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.n_connections += 1
        self._writers.add(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                method, path, _ = head.split(b" ", 2)
                sizes = (x.split(b":")[1] for x in head.split(b"\r\n") if x.lower().startswith(b"content-length"))
                content = await reader.readexactly(int(next(sizes, b"0")))
                if method == b"GET":
                    self._page(writer, path.decode())
                    continue
                served = Served(json.loads(content), self._clock())
                self.served.append(served)
                if not await self._answer(writer, served, self._script(len(self.served) - 1)):
                    return
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # cancelled when the loop ends, which asyncio would print as an error of its callback
        finally:
            self._writers.discard(writer)
            writer.close()

    def _page(self, writer: asyncio.StreamWriter, path: str) -> None:
        page = self._pages.get(path)
        self._whole(writer, 404 if page is None else 200, (page or "{}").encode())

    def _whole(self, writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)

    async def _answer(self, writer: asyncio.StreamWriter, served: Served, script: Script) -> bool:
        """Answer one request. Returns False if the connection has ended."""
        asked = served.body.get("max_completion_tokens") or served.body.get("max_tokens") or script.most_tokens or 16
        refused = script.refusal(served.body, asked)
        if refused is not None or script.status != 200:
            message = json.dumps({"error": {"message": refused}}).encode()
            self._whole(writer, *((400, message) if refused else (script.status, script.error_body)))
            await writer.drain()
            return True
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        if script.role_first:
            served.role_s = await self._send(writer, script, _choice({"role": "assistant", "content": ""}))
        if script.service_s:
            async with self._slots:
                await asyncio.sleep(script.service_s)
        await asyncio.sleep(script.ttft_s)
        n = asked if script.n_tokens is None or served.body.get("ignore_eos") else min(asked, script.n_tokens)
        sent = 0
        for i in range(-(-n // script.tokens_per_chunk)):
            if i == script.cut_after:
                await writer.drain()
                writer.transport.abort()
                return False
            if i == script.garbage_after:
                await self._send(writer, script, "{'not json")
            if i == script.error_after:
                await self._send(writer, script, '{"error":{"message":"the engine died","type":"internal_error"}}')
                break
            ids = list(range(100 + sent, 100 + min(sent + script.tokens_per_chunk, n)))
            sent += len(ids)
            last = ("length" if n == asked else "stop") if sent == n else None
            delta = {"content": "".join(f"w{t} " for t in ids) if script.text else ""}
            chunk = _choice(delta, finish=last, **({"token_ids": ids} if script.token_ids else {}))
            served.token_s.append(await self._send(writer, script, chunk))
            served.token_ids += ids
            if last is None:
                await asyncio.sleep(script.gap_s(i))
        await self._finish(writer, served, script, sent)
        return script.keep_alive

    async def _finish(self, writer: asyncio.StreamWriter, served: Served, script: Script, sent: int) -> None:
        if script.usage:
            usage: dict[str, Any] = {"prompt_tokens": 7, "completion_tokens": sent + script.usage_offset}
            if script.timings is not None and served.body.get("timings"):
                usage["hydrainfer"] = script.timings
            await self._send(writer, script, json.dumps({"choices": [], "usage": usage}))
        if script.done:
            await self._send(writer, script, "[DONE]")
        served.end_s = self._clock()
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def _send(self, writer: asyncio.StreamWriter, script: Script, data: str) -> float:
        newline = "\r\n" if script.crlf else "\n"
        event = f": a comment{newline}data: {data}{newline}{newline}".encode()
        pieces = [event[i : i + 7] for i in range(0, len(event), 7)] if script.fragment else [event]
        at = self._clock()
        for piece in pieces:
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            if script.fragment:
                await asyncio.sleep(0)
        await writer.drain()
        return at


def _choice(delta: dict[str, str], finish: str | None = None, **extra: Any) -> str:
    return json.dumps({"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": finish, **extra}]})


def drawn(service_s: Spread, ttft_s: Spread, itl_s: Spread, seed: int) -> Callable[[int], Script]:
    """Scripts whose times are drawn. Request `i` of the same seed always gets the same script."""

    def script(i: int) -> Script:
        rng = random.Random((seed << 32) + i)
        return Script(service_s=service_s.draw(rng), ttft_s=ttft_s.draw(rng), itl_s=lambda: itl_s.draw(rng))

    return script


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--port", type=int, default=9000)
    for name in ("service", "ttft", "itl"):
        parser.add_argument(f"--{name}-ms", type=Spread.parse, default=Spread(), help="e.g. 20 or lognormal:50:0.5")
    parser.add_argument("--slots", type=int, help="requests in service at once; without it, any number")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    service, ttft, itl = (seconds_of(s) for s in (args.service_ms, args.ttft_ms, args.itl_ms))

    async def serve() -> None:
        async with MockServer(drawn(service, ttft, itl, args.seed), slots=args.slots, port=args.port) as server:
            print(f"ready {server.url}   (Ctrl-C stops)", flush=True)
            await asyncio.Event().wait()

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve())


def seconds_of(s: Spread) -> Spread:
    """A distribution of milliseconds, converted to seconds."""
    b = s.b if s.kind == "lognormal" else s.b / 1e3
    return Spread(s.kind, s.a / 1e3, b, s.least / 1e3, s.most / 1e3)


if __name__ == "__main__":
    main()
