"""A lean HTTP/1.1 client: the bytes of an answer reach the caller inside the event loop's read callback.

`httpx` costs several times the processor time per streamed token (`benchmarks/b04_client_overhead.py`), which would be
missing to a server on the same cores.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

import httptools

from hydrainfer.core import ConfigError
from hydrainfer.workload.client.failures import FailureKind, RequestFailed

OnData = Callable[[bytes], None]


class _KeptConnection(asyncio.Protocol):
    """One keep-alive connection, with one exchange at a time. `unanswered`: no byte of the answer has arrived yet."""

    def __init__(self) -> None:
        self._done: asyncio.Future[int] | None = None
        self.transport: asyncio.Transport
        self.open = True

    def exchange(self, message: bytes, on_data: OnData) -> asyncio.Future[int]:
        """Write a whole request. Returns a future of the status, which is set when the answer has ended."""
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self._on_data = on_data
        self._framed = self._headed = False
        self.unanswered = self.reusable = True
        self.transport.write(message)
        return self._done

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # (uvloop's transports are not subclasses)

    def data_received(self, data: bytes) -> None:
        if self._done is None or self._done.done():
            self.transport.abort()  # an answer without a request
            return
        self.unanswered = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as e:
            self._fail(e.__context__ if isinstance(e.__context__, RequestFailed) else e)
        except httptools.HttpParserError as e:
            self._fail(RequestFailed(FailureKind.MALFORMED, f"not an HTTP answer: {e}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        if self._done is None or self._done.done():
            return
        if self._headed and not self._framed and exc is None:
            self._done.set_result(self._parser.get_status_code())  # without a length, the answer ends here
        else:
            self._fail(RequestFailed(FailureKind.CONNECTION, f"the connection broke before the answer ended: {exc}"))

    def _fail(self, e: BaseException) -> None:
        self.transport.abort()
        if self._done is not None and not self._done.done():
            self._done.set_exception(e)

    # ---- callbacks of httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        key = name.lower()
        if key == b"content-length" or (key == b"transfer-encoding" and b"chunked" in value.lower()):
            self._framed = True

    def on_headers_complete(self) -> None:
        self._headed = True
        self.reusable = self._framed and self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self._on_data(body)

    def on_message_complete(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(self._parser.get_status_code())


class HttpPool:
    """Connections to one server, which are kept and reused. There are as many as exchanges at the same time."""

    def __init__(self, base_url: str, headers: dict[str, str] | None = None) -> None:
        """Raises `ConfigError` for an address that is not http(s)://host[:port][/path]."""
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ConfigError(f"a server's address looks like http://host:port, not {base_url!r}", param="base_url")
        self._host = url.hostname
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._port = url.port or (443 if self._tls else 80)
        self._prefix = url.path.rstrip("/").removesuffix("/v1")  # OpenAI's clients expect it in the base URL
        fixed = {"host": url.netloc.rpartition("@")[2], "accept-encoding": "identity"} | (headers or {})
        self._headers = "".join(f"{k}: {v}\r\n" for k, v in fixed.items())
        self._idle: list[_KeptConnection] = []

    async def send(self, method: str, path: str, body: bytes, on_data: OnData) -> int:
        """The status of one exchange. `on_data` gets the body as it arrives; an exception that it raises ends the
        exchange. A kept connection that the server has closed meanwhile is replaced by another. Raises
        `RequestFailed`."""
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}"
        message = f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
        while True:
            kept = self._take_idle()
            connection = kept or await self._connect()
            try:
                status = await connection.exchange(message, on_data)
            except RequestFailed:
                if kept and connection.unanswered:
                    continue
                raise
            except asyncio.CancelledError:
                connection.transport.abort()
                raise
            if connection.reusable and connection.open:
                self._idle.append(connection)
            else:
                connection.transport.close()
            return status

    def close(self) -> None:
        while self._idle:
            self._idle.pop().transport.close()

    def _take_idle(self) -> _KeptConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.open and not connection.transport.is_closing():
                return connection
        return None

    async def _connect(self) -> _KeptConnection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(_KeptConnection, self._host, self._port, ssl=self._tls)
        except OSError as e:
            raise RequestFailed(FailureKind.CONNECTION, f"no connection to {self._host}:{self._port}: {e}") from e
        return connection
