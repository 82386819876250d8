"""The client that sends one chat request and times the tokens of its streamed answer."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

import msgspec
import orjson

from hydrainfer.workload.client.failures import Failure, FailureKind, RequestFailed
from hydrainfer.workload.client.http import HttpPool
from hydrainfer.workload.client.record import RequestRecord
from hydrainfer.workload.client.sse import EventSplitter, Usage, parse_chunk

MAX_ERROR_BYTES = 2000
_SHOWN_CHARS = 300


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """An OpenAI-style server. `base_url` may end with `/v1`. `timeout_s` bounds one whole request."""

    base_url: str
    model: str = ""
    api_key: str | None = None
    timeout_s: float = 600.0


class _Answer:
    """One streamed answer. `feed` is called with each piece of the body as it arrives."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._events = EventSplitter()
        self.raw = b""  # the head of the body, which holds the message of an error status
        self.chunk_s: list[float] = []
        self.chunk_tokens: list[int] = []
        self.token_ids: list[int] | None = None
        self.text: list[str] = []
        self.finish_reason: str | None = None
        self.usage: Usage | None = None
        self.ended = False

    def feed(self, body: bytes) -> None:
        now_s = self._clock()
        if len(self.raw) < MAX_ERROR_BYTES:
            self.raw += body[:MAX_ERROR_BYTES]
        for event in self._events.feed(body):
            if event == b"[DONE]":
                self.ended = True
                continue
            piece = parse_chunk(event)
            if piece.n_tokens:
                self.chunk_s.append(now_s)
                self.chunk_tokens.append(piece.n_tokens)
                self.text.append(piece.text)
            if piece.token_ids:
                self.token_ids = (self.token_ids or []) + list(piece.token_ids)
            self.finish_reason = piece.finish_reason or self.finish_reason
            self.usage = piece.usage or self.usage

    def check(self, status: int) -> None:
        """Raises `RequestFailed` unless this is a whole, successful stream."""
        if status != 200:
            raise RequestFailed(FailureKind.STATUS, f"{status}: {_message(self.raw)}", status)
        if self._events.cut or not self.ended:
            raise RequestFailed(FailureKind.MALFORMED, f"the stream ended without [DONE]: {self.raw[-80:]!r}")


def _message(body: bytes) -> str:
    """The message of an error's body, in one line."""
    try:
        return str(orjson.loads(body)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        text = " ".join(body.decode("utf-8", "replace").split())
        is_page = re.match(r"<(!doctype html|html)\b", text, re.IGNORECASE)
        return "a web page" if is_page else text[:_SHOWN_CHARS]


class ChatClient:
    """A client of one server, for use within one event loop: `async with ChatClient(target, clock)`. `clock` is in
    seconds, of any origin."""

    def __init__(self, target: Endpoint, clock: Callable[[], float]) -> None:
        """Raises `ConfigError` for an invalid address."""
        headers = None
        if target.api_key:
            headers = {"authorization": f"Bearer {target.api_key}"}
        self._http = HttpPool(target.base_url, headers)
        self._target = target
        self._clock = clock

    async def __aenter__(self) -> ChatClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._http.close()

    async def models(self) -> list[str]:
        """The names of the models that the server serves. Raises `RequestFailed`."""
        body = await self._get("/v1/models")
        try:
            return [str(m["id"]) for m in orjson.loads(body)["data"]]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            raise RequestFailed(FailureKind.MALFORMED, f"/v1/models is not a list of models: {body[:80]!r}") from None

    async def healthy(self) -> bool:
        """Whether `/health` answers 200 now; False also if there is no server."""
        try:
            await self._get("/health")
        except RequestFailed:
            return False
        return True

    async def page(self, path: str) -> str:
        """The body of a GET of `path`; empty if the status is not 200."""
        try:
            return (await self._get(path)).decode("utf-8", "replace")
        except RequestFailed:
            return ""

    async def _get(self, path: str) -> bytes:
        body = bytearray()
        try:
            async with asyncio.timeout(min(self._target.timeout_s, 10.0)):
                status = await self._http.send("GET", path, b"", body.extend)
        except TimeoutError:
            raise RequestFailed(FailureKind.TIMEOUT, f"{path}: no answer within 10 s") from None
        if status != 200:
            raise RequestFailed(FailureKind.STATUS, f"{path}: {status}: {_message(bytes(body))}", status)
        return bytes(body)

    async def chat(self, body: bytes, *, index: int, n_asked: int, scheduled_s: float) -> RequestRecord:
        """The record of one chat request. Never raises for what the server or the network does: the record holds the
        failure and all that arrived before it."""
        answer = _Answer(self._clock)
        failure: Failure | None = None
        sent_s = self._clock()
        try:
            async with asyncio.timeout(self._target.timeout_s):
                answer.check(await self._http.send("POST", "/v1/chat/completions", body, answer.feed))
        except RequestFailed as e:
            failure = e.failure
        except TimeoutError:
            failure = Failure(FailureKind.TIMEOUT, f"no end of the answer within {self._target.timeout_s} s")
        return RequestRecord(
            index=index,
            n_asked=n_asked,
            scheduled_s=scheduled_s,
            sent_s=sent_s,
            end_s=self._clock(),
            chunk_s=tuple(answer.chunk_s),
            chunk_tokens=tuple(answer.chunk_tokens),
            token_ids=tuple(answer.token_ids) if answer.token_ids is not None else None,
            text="".join(answer.text),
            finish_reason=answer.finish_reason,
            usage=answer.usage,
            failure=failure,
        )
