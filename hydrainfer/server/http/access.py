"""Request ids, the access log, and the list of allowed origins."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from random import getrandbits
from typing import Any, TextIO
from urllib.parse import quote, urlsplit

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hydrainfer.core import ConfigError
from hydrainfer.metrics import HttpCounts

access_log = logging.getLogger("hydrainfer.access")
_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_PROBES = (b"/health", b"/ready", b"/ping", b"/load", b"/metrics", b"/v1/overview")
"""Paths that are polled, and logged at DEBUG unless they fail."""
_CUT_OFF = "disconnected"  # of an answer whose connection ended before its last byte
_EACH = 20  # refusals per second that get a line of their own
ID_HEADERS = ("x-request-id", "request-id")
"""The headers of a response that have its id: OpenAI's clients read the first, Anthropic's the second."""
EXPOSED = ("X-Request-Id", "request-id", "Retry-After", "retry-after-ms")
"""Response headers that pages of other origins may read (CORS)."""


class Access:
    """Middleware for request ids and the access log. Every response has an id, the client's or one of ours. Every
    request is counted and logged in one line: method, path without `root_path`, status, seconds to the last byte,
    ids, address and tenant. Other headers, queries and bodies are not logged."""

    def __init__(
        self,
        app: ASGIApp,
        counts: HttpCounts,
        handler_of: Callable[[Scope], str],
        tenant_of: Callable[[Scope], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`handler_of`: the path under which a request is counted; `tenant_of`: the name of its tenant, or ""."""
        self._app = app
        self._counts = counts
        self._handler_of, self._tenant_of = handler_of, tenant_of
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = id_in(scope["headers"])
        status, ours = 499, ""  # if no response is sent: the client has disconnected
        error = ""

        async def note(message: Message) -> None:
            nonlocal status, ours, error
            if message["type"] == "http.response.start":
                headers = MutableHeaders(raw=message["headers"])
                status, ours = message["status"], headers.get("X-Request-Id") or new_id()
                for name in ID_HEADERS:
                    headers[name] = given or ours
                error = _CUT_OFF
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                error = ""

        begin_s = self._clock()
        try:
            await self._app(scope, receive, note)
        finally:
            took_s = self._clock() - begin_s
            self._counts.add(self._handler_of(scope), scope["method"], status, took_s)
            path, prefix = scope.get("raw_path", b""), scope.get("root_path", "").encode()
            path = path[len(prefix) :] if path.startswith(prefix + b"/") else path
            error = scope.get("state", {}).get("error", error)
            who = scope.get("client"), self._tenant_of(scope)
            write_line(scope["method"], path, status, took_s, given, ours, error, *who)


def id_in(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The client's id for its request, or "" if there is none that may be logged. `headers`: names in lower case."""
    return next((v for k, v in headers if k == b"x-request-id" and _ID.fullmatch(v)), b"").decode()


def new_id() -> str:
    return f"req-{getrandbits(128):032x}"


def write_line(
    method: str,
    path: bytes,
    status: int,
    took_s: float,
    given: str = "",
    ours: str = "",
    error: str = "",
    client: Sequence[Any] | None = None,
    tenant: str = "",
) -> None:
    """Write the line of a request to the access log. `path`: as sent, so without control characters; `given`, `ours`:
    the client's id and ours, at least one of which is not empty; `client`: its address and port."""
    words = [f"id={given or ours}"]
    if given and ours:
        words.append(f"run={ours}")
    if client:
        words.append(f"client={client[0]}")
    if tenant:
        words.append(f"tenant={quote(tenant)}")
    if error:
        words.append(f"error={error}")
    _write(method, path, status, took_s, " ".join(words))


def _write(method: str, path: bytes, status: int, took_s: float, words: str) -> None:
    level = logging.DEBUG if path in _PROBES and status < 400 else logging.INFO
    if access_log.isEnabledFor(level):
        access_log.log(level, "%s %s %d %.3fs %s", method, path[:200].decode("latin-1"), status, took_s, words)


class RefusalLines:
    """The access log lines of refused requests. The first `_EACH` of a second get a line each. The others are counted,
    and at the end of the second one line per path, status and tenant has their number (`n=`): in a flood, lines would
    cost more than the refusals. Used on one event loop."""

    def __init__(self) -> None:
        self._n = 0  # refusals in this second
        self._others: Counter[tuple[bytes, int, str]] = Counter()

    def write(
        self, path: bytes, status: int, given: str, ours: str, client: Sequence[Any] | None, tenant: str = ""
    ) -> None:
        """Note a request that was refused at once. Arguments as in `write_line`."""
        if not self._n:
            asyncio.get_running_loop().call_later(1.0, self._end)
        self._n += 1
        if self._n <= _EACH:
            write_line("POST", path, status, 0.0, given, ours, client=client, tenant=tenant)
        else:
            self._others[path, status, tenant] += 1

    def _end(self) -> None:
        others, self._others, self._n = self._others, Counter(), 0
        for (path, status, tenant), n in others.items():
            words = f"n={n}"
            if tenant:
                words += f" tenant={quote(tenant)}"
            _write("POST", path, status, 0.0, words)


class AccessLines(logging.Handler):
    """Writes the lines of a log to `stream` in batches, one per `every_s` seconds. One write per line would cost more
    than a refusal, and would release the GIL each time. The rest is written at exit."""

    def __init__(
        self, stream: TextIO, every_s: float = 0.1, line: Callable[[logging.LogRecord], str] | None = None
    ) -> None:
        """`line` formats a record as one line, without the newline; default: its time and its message."""
        super().__init__()
        self._line = line or self._text
        self._stream, self._every_s = stream, every_s
        self._lines: list[str] = []
        self._second, self._stamp = -1, ""
        self._some = threading.Event()
        threading.Thread(target=self._run, name="access-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Called with the handler's lock held."""
        self._lines.append(self._line(record) + "\n")
        if not self._some.is_set():
            self._some.set()

    def _text(self, record: logging.LogRecord) -> str:
        second = int(record.created)
        if second != self._second:
            self._second, self._stamp = second, time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second))
        return f"{self._stamp},{int(record.msecs):03d} {record.getMessage()}"

    def flush(self) -> None:
        with self.lock or nullcontext():
            lines, self._lines = self._lines, []
        if lines:
            with suppress(OSError, ValueError):  # the stream has been closed
                self._stream.write("".join(lines))
                self._stream.flush()

    def _run(self) -> None:
        while self._some.wait():
            time.sleep(self._every_s)
            self._some.clear()
            self.flush()


def read_origins(text: str | None) -> tuple[str, ...]:
    """The origins in a list like `https://chat.example.com,http://localhost:3000`, or `*`. Raises `ConfigError`."""
    origins = tuple(o.strip() for o in text.split(",")) if text else ()
    for origin in origins:
        parts = urlsplit(origin)
        if origin != "*" and not (parts.scheme and parts.netloc and origin == f"{parts.scheme}://{parts.netloc}"):
            raise ConfigError(
                f"allowed_origins: {origin!r} is no origin; write them like https://chat.example.com, or *",
                param="allowed_origins",
            )
    return origins
