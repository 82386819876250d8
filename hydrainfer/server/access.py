"""Around every request: its id in and out, a line in the access log, and which pages of other origins may ask."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hydrainfer.core import ConfigError

access_log = logging.getLogger("hydrainfer.access")
_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_PROBES = ("/health", "/ready", "/metrics")
EXPOSED = ("X-Request-Id", "Retry-After", "retry-after-ms")
"""Headers of an answer that pages of other origins may read."""


class Access:
    """Wraps an application: every answer says the id of its request, the client's `X-Request-Id` or one of ours, and
    every request leaves a line: what, status, seconds to the last byte, ids. No other header, no address, no query and
    no body is written."""

    def __init__(self, app: ASGIApp, clock: Callable[[], float] = time.monotonic) -> None:
        self._app, self._clock = app, clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((v for k, v in scope["headers"] if k == b"x-request-id" and _ID.fullmatch(v)), b"").decode()
        status, ours = 499, ""  # nobody was there to answer

        async def note(message: Message) -> None:
            nonlocal status, ours
            if message["type"] == "http.response.start":
                headers = MutableHeaders(raw=message["headers"])
                status, ours = message["status"], headers.get("X-Request-Id") or f"req-{secrets.token_hex(16)}"
                headers["X-Request-Id"] = given or ours
            await send(message)

        begin_s = self._clock()
        try:
            await self._app(scope, receive, note)
        finally:
            self._write(scope, status, self._clock() - begin_s, given, ours)

    def _write(self, scope: Scope, status: int, took_s: float, given: str, ours: str) -> None:
        level = logging.DEBUG if scope["path"] in _PROBES and status < 400 else logging.INFO
        if not access_log.isEnabledFor(level):
            return
        path = scope.get("raw_path", b"")[:200].decode("latin-1")  # as sent: without control characters
        error = scope.get("state", {}).get("error")
        words = [f"id={given or ours}"]
        if given and ours:
            words.append(f"run={ours}")
        if error:
            words.append(f"error={error}")
        access_log.log(level, "%s %s %d %.3fs %s", scope["method"], path, status, took_s, " ".join(words))


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
