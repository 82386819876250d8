"""A client's connection: uvicorn's protocol class, which also refuses requests before the application is called.

A request that arrives in one piece, with a head that was refused before, is refused even before it is parsed. Under
overload most requests are refused, and the time for that is taken from those that are served: the application, with its
task and middlewares, would cost ten times as much as the answer itself.

While only returning requests are let in, a request is held until its body shows whether it is one:

    headers ── check ──> the application
                 │ └───> held ── its body, or `_BODY_S` ── check ──> the application
                 │ refused                                   │ refused

A head may take `_HEAD_S` and have `_MOST_HEAD_BYTES`. Between requests, uvicorn's keep-alive timer closes an idle
connection.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import httptools
from starlette.types import Scope
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.protocols.utils import get_remote_addr

from hydrainfer.core import HydraError, InvalidRequest, Overloaded
from hydrainfer.server.door.gate import Asked, Door, Head
from hydrainfer.server.door.returns import Mark
from hydrainfer.server.door.standing import Standing
from hydrainfer.server.door.tenants import TenantLimit
from hydrainfer.server.http import ID_HEADERS, JSON, id_in, new_id

_SLOWLY = (b"origin", b"expect")  # requests with these headers are left to the application
_BODY_S = 0.02  # how long a request that may be a returning one is held for its body
_HEAD_BYTES = 2048  # longer heads are not remembered
_END = b"\r\n\r\n"
_MOST_HEAD_BYTES = 64 << 10
_HEAD_S = 30.0  # the time for a head, from the connection's begin or the head's first byte


class HeadTooLarge(InvalidRequest):
    """431: the head is over the limit."""

    status = 431


class HeadStalled(InvalidRequest):
    """408: the head has not arrived in time."""

    status = 408


class Connection(HttpToolsProtocol):
    """A uvicorn connection that itself refuses requests that the door does not let in. It does not look up the
    addresses of the two ends, which are not used here: each system call releases the GIL, and a thousand connections
    that arrive at once would have to wait for it each time."""

    def __init__(self, door: Door, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._door = door
        self._mark: Mark | None = None  # the mark of the present request, if it asks for work
        self._retry_after_s: float | None = None  # its Retry-After, if it was refused
        self._held: list[bytes] | None = None  # its body so far, while it is held
        self._timer: asyncio.TimerHandle | None = None
        self._head = b""  # the head of the present request, if it may be remembered
        self._between = True  # between two requests, so that the next data begins with a head
        self._let_in = False  # the present request was let in, and its mark made, before it was parsed
        self._refused_s = 0.0  # when the last request was refused without being parsed
        self._in_head = True  # no head is complete since the last request
        self._n_bare = 0  # bytes since the last head, piece of a body or request: of an incomplete head or chunk
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.connections.add(self)
        self.transport, self.flow = transport, FlowControl(transport)
        self.client = get_remote_addr(transport)
        self.scheme = "https" if self.config.is_ssl else "http"
        self._head_timer = self.loop.call_later(_HEAD_S, self._on_late)
        self._door.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._held = None
        self._door.connections.remove(self)
        self._stop_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not (self._between and self._refuses(data)):
            self._n_bare += len(data)
            self._parse(data)
        if not self._n_bare:
            self._stop_head_timer()
        elif self._n_bare > _MOST_HEAD_BYTES:
            self._cut_off(_too_large())
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(_HEAD_S, self._on_late)

    def _parse(self, data: bytes) -> None:
        """Feed the parser. An `Upgrade` header is ignored, as RFC 9110 (7.8) allows: no other protocol is spoken here,
        and clients that offer HTTP/2 or WebSocket so go on in HTTP/1.1. The parser, which would take the body for
        another protocol, is therefore given such a head a second time, without the header."""
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as e:
            if self.parser.get_method() == b"CONNECT":
                self.send_400_response("this server is no proxy")
                return
            lines = [b"%s: %s\r\n" % header for header in self.headers if header[0] != b"upgrade"]
            start = b"%s %s HTTP/%s\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
            self.parser = httptools.HttpRequestParser(self)
            self._parse(b"%s%s\r\n%s" % (start, b"".join(lines), data[e.args[0] :]))
        except httptools.HttpParserError:
            message = "Invalid HTTP request received."
            self.logger.warning(message)
            self.send_400_response(message)

    def _should_upgrade(self) -> bool:
        return False

    @property
    def between_requests(self) -> bool:
        return self._in_head and self._idle()

    def close(self) -> None:
        self.transport.close()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_late(self) -> None:
        """Close the connection, whose head is late, unless an answer is under way."""
        if not self._idle():
            self._head_timer = self.loop.call_later(_HEAD_S, self._on_late)
        elif self._n_bare:
            self._cut_off(HeadStalled(f"the request's head did not come within {_HEAD_S:g} s", code="head_timeout"))
        else:
            self.transport.close()

    def _cut_off(self, error: HydraError) -> None:
        """Close the connection, if possible with an answer to the incomplete head."""
        if self._in_head and self._idle() and not self.transport.is_closing():
            self._send(error, "", new_id(), goes_on=False)
            self._door.counts.add("none", "", error.status)
        self.transport.close()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection. Requests that are refused unparsed do not stop the timer, so it is extended."""
        left_s = self._refused_s + self.timeout_keep_alive - self.loop.time()
        if left_s > 0.0:
            self.timeout_keep_alive_task = self.loop.call_later(left_s, self.timeout_keep_alive_handler)
        else:
            super().timeout_keep_alive_handler()

    def _refuses(self, data: bytes) -> bool:
        """Refuse a whole request with a head that was refused before. False: the data goes to the parser."""
        end = data.find(_END, 0, _HEAD_BYTES) + len(_END)
        if end < len(_END) or not data.startswith(b"POST ") or not self._idle():
            return False
        head = self._door.heads.get(data[:end])
        if head is None or len(data) - end != head.asked.n_bytes:
            self._head = data[:end]
            return False
        self._mark = head.mark.whole(data[end:])
        try:
            self._door.check(head.asked, self._mark, whole=True)
        except HydraError as e:
            if isinstance(e, Overloaded):
                self._door.overload.expect(self._mark, e.retry_after_s)
            self._answer(e, head.path, head.id)
            self._go_on()
            return True
        self._let_in = True
        return False

    def _go_on(self) -> None:
        """Do what is needed of `on_response_complete` for a request that was not parsed."""
        self.server_state.total_requests += 1
        self._refused_s = self.loop.time()
        self._await_next()

    def _await_next(self) -> None:
        """Start the keep-alive timer: the connection is closed unless another request comes soon."""
        if self.timeout_keep_alive_task is None and not self.transport.is_closing():
            wait_s = self.timeout_keep_alive
            self.timeout_keep_alive_task = self.loop.call_later(wait_s, self.timeout_keep_alive_handler)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._unset_keepalive_if_required()  # the previous request may have been refused in the same data
        self._between, self._retry_after_s = False, None
        self._n_bare = self._n_bare or 1  # after another request in the same data, the number is not known
        if not self._let_in:
            self._mark = None

    def on_headers_complete(self) -> None:
        if self._n_bare > _MOST_HEAD_BYTES and self._idle() and self._head_bytes() > _MOST_HEAD_BYTES:
            self.cycle = _ANSWERED
            self._cut_off(_too_large())
            return
        if self.parser.should_upgrade():  # the head comes again
            return
        self._n_bare, self._in_head = 0, False
        if self.url in self._door.posts and self.parser.get_method() == b"POST":
            known, self._let_in = self._let_in, False
            if not known:
                self._mark = Mark(self.url, self.headers)
            Standing.of(cast(Scope, self.scope)).mark = self._mark
            if not known and self._may_answer():
                self._check(whole=False)
                return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._n_bare = 0
        if self._mark is not None:
            self._mark.add(body)
        if self._held is None:
            super().on_body(body)
            return
        self._held.append(body)
        if self._mark is not None and self._mark.done:
            self._decide()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._decide()
        if self._retry_after_s is not None and self._mark is not None:
            self._door.overload.expect(self._mark, self._retry_after_s)
        self._between, self._head = True, b""
        self._n_bare, self._in_head = 0, True
        super().on_message_complete()
        if self.cycle is _ANSWERED:  # its body was complete only after the answer
            self._await_next()

    def _head_bytes(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + len(b": \r\n") for name, value in self.headers)

    def _may_answer(self) -> bool:
        """Whether the request may be answered here: no other answer is under way, and no header needs the
        application, as CORS does."""
        return self._idle() and not any(name in _SLOWLY for name, _ in self.headers)

    def _idle(self) -> bool:
        """Whether no answer is under way and the client reads the earlier ones. Otherwise the application waits."""
        return not self.flow.write_paused and (self.cycle is None or self.cycle.response_complete)

    def _check(self, *, whole: bool) -> None:
        """Let the present request in, refuse it or, unless `whole`, hold it. `whole`: its mark will not become more
        precise."""
        assert self._mark is not None
        try:
            if not self._door.check(Asked.read(self.headers), self._mark, whole=whole):
                self._held = []
                self._timer = self.loop.call_later(_BODY_S, self._decide)
                return
        except HydraError as e:
            self._refuse(e)
            return
        super().on_headers_complete()

    def _decide(self) -> None:
        """Decide about the present request, if it is held."""
        if self._held is None:
            return
        held, self._held = self._held, None
        if self._timer is not None:
            self._timer.cancel()
        self._check(whole=True)
        for body in held:
            super().on_body(body)

    def _refuse(self, error: HydraError) -> None:
        """Answer with `error` at once. A body that still comes is not kept."""
        given, goes_on = id_in(self.headers), self._goes_on()
        if isinstance(error, Overloaded):
            self._retry_after_s = error.retry_after_s
            if self._head and goes_on and (asked := Asked.read(self.headers)).n_bytes is not None:
                self._door.remember(self._head, Head(asked, Mark(self.url, self.headers), self.url, given))
        self.cycle = _ANSWERED
        self._answer(error, self.url, given, goes_on=goes_on)
        self.on_response_complete()

    def _goes_on(self) -> bool:
        """Whether another request may follow on this connection."""
        return self.parser.get_http_version() == "1.1" and self.parser.should_keep_alive()

    def _answer(self, error: HydraError, path: bytes, given: str, *, goes_on: bool = True) -> None:
        where, ours = path.decode(), "" if given else new_id()
        self._send(error, where, given or ours, goes_on=goes_on)
        self._door.counts.add(where, "POST", error.status)
        tenant = error.tenant if isinstance(error, TenantLimit) else ""
        self._door.lines.write(path, error.status, given, ours, self.client, tenant)

    def _send(self, error: HydraError, where: str, id: str, *, goes_on: bool) -> None:
        """Send the response to `error`, and close the connection if nothing may follow. `where`: the path."""
        headers, body = self._door.headers_of(error), self._door.protocols.error_body(error, where)
        if not goes_on:
            headers["connection"] = "close"
        headers |= {"content-length": str(len(body)), "content-type": JSON} | dict.fromkeys(ID_HEADERS, id)
        head = "".join([f"{name}: {value}\r\n" for name, value in headers.items()]).encode()
        always = b"".join([b"%s: %s\r\n" % header for header in self.server_state.default_headers])
        self.transport.write(b"%s%s%s\r\n%s" % (STATUS_LINE[error.status], head, always, body))
        if "connection" in headers:
            self.transport.close()


def _too_large() -> HeadTooLarge:
    return HeadTooLarge(f"the request's head is over the limit of {_MOST_HEAD_BYTES} bytes", code="head_too_large")


class _Answered:
    """Stands for uvicorn's request cycle of a request that has been answered here."""

    response_complete = True
    keep_alive = True
    disconnected = False
    message_event = asyncio.Event()


_ANSWERED: Any = _Answered()
