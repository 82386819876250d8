"""The gate: a request gets a place or is refused by its headers alone, before anything else is done for it."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Iterable
from typing import NamedTuple

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hydrainfer.core import HydraError, Overloaded
from hydrainfer.metrics import HttpCounts
from hydrainfer.server.door.crowd import Crowd
from hydrainfer.server.door.open_connections import OpenConnections
from hydrainfer.server.door.overload import OverloadControl, Place, Urgency
from hydrainfer.server.door.returns import Mark
from hydrainfer.server.door.standing import Standing
from hydrainfer.server.door.tenants import Tenant, TenantRequest, Tenants
from hydrainfer.server.http import JSON, Protocols, RefusalLines, error_headers, route_path

Headers = Iterable[tuple[bytes, bytes]]
"""ASGI headers: names in lower case, and values."""
_PER_TURN = 4  # requests that go on per turn of the event loop
_MOST_HEADS = 1024


class Asked(NamedTuple):
    """The headers of a request that overload control reads. `n_bytes`: the length of the body, if known; `returning`:
    the client says that it is a retry."""

    authorization: str
    n_bytes: int | None
    returning: bool
    urgency: Urgency

    @classmethod
    def read(cls, headers: Headers) -> Asked:
        """The values of these headers. Raises `InvalidRequest`."""
        n_bytes: int | None = None
        returning = False
        authorization = ""
        priority: float | None = None
        within_s: float | None = None
        for name, value in headers:
            if name == b"content-length" and value.isdigit():
                n_bytes = int(value)
            elif name == b"x-stainless-retry-count":  # the `openai` client's
                returning = value != b"0"
            elif name == b"authorization":
                authorization = value.decode("latin-1")
            elif name == b"x-api-key":  # the `anthropic` client's
                authorization = authorization or "Bearer " + value.decode("latin-1")
            elif name == b"x-priority":
                priority = _number(value)
            elif name == b"x-deadline-s":
                within_s = _number(value)
        return cls(authorization, n_bytes, returning, Urgency.read(priority, within_s))


class Head(NamedTuple):
    """The parsed head of a request that was refused. `mark`: the mark of its path and headers, without the body. `id`:
    the client's id for the request, or ""."""

    asked: Asked
    mark: Mark
    path: bytes
    id: str


class Door:
    """The decision, by the headers alone, whether a request is let in: its key must be valid, its tenant within its
    limits, and there must be room for the work. `posts`: the paths that ask for completions, as bytes. `heads`: the
    heads of refused requests, by their bytes, so that an equal head is not parsed again. `counts`: the number of all
    answers, including refusals."""

    def __init__(
        self,
        overload: OverloadControl,
        tenants: Tenants,
        protocols: Protocols,
        max_connections: int = sys.maxsize,
        counts: HttpCounts | None = None,
    ) -> None:
        self.overload = overload
        self.tenants = tenants
        self.protocols = protocols
        self.posts = frozenset(path.encode() for path in protocols.work)
        self.connections = OpenConnections(max_connections)
        self.counts = counts or HttpCounts()
        self.lines = RefusalLines()
        self.heads: dict[bytes, Head] = {}

    def remember(self, head: bytes, meaning: Head) -> None:
        """Remember a head. All heads are forgotten once there are too many."""
        if len(self.heads) >= _MOST_HEADS:
            self.heads.clear()
        self.heads[head] = meaning

    def check(self, asked: Asked, mark: Mark, *, whole: bool) -> bool:
        """Whether a request may come in now. False: only if it is a returning one, which its mark shows once the mark
        is `whole`. Raises `HydraError` if it may not come in."""
        _, urgency = self._who(asked)
        returning = asked.returning or (whole and self.overload.comes(mark))
        if not whole and not returning and self.overload.has_only_reserve(asked.n_bytes, urgency):
            return False
        self.overload.check_entry(asked.n_bytes, returning=returning, urgency=urgency)
        return True

    def enter(self, asked: Asked, standing: Standing) -> Place:
        """Let a request in, which then has a tenant and a place. The caller gives the place back. Raises as `check`."""
        tenant, urgency = self._who(asked)
        mark = standing.mark
        returning = asked.returning or (mark is not None and mark.returns)
        place = self.overload.enter(asked.n_bytes, returning=returning, urgency=urgency)
        place.mark = mark
        request = self.tenants.begin(tenant)
        place.on_claim, place.on_tokens, place.on_leave = request.claim, request.charge, request.end
        standing.tenant = tenant
        standing.place = place
        return place

    def begin(self, asked: Asked) -> TenantRequest:
        """Let in a request that needs no place. The caller calls its `end`. Raises `HydraError` if the request may not
        come in."""
        tenant, _ = self._who(asked)
        return self.tenants.begin(tenant)

    def _who(self, asked: Asked) -> tuple[Tenant, Urgency]:
        """The tenant, and the urgency of its request. Raises `HydraError` if the key, a limit or the priority does not
        allow the request."""
        tenant = self.tenants.find(asked.authorization)
        self.tenants.check(tenant)
        self.tenants.check_priority(tenant, asked.urgency.priority)
        return tenant, Urgency(asked.urgency.priority, asked.urgency.within_s, tenant.share)

    def headers_of(self, error: HydraError) -> dict[str, str]:
        """The headers of the answer to an error that `check` or `enter` raised."""
        headers = error_headers(error)
        if self.overload.closed:
            headers["connection"] = "close"  # so that the next request goes to another server
        return headers


