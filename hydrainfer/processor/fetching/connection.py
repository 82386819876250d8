"""One HTTP request to a checked address, over a connection of its own: no proxy, no redirect, no compression."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import h11
import httpcore

from hydrainfer.processor.fetching.addresses import Address, Hosts, may_connect, to_ip
from hydrainfer.version import __version__

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
MAX_TRIED = 3  # addresses of a name that are tried
MAX_INTERIM = 100  # 1xx responses before the final one
MAX_HEAD_BYTES = 32 << 10
_ALL_HEADS_BYTES = 2 * MAX_HEAD_BYTES  # including those of 1xx responses
_HEAD_READ_BYTES = 4 << 10
_BODY_READ_BYTES = 64 << 10
_HEADERS = (
    (b"User-Agent", f"HydraInfer/{__version__}".encode()),
    (b"Accept", b"*/*"),
    (b"Accept-Encoding", b"identity"),
    (b"Connection", b"close"),
)


class NoPublicAddress(Exception):
    """The name has no address, or one that is not allowed. Both cases raise the same error, since the difference would
    reveal which hosts exist in the server's network."""


class Patience(NamedTuple):
    """The time limits of a connection: seconds to connect, and seconds between two reads."""

    connect_s: float
    read_s: float


class HttpResponse(NamedTuple):
    """The response to a request. `headers`: lower-case names, each with its last value. `chunks`: the body."""

    status: int
    headers: dict[str, str]
    chunks: AsyncIterator[bytes]


class PieceBudget:
    """A limit on the number of small pieces that all downloads together may receive per second, since a small piece
    takes as much work as a large one. A download may receive one piece per `PIECE_BYTES` without waiting; the pieces
    beyond that wait their turn."""

    PIECE_BYTES = 1 << 10
    AT_ONCE = 64
    PER_S = 5_000.0

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def wait(self) -> None:
        """Wait for permission to receive the next `AT_ONCE` pieces."""
        async with self._turn:
            await asyncio.sleep(self.AT_ONCE / self.PER_S)


async def resolve(host: str, port: int) -> Sequence[str]:
    """All addresses of a name, from the system's resolver. Raises `OSError`."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class CheckedNetwork(httpcore.AsyncNetworkBackend):
    """A network backend that resolves a name once, checks all its addresses and connects only to these. The resolver is
    not asked a second time, so DNS rebinding has no effect. TLS and the Host header use the name."""

    def __init__(self, hosts: Hosts, resolve: Resolve, network: httpcore.AsyncNetworkBackend) -> None:
        self._hosts = hosts
        self._resolve = resolve
        self._network = network
        self._open: list[httpcore.AsyncNetworkStream] = []

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to the first address that answers. Raises `NoPublicAddress`, `TimeoutError` if the name is not
        resolved in time, and what httpcore raises."""
        failure: Exception = NoPublicAddress()
        for ip in (await self._addresses(host, port, timeout))[:MAX_TRIED]:
            try:
                stream = await self._network.connect_tcp(ip, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as e:
                failure = e
                continue
            self._open.append(stream)
            return stream
        raise failure

    async def _addresses(self, host: str, port: int, timeout_s: float | None) -> Sequence[str]:
        literal = to_ip(host)
        if literal is None:
            try:
                async with asyncio.timeout(timeout_s):
                    found = [to_ip(text) for text in await self._resolve(host, port)]
            except TimeoutError:
                raise
            except (OSError, UnicodeError):
                raise NoPublicAddress from None
        else:
            found = [literal]
        if not found or any(ip is None or not may_connect(ip, self._hosts) for ip in found):
            raise NoPublicAddress
        return [str(ip) for ip in found]

    async def close(self) -> None:
        """Close every connection, including one whose TLS handshake was interrupted. Safe to repeat."""
        while self._open:
            await self._open.pop().aclose()


@asynccontextmanager
async def request(
    address: Address, network: CheckedNetwork, tls: ssl.SSLContext | None, patience: Patience, pace: PieceBudget
) -> AsyncIterator[HttpResponse]:
    """Send a GET request. The connection is closed when the block ends, for whatever reason. Raises `NoPublicAddress`,
    `TimeoutError`, `h11.RemoteProtocolError` and what httpcore's network backend raises."""
    try:
        stream = await network.connect_tcp(address.host, address.port, patience.connect_s)
        if tls is not None:
            tls.set_alpn_protocols(["http/1.1"])
            stream = await stream.start_tls(tls, address.host, patience.connect_s)
        conversation = _Conversation(stream, patience, pace)
        yield await conversation.ask(address)
    finally:
        await network.close()


class _Conversation:
    """One request and its response. Other tasks of the event loop run between two pieces of the response."""

    def __init__(self, stream: httpcore.AsyncNetworkStream, patience: Patience, pace: PieceBudget) -> None:
        self._stream = stream
        self._patience = patience
        self._pace = pace
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._n_received = 0
        self._n_pieces = 0  # without those that `PieceBudget` has let through

    async def ask(self, address: Address) -> HttpResponse:
        headers = [(b"Host", address.netloc.encode()), *_HEADERS]
        asked = h11.Request(method=b"GET", target=address.target.encode(), headers=headers)
        data = (self._http.send(asked) or b"") + (self._http.send(h11.EndOfMessage()) or b"")
        await self._stream.write(data, self._patience.read_s)
        head = await self._head()
        found = {k.decode("latin-1"): v.decode("latin-1") for k, v in head.headers}
        return HttpResponse(head.status_code, found, self._body())

    async def _head(self) -> h11.Response:
        n_interim = 0
        while n_interim <= MAX_INTERIM and self._n_received <= _ALL_HEADS_BYTES:
            event = await self._next(_HEAD_READ_BYTES)
            if isinstance(event, h11.Response):
                return event
            n_interim += isinstance(event, h11.InformationalResponse)
        raise h11.RemoteProtocolError("headers without end")

    async def _body(self) -> AsyncIterator[bytes]:
        while True:
            event = await self._next(_BODY_READ_BYTES)
            if isinstance(event, h11.Data):
                yield bytes(event.data)
            elif event is not h11.NEED_DATA:
                return

    async def _next(self, n_bytes: int) -> Any:
        """The next event, or `NEED_DATA` if more bytes had to be read first."""
        event = self._http.next_event()
        if event is h11.NEED_DATA:
            data = await self._stream.read(n_bytes, self._patience.read_s)
            self._n_received += len(data)
            self._http.receive_data(data)
        await self._yield()
        return event

    async def _yield(self) -> None:
        self._n_pieces += 1
        if self._n_pieces > self._n_received // PieceBudget.PIECE_BYTES + PieceBudget.AT_ONCE:
            self._n_pieces -= PieceBudget.AT_ONCE
            await self._pace.wait()
        else:
            await asyncio.sleep(0)
