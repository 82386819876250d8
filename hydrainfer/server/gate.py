"""The first thing a request meets: whether there is a place for it, from its headers alone."""

from __future__ import annotations

import asyncio
import math
from functools import partial

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from hydrainfer.core import HydraError
from hydrainfer.server.admission import Admission, Place, Urgency
from hydrainfer.server.errors import error_response
from hydrainfer.server.paths import route_path
from hydrainfer.server.tenants import Tenant, Tenants

_WORK = frozenset(
    (
        *("/v1/chat/completions", "/v1/completions", "/v1/responses"),  # OpenAI's
        "/v1/messages",  # Anthropic's
        *("/api/chat", "/api/generate"),  # Ollama's
    )
)
_PER_TURN = 4  # of the event loop


class Gate:
    """Wraps an application: what asks for completions gets a place or is refused, before its body is read. Of those
    that get one, a few go on per turn of the event loop, first come, first served: the others of a thousand that come
    at once leave the loop time for those who want no more than a word."""

    def __init__(self, app: ASGIApp, admission: Admission, tenants: Tenants) -> None:
        self._app, self._admission, self._tenants = app, admission, tenants
        self._turns = asyncio.Semaphore(_PER_TURN)  # who waits for one is woken in the loop's next turn

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (path := route_path(scope)) not in _WORK or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        n_bytes, returning, authorization = None, False, ""
        priority: float | None = None
        within_s: float | None = None
        for name, value in scope["headers"]:
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
        try:
            tenant = self._tenants.find(authorization)
            self._tenants.check(tenant)
            urgency = Urgency.read(priority, within_s)
            self._tenants.check_priority(tenant, urgency.priority)
            place = self._admission.enter(n_bytes, returning=returning, urgency=urgency)
        except HydraError as e:
            response = error_response(e, path)
            if self._admission.closed:
                response.headers["Connection"] = "close"  # the next request is better sent elsewhere
            await response(scope, receive, send)
            return
        self._tenants.begin(tenant)
        place.on_tokens, place.on_leave = partial(self._tenants.charge, tenant), partial(self._tenants.end, tenant)
        scope.setdefault("state", {}).update(place=place, tenant=tenant)
        try:
            async with self._turns:
                pass
            place.stop_waiting()  # it is claimed now, or its body has not come: nobody waits for that
            await self._app(scope, receive, send)
        finally:
            if not place.claimed:
                place.leave()


def _number(value: bytes) -> float:
    """Not a number where it is none, which no check lets pass."""
    try:
        return float(value)
    except ValueError:
        return math.nan


def authorization_of(request: Request) -> str:
    """The Authorization header; the key of an `x-api-key` header stands for one, as Anthropic's clients send it."""
    key = request.headers.get("x-api-key")
    return request.headers.get("authorization") or (f"Bearer {key}" if key else "")


def urgency_of(request: Request, priority: int | None, within_s: float | None) -> Urgency:
    """What its headers and its fields ask for: the field's priority, the shorter time. Raises `InvalidRequest`."""
    place, fields = place_of(request), Urgency.read(priority, within_s)
    if place is None:
        return fields
    Tenants.check_priority(request.state.tenant, fields.priority)
    headers = place.urgency
    return Urgency(headers.priority if priority is None else fields.priority, min(headers.within_s, fields.within_s))


def salt_of(request: Request, own: str | None) -> str:
    """The salt of its KV: its own and, unless that shares its cache, its tenant's."""
    tenant: Tenant | None = getattr(request.state, "tenant", None)
    return own or "" if tenant is None else tenant.salt(own)


def place_of(request: Request) -> Place | None:
    """The place that the gate has given it."""
    place: Place | None = getattr(request.state, "place", None)
    return place
