"""The first thing a request meets: whether there is a place for it, from its headers alone."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from hydrainfer.core import HydraError
from hydrainfer.server.admission import Admission, Place
from hydrainfer.server.errors import error_response

_WORK = ("/v1/chat/completions", "/v1/completions")
_PER_TURN = 4  # of the event loop


class Gate:
    """Wraps an application: what asks for completions gets a place or is refused, before its body is read. Of those
    that get one, a few go on per turn of the event loop, first come, first served: the others of a thousand that come
    at once leave the loop time for those who want no more than a word."""

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self._app, self._admission = app, admission
        self._turns = asyncio.Semaphore(_PER_TURN)  # who waits for one is woken in the loop's next turn

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in _WORK or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        n_bytes, returning = None, False
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit():
                n_bytes = int(value)
            elif name == b"x-stainless-retry-count":  # the `openai` client's
                returning = value != b"0"
        try:
            place = self._admission.enter(n_bytes, returning=returning)
        except HydraError as e:
            response = error_response(e)
            if self._admission.closed:
                response.headers["Connection"] = "close"  # the next request is better sent elsewhere
            await response(scope, receive, send)
            return
        scope.setdefault("state", {})["place"] = place
        try:
            async with self._turns:
                pass
            await self._app(scope, receive, send)
        finally:
            if not place.claimed:
                place.leave()


def place_of(request: Request) -> Place | None:
    """The place that the gate has given it."""
    place: Place | None = getattr(request.state, "place", None)
    return place
