"""An OpenAI-style server without a model: it streams tokens at set times and misbehaves on demand."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Script:
    """What one answer does. `*_after` count token chunks. `itl_s` may be a list: one gap after each chunk."""

    ttft_s: float = 0.0
    itl_s: float | tuple[float, ...] = 0.0
    tokens_per_chunk: int = 1
    role_first: bool = True
    text: bool = True
    token_ids: bool = True
    usage: bool = True
    usage_offset: int = 0
    done: bool = True
    status: int = 200
    error_body: bytes = b'{"error":{"message":"too many requests","type":"rate_limit_error"}}'
    cut_after: int | None = None
    garbage_after: int | None = None
    error_after: int | None = None
    fragment: bool = False
    crlf: bool = False
    keep_alive: bool = True

    def gap_s(self, i: int) -> float:
        return self.itl_s[i] if isinstance(self.itl_s, tuple) else self.itl_s


@dataclass
class Served:
    """What the server itself saw and did: its clock is the client's, since they share a host."""

    body: dict
    received_s: float
    role_s: float = 0.0
    token_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    token_ids: list[int] = field(default_factory=list)


class MockServer:
    """`async with MockServer(script) as server: server.url`. `script` may be a function of the request's rank."""

    def __init__(self, script: Script | Callable[[int], Script], seed: int = 0) -> None:
        self._script = script if callable(script) else lambda _: script
        self.served: list[Served] = []
        self.n_connections = 0
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> MockServer:
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", 0, limit=2**24)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()
        await self._server.wait_closed()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.n_connections += 1
        self._writers.add(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    int(line.split(b":")[1])
                    for line in head.split(b"\r\n")
                    if line.lower().startswith(b"content-length")
                )
                body = json.loads(await reader.readexactly(length))
                served = Served(body, time.perf_counter())
                self.served.append(served)
                if not await self._answer(writer, served, self._script(len(self.served) - 1)):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, served: Served, script: Script) -> bool:
        """False: the connection is over."""
        if script.status != 200:
            head = f"HTTP/1.1 {script.status} Oops\r\ncontent-type: application/json\r\n"
            writer.write(f"{head}content-length: {len(script.error_body)}\r\n\r\n".encode() + script.error_body)
            await writer.drain()
            return True
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        if script.role_first:
            served.role_s = await self._send(writer, script, _choice({"role": "assistant", "content": ""}))
        await asyncio.sleep(script.ttft_s)
        n = served.body.get("max_completion_tokens") or served.body.get("max_tokens") or 16
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
            last = "length" if sent == n else None
            delta = {"content": "".join(f"w{t} " for t in ids) if script.text else ""}
            chunk = _choice(delta, finish=last, **({"token_ids": ids} if script.token_ids else {}))
            served.token_s.append(await self._send(writer, script, chunk))
            served.token_ids += ids
            if last is None:
                await asyncio.sleep(script.gap_s(i))
        if script.usage:
            usage = {"prompt_tokens": 7, "completion_tokens": sent + script.usage_offset}
            await self._send(writer, script, json.dumps({"choices": [], "usage": usage}))
        if script.done:
            await self._send(writer, script, "[DONE]")
        served.end_s = time.perf_counter()
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return script.keep_alive

    @staticmethod
    async def _send(writer: asyncio.StreamWriter, script: Script, data: str) -> float:
        newline = "\r\n" if script.crlf else "\n"
        event = f": a comment{newline}data: {data}{newline}{newline}".encode()
        pieces = [event[i : i + 7] for i in range(0, len(event), 7)] if script.fragment else [event]
        at = time.perf_counter()
        for piece in pieces:
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            if script.fragment:
                await asyncio.sleep(0)
        await writer.drain()
        return at


def _choice(delta: dict, finish: str | None = None, **extra) -> str:
    return json.dumps({"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": finish, **extra}]})
