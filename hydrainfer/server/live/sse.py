"""Streaming responses (server-sent events), which end at once when the client hangs up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hydrainfer.core import HydraError
from hydrainfer.server.http import as_hydra_error, disconnected, error_body

DONE = b"data: [DONE]\n\n"


def event(body: bytes, name: str = "") -> bytes:
    """One server-sent event; `name`: its event type, if it has one."""
    return (b"event: " + name.encode() + b"\n" if name else b"") + b"data: " + body + b"\n\n"


def error_event(error: HydraError) -> bytes:
    """An error in OpenAI's format, and the end of the stream."""
    return event(error_body(error)) + DONE


class EventStream(Response):
    """A response that sends what `events` yields. If `events` raises, the bytes of `on_error` are sent. `close` is
    called in every case, also if `events` was never started."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        close: Callable[[], None],
        headers: dict[str, str] | None = None,
        media_type: str = "text/event-stream",
        on_error: Callable[[HydraError], bytes] = error_event,
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})}
        super().__init__(None, 200, headers, media_type)
        del self.headers["content-length"]
        self._on_error = on_error
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.ensure_future(self._pump(scope, send))
        watcher = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait((pump, watcher), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._close()
            watcher.cancel()
            pump.cancel()
            await asyncio.gather(pump, watcher, return_exceptions=True)

    async def _pump(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events):
            try:
                async for body in self._events:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            except OSError:  # the connection broke while sending
                return
            except Exception as e:
                error = as_hydra_error(e)
                scope.setdefault("state", {})["error"] = error.type  # for the access log: the status has been sent
                await send({"type": "http.response.body", "body": self._on_error(error), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
