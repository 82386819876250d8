"""One HTTP request to a checked address, over a connection of its own: no proxy, no redirect, no compression."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

import httpcore

from hydrainfer.processor.addresses import Address, Hosts, may_connect, to_ip
from hydrainfer.version import __version__

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
MAX_TRIED = 3  # addresses of one name
_HEADERS = (
    (b"User-Agent", f"HydraInfer/{__version__}".encode()),
    (b"Accept", b"*/*"),
    (b"Accept-Encoding", b"identity"),
    (b"Connection", b"close"),
)


class NoPublicAddress(Exception):
    """The name has no address, or one that is not allowed. Which of the two is not told: it would say what exists in
    the server's network."""


class Patience(NamedTuple):
    """Seconds to connect, and between two reads."""

    connect_s: float
    read_s: float


class Answer(NamedTuple):
    """`headers`: lower-case names, of several alike the last. `chunks` ends with the body."""

    status: int
    headers: dict[str, str]
    chunks: AsyncIterator[bytes]


async def resolve(host: str, port: int) -> Sequence[str]:
    """Every address of a name, by the system's resolver. Raises `OSError`."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class CheckedNetwork(httpcore.AsyncNetworkBackend):
    """Resolves once, checks every address, and connects to those: a second answer of the resolver is never asked for,
    so rebinding a name changes nothing. TLS and the Host header go by the name."""

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
        """Raises `NoPublicAddress` and what httpcore raises."""
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
            except (OSError, UnicodeError, TimeoutError):
                raise NoPublicAddress from None
        else:
            found = [literal]
        if not found or any(ip is None or not may_connect(ip, self._hosts) for ip in found):
            raise NoPublicAddress
        return [str(ip) for ip in found]

    async def close(self) -> None:
        """Every connection made, also one whose TLS handshake was interrupted. Safe to repeat."""
        while self._open:
            await self._open.pop().aclose()


@asynccontextmanager
async def request(
    address: Address, network: CheckedNetwork, tls: ssl.SSLContext | None, patience: Patience
) -> AsyncIterator[Answer]:
    """GET. The connection is closed at the end, however it comes. Raises `NoPublicAddress` and what httpcore raises."""
    url = httpcore.URL(
        scheme=address.scheme.encode(),
        host=address.host.encode(),
        port=address.port,
        target=address.target.encode(),
    )
    timeouts = {"connect": patience.connect_s, "read": patience.read_s, "write": patience.read_s}
    connection = httpcore.AsyncHTTPConnection(url.origin, ssl_context=tls, network_backend=network)
    asked = httpcore.Request(
        b"GET", url, headers=[(b"Host", address.netloc.encode()), *_HEADERS], extensions={"timeout": timeouts}
    )
    try:
        response = await connection.handle_async_request(asked)
        headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in response.headers}
        yield Answer(response.status, headers, response.aiter_stream())
    finally:
        try:
            await connection.aclose()
        finally:
            await network.close()
