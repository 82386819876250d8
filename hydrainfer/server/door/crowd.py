"""The crowd: requests that wait at the gate, as bytes. The application makes hundreds of objects per request, which a
request that waits for seconds does not need yet. Only the fields that decide the order are read from a body; the rest
is read when it is the request's turn."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from hydrainfer.core import DeadlineExceeded, InvalidRequest
from hydrainfer.server.door.overload import OverloadControl, Place, Urgency, Work
from hydrainfer.server.http import arriving

_MOST_BYTES = 256 << 20
_MEDIA = (b"image", b"video")  # in every protocol, a body with pictures or videos contains one of these words


class _Asked(msgspec.Struct):
    """The fields of a body that decide the order. They are checked later."""

    priority: Any = None
    deadline_s: Any = None


class Crowd:
    """The requests that wait at the gate. Up to `_MOST_BYTES` of bodies are read and held. Beyond that, bodies stay
    with their clients, and only the headers decide the order. `timeout_s`: the longest wait. `max_bytes`: a larger body
    is refused by the application, so its request does not wait."""

    def __init__(self, overload: OverloadControl, timeout_s: float, max_bytes: int) -> None:
        self.n_bytes = 0
        self._overload, self._timeout_s, self._max_bytes = overload, timeout_s, max_bytes

    async def wait(self, place: Place, n_bytes: int | None, receive: Receive) -> Receive:
        """Wait until it is the request's turn to be prepared. Returns the ASGI `receive` from which the body is then
        read. Raises `HydraError`, or `ClientDisconnect` if the client has hung up."""
        if n_bytes is not None and n_bytes > self._max_bytes:
            return receive
        if n_bytes is None or self.n_bytes + n_bytes > _MOST_BYTES:
            work = self._overload.work_of(n_bytes, media=not self._overload.is_text(n_bytes))
            await self._turn(place, work, place.urgency)
            return receive
        self.n_bytes += n_bytes
        try:
            messages = await self._read(place, n_bytes, receive)
            body = b"".join(m["body"] for m in messages)
            work = self._overload.work_of(n_bytes, media=any(word in body for word in _MEDIA))
            await self._turn(place, work, _urgency(body, place.urgency), receive())
        finally:
            self.n_bytes -= n_bytes

        async def replay() -> Message:
            return messages.pop(0) if messages else await receive()

        return replay

    async def _read(self, place: Place, n_bytes: int, receive: Receive) -> list[Message]:
        """The messages of the body, not much longer than announced. The request is in no queue while they arrive, so it
        does not delay others."""
        place.stop_waiting()
        messages: list[Message] = []
        async with arriving(self._timeout_s) as moved:
            while not messages or (messages[-1]["more_body"] and sum(len(m["body"]) for m in messages) <= n_bytes):
                message = await receive()
                moved()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                messages.append({"more_body": False, "body": b"", **message})
        return messages

    async def _turn(
        self, place: Place, work: Work, urgency: Urgency, hang_up: Awaitable[Message] | None = None
    ) -> None:
        watcher = asyncio.ensure_future(hang_up) if hang_up is not None else None
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def go() -> None:
            if not turn.done():
                turn.set_result(None)

        try:
            self._overload.sort(place, work, urgency)
            place.line_up(urgency.priority, go)
            left_s = min(urgency.within_s, self._timeout_s) - (self._overload.clock() - place.arrived_s)
            both: set[asyncio.Future[Any]] = {turn} if watcher is None else {turn, watcher}
            patience_s = left_s if left_s < math.inf else None
            done, _ = await asyncio.wait(both, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            if watcher in done:
                raise ClientDisconnect
            if not done:
                raise DeadlineExceeded("the request waited longer than it may; retry when idle")
        finally:
            turn.cancel()
            if watcher is not None:
                watcher.cancel()


def _urgency(body: bytes, headers: Urgency) -> Urgency:
    """The urgency of a request by its headers and body, or by the headers alone if the body is malformed."""
    try:
        asked = msgspec.json.decode(body, type=_Asked)
        return headers.with_fields(asked.priority, asked.deadline_s)
    except (msgspec.MsgspecError, UnicodeDecodeError, InvalidRequest, TypeError, ValueError, OverflowError):
        return headers
