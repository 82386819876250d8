"""A client's connection: uvicorn's, but what cannot be let in is refused before anything is made for it.

Under overload most of what comes is refused, and every microsecond of that is taken from those who are served: the
application with its task and its wrappers would cost ten times as much as the answer itself.

While only those who return are let in, a request is held until its body tells whether it does:

    headers ── check ──> the application
                 │ └───> held ── its body, or `_BODY_S` ── check ──> the application
                 │ refused                                   │ refused
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from hydrainfer.core import HydraError, Overloaded
from hydrainfer.server.access import id_in, new_id, write_line
from hydrainfer.server.errors import JSON, error_body
from hydrainfer.server.gate import WORK, Door
from hydrainfer.server.returns import Mark

_WORK = frozenset(path.encode() for path in WORK)
_SLOWLY = (b"origin", b"expect")  # headers of requests whose refusal needs more than this
_BODY_S = 0.02  # how long one that may return is held for its body


class Connection(HttpToolsProtocol):
    """It does not ask the kernel for the addresses of both ends, which nobody here wants: each question lets go of the
    interpreter's lock, and a thousand connections that come at once would wait for it so often."""

    def __init__(self, door: Door, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._door = door
        self._mark: Mark | None = None  # of the present request, if it asks for work
        self._retry_after_s: float | None = None  # what it was told, if it was refused
        self._held: list[bytes] | None = None  # its body so far, while it is held
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.connections.add(self)
        self.transport, self.flow = transport, FlowControl(transport)
        self.scheme = "https" if self.config.is_ssl else "http"

    def connection_lost(self, exc: Exception | None) -> None:
        self._held = None
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._mark = self._retry_after_s = None

    def on_headers_complete(self) -> None:
        if self.url in _WORK and self.parser.get_method() == b"POST":
            self._mark = self.scope["state"]["mark"] = Mark(self.url, self.headers)
            if self._may_answer():
                self._check(whole=False)
                return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self._mark is not None:
            self._mark.add(body)
        if self._held is None:
            super().on_body(body)
            return
        self._held.append(body)
        if self._mark is not None and self._mark.done:
            self._decide()

    def on_message_complete(self) -> None:
        self._decide()
        if self._retry_after_s is not None and self._mark is not None:
            self._door.admission.expect(self._mark, self._retry_after_s)
        super().on_message_complete()

    def _may_answer(self) -> bool:
        """Whether an answer from here is complete: no other is under way, no page of another origin asks."""
        idle = self.cycle is None or self.cycle.response_complete
        return idle and not any(name in _SLOWLY for name, _ in self.headers)

    def _check(self, *, whole: bool) -> None:
        """Let it in, refuse it or, unless `whole`, hold it. `whole`: its mark is all that will be known."""
        assert self._mark is not None
        try:
            if not self._door.check(self.headers, self._mark, whole=whole):
                self._held = []
                self._timer = self.loop.call_later(_BODY_S, self._decide)
                return
        except HydraError as e:
            self._refuse(e)
            return
        super().on_headers_complete()

    def _decide(self) -> None:
        """End the holding, if it is held."""
        if self._held is None:
            return
        held, self._held = self._held, None
        if self._timer is not None:
            self._timer.cancel()
        self._check(whole=True)
        for body in held:
            super().on_body(body)

    def _refuse(self, error: HydraError) -> None:
        """Answer at once; the body, if any comes, is not kept."""
        self._retry_after_s = error.retry_after_s if isinstance(error, Overloaded) else None
        headers, given = self._door.headers_of(error), id_in(self.headers)
        path = self.url.decode()
        body = error_body(error, path)
        request_id = given or new_id()
        if self.parser.get_http_version() == "1.0" or not self.parser.should_keep_alive():
            headers["connection"] = "close"
        headers |= {"content-length": str(len(body)), "content-type": JSON, "x-request-id": request_id}
        head = "".join([f"{name}: {value}\r\n" for name, value in headers.items()]).encode()
        ours = b"".join([b"%s: %s\r\n" % header for header in self.server_state.default_headers])
        self.cycle = _ANSWERED
        self.transport.write(b"%s%s%s\r\n%s" % (STATUS_LINE[error.status], head, ours, body))
        self._door.counts.add(path, "POST", error.status)
        write_line("POST", self.url, error.status, 0.0, given, "" if given else request_id)
        if "connection" in headers:
            self.transport.close()
        self.on_response_complete()


class _Answered:
    """The cycle of a request that has been answered."""

    response_complete = True
    keep_alive = True
    disconnected = False
    message_event = asyncio.Event()


_ANSWERED: Any = _Answered()
