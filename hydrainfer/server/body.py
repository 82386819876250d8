"""JSON from a client that may send too much, nonsense, or hang up; and JSON to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive

from hydrainfer.core import InvalidRequest, RequestTooLarge

T = TypeVar("T")


class NotJson(InvalidRequest):
    """415: the body does not say that it is JSON. A page of another origin cannot say so without being asked."""

    status = 415


async def read_json(request: Request, max_bytes: int) -> object:
    """The body, stopped at `max_bytes`. Raises `RequestTooLarge`, `InvalidRequest`, `NotJson` or `ClientDisconnect`."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise NotJson("the body must be JSON and say so: send the header Content-Type: application/json")
    too_large = RequestTooLarge(
        f"the request body is over the limit of {max_bytes} bytes; send fewer or smaller pictures"
    )
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > max_bytes:
        raise too_large
    chunks: list[bytes] = []
    n = 0
    async for chunk in request.stream():
        n += len(chunk)
        if n > max_bytes:
            raise too_large
        chunks.append(chunk)
    try:
        return orjson.loads(b"".join(chunks))
    except orjson.JSONDecodeError as e:
        raise InvalidRequest(
            f"the body is not valid JSON (line {e.lineno}, column {e.colno})", code="invalid_json"
        ) from None


def json_response(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


async def disconnected(receive: Receive) -> None:
    """Returns when the client has hung up. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(work: Awaitable[T], receive: Receive, discard: Callable[[T], None]) -> T:
    """The result of `work`, which is cancelled if the client hangs up first; then raises `ClientDisconnect`. A result
    that comes too late to be returned goes to `discard`."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
    except BaseException:
        task.cancel()
        task.add_done_callback(lambda t: None if t.cancelled() or t.exception() else discard(t.result()))
        raise
    finally:
        watcher.cancel()
    return task.result()