class Gate:
    """Middleware: a request for completions gets a place or is refused, before its body is read. `Connection` has
    refused most of them already. Of the requests with a place, a few go on per turn of the event loop, first come,
    first served, so that a thousand arriving at once do not block shorter ones. While others wait to be prepared, a
    request waits here."""

    def __init__(self, app: ASGIApp, door: Door, timeout_s: float, max_body_bytes: int) -> None:
        self._app = app
        self._door = door
        self._crowd = Crowd(door.overload, timeout_s, max_body_bytes)
        self._turns = asyncio.Semaphore(_PER_TURN)  # a waiting task is woken in the loop's next turn

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = route_path(scope) if scope["type"] == "http" and scope["method"] == "POST" else ""
        if path in self._door.protocols.brief:
            await self._briefly(path, scope, receive, send)
            return
        if path not in self._door.protocols.work:
            await self._app(scope, receive, send)
            return
        standing = Standing.of(scope)
        standing.path = path
        try:
            asked = Asked.read(scope["headers"])
            place = self._door.enter(asked, standing)
        except HydraError as e:
            if standing.mark is not None and isinstance(e, Overloaded):
                self._door.overload.expect(standing.mark, e.retry_after_s)
            response = Response(self._door.protocols.error_body(e, path), e.status, self._door.headers_of(e), JSON)
            await response(scope, receive, send)
            return
        try:
            async with self._turns:
                pass
            if self._door.overload.crowded(asked.n_bytes):
                receive = await self._crowd.wait(place, asked.n_bytes, receive)
            place.stop_waiting()  # until it is claimed: a body that is slow to arrive must not delay others
            await self._app(scope, receive, send)
        except ClientDisconnect:  # the client hung up while it waited
            pass
        finally:
            if not place.claimed:
                place.leave()

    async def _briefly(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        standing = Standing.of(scope)
        standing.path = path
        try:
            asked = self._door.begin(Asked.read(scope["headers"]))
        except HydraError as e:
            await self._door.protocols.error_response(e, path)(scope, receive, send)
            return
        standing.tenant = asked.tenant

        async def note(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] < 400:
                asked.begin_work()
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            asked.end()


def _number(value: bytes) -> float:
    """The value of a header as a number; NaN, which every check refuses, if it is not one."""
    try:
        return float(value)
    except ValueError:
        return math.nan


def authorization_of(request: Request) -> str:
    """The Authorization header. An `x-api-key` header, which Anthropic's clients send, is turned into one."""
    key = request.headers.get("x-api-key")
    return request.headers.get("authorization") or (f"Bearer {key}" if key else "")
