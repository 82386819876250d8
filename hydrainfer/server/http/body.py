"""JSON bodies: reading them from clients that may send too much, malformed data, or hang up; and JSON responses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive

from hydrainfer.core import InvalidRequest, Overloaded, RequestTooLarge
from hydrainfer.server.http.paths import route_path

STALLED_S = 30.0  # the longest pause between two pieces of a body
MAX_FIELDS = 1 << 16
"""Fields of objects, and objects and lists in lists, that a body may have together. Messages, parts and tools are such;
each takes microseconds in which nobody else is answered."""
MAX_ENTRIES = 1 << 20
"""Numbers, texts and other plain values in lists, such as the token ids of prompts."""
_SMALL_BYTES = 1 << 16  # too few for so many
_BEGINNINGS = {
    b"\xef\xbb\xbf": "the body begins with a byte order mark; JSON is sent without one",
    b"\xff\xfe": "the body is UTF-16; JSON is sent in UTF-8",
    b"\xfe\xff": "the body is UTF-16; JSON is sent in UTF-8",
    b"\x1f\x8b": "the body is compressed; send it as plain JSON",
}
"""The first bytes of bodies that are not JSON, and what these are."""
_BODIES = 8  # bodies of `max_bytes` that may be held at once
T = TypeVar("T")


class NotJson(InvalidRequest):
    """415: the Content-Type is not JSON. Pages of other origins cannot send a JSON type without a CORS preflight."""

    status = 415


class Compressed(InvalidRequest):
    """415: the body has a Content-Encoding. How much is in it would not be known before it is unpacked."""

    status = 415


class BodyStalled(InvalidRequest):
    """408: the body has not arrived in time."""

    status = 408


class Bodies:
    """Reads bodies of at most `max_bytes` each. Bodies that are arriving may hold at most `_BODIES` times that
    together. `timeout_s`: the time in which a body has to arrive. `check` is called with the path and the parsed body,
    and raises `InvalidRequest` for a refused field."""

    def __init__(self, max_bytes: int, timeout_s: float, check: Callable[[str, object], None]) -> None:
        self.max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._check_fields = check
        self._n_held = 0

    async def read(self, request: Request) -> object:
        """The parsed JSON body, without any field that its endpoint refuses. Raises `InvalidRequest` (also as
        `NotJson`, `Compressed` or `BodyStalled`), `RequestTooLarge`, `Overloaded` or `ClientDisconnect`."""
        _check_json(request)
        _check_plain(request)
        chunks, n = list[bytes](), 0
        announced = request.headers.get("content-length", "")
        self._check(int(announced) if announced.isdigit() else 0)
        try:
            async with arriving(self._timeout_s) as moved:
                async for chunk in request.stream():
                    moved()
                    n += len(chunk)
                    self._n_held += len(chunk)
                    chunks.append(chunk)
                    self._check(n)
            body = _parsed(b"".join(chunks))
            self._check_fields(route_path(request.scope), body)
            return body
        finally:
            self._n_held -= n

    def _check(self, n: int) -> None:
        if n > self.max_bytes:
            raise RequestTooLarge(
                f"the request body is over the limit of {self.max_bytes} bytes; send fewer or smaller pictures"
            )
        if self._n_held > _BODIES * self.max_bytes:
            raise Overloaded("too many bodies are being received at once; retry later", retry_after_s=1.0)


@asynccontextmanager
async def arriving(most_s: float) -> AsyncIterator[Callable[[], None]]:
    """A time limit on a body that is arriving. Yields a function to call at every piece. Raises `BodyStalled` if it is
    not called for `STALLED_S`, or if the block takes longer than `most_s`."""
    loop, patience_s = asyncio.get_running_loop(), STALLED_S
    end_s = loop.time() + most_s
    try:
        async with asyncio.timeout_at(min(loop.time() + patience_s, end_s)) as limit:
            yield lambda: limit.reschedule(min(loop.time() + patience_s, end_s))
    except TimeoutError:
        why = f"nothing of it for {patience_s:g} s, or not all within {most_s:g} s"
        raise BodyStalled(f"the request body did not come: {why}", code="body_timeout") from None


def _check_json(request: Request) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise NotJson("the body must be JSON and say so: send the header Content-Type: application/json")


def _check_plain(request: Request) -> None:
    encoding = request.headers.get("content-encoding", "")
    if encoding.strip().lower() not in ("", "identity"):
        raise Compressed("the body must be sent uncompressed, without Content-Encoding", code="body_compressed")


def _parsed(body: bytes) -> object:
    try:
        parsed = orjson.loads(body)
        if len(body) > _SMALL_BYTES:
            _check_number(parsed)
        return parsed
    except orjson.JSONDecodeError as e:
        raise InvalidRequest(_what_is_wrong(body, e), code="invalid_json") from None


def _what_is_wrong(body: bytes, error: orjson.JSONDecodeError) -> str:
    """What keeps a body from being read. It never contains text of the body."""
    for beginning, what in _BEGINNINGS.items():
        if body.startswith(beginning):
            return what
    try:
        body.decode()
    except UnicodeDecodeError as e:
        return f"the body is not UTF-8 at byte {e.start}"
    place = f"line {error.lineno}, column {error.colno}"
    if "surrogate" in error.msg:
        return f"the body has half of a surrogate pair, \\ud800 to \\udfff, without the other half ({place})"
    return f"the body is not valid JSON ({place}): {error.msg}"


def _check_number(parsed: object) -> None:
    """Raise `RequestTooLarge` if the values in a body are too many, whatever they mean."""
    n_fields = n_entries = 0
    left = [parsed]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            n_fields += len(one)
            left += [value for value in one.values() if isinstance(value, dict | list)]
        elif isinstance(one, list):
            nested = [value for value in one if isinstance(value, dict | list)]
            n_fields += len(nested)
            n_entries += len(one) - len(nested)
            left += nested
        for n, most, what in ((n_fields, MAX_FIELDS, "objects and fields"), (n_entries, MAX_ENTRIES, "list entries")):
            if n > most:
                raise RequestTooLarge(f"the request body has more than {most} {what}; send fewer")


def json_response(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


async def disconnected(receive: Receive) -> None:
    """Wait until the client has hung up. The body must have been read."""
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
