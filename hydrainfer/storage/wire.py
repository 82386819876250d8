"""Authenticated connections between instances, for small frames of a fixed schema and the raw bytes of blocks.

    source (server)                          target (client)
      magic, nonce          ──────────────>
      <──────────────  nonce', HMAC(secret, "target" nonce nonce')
      HMAC(secret, "source" nonce nonce')  ──────────────>
      <──────────────  Attach(owner)           then requests, one at a time

A secret shared by the cluster proves that both sides belong to it. Later messages are neither encrypted nor signed.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Protocol

from hydrainfer.storage.packets import Attach, Packet, decode, encode, length
from hydrainfer.storage.transport import TransportError, Unreachable

MAGIC = b"hydra/1\n"
HANDSHAKE_S = 2.0
_NONCE, _MAC = 32, 32
_BUFFERS = 256  # buffers of one system call
_SOCKET_BYTES = 4 << 20
_KEEPALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}  # seconds, seconds, times


class Channel(Protocol):
    """What carries the bytes of a connection: a socket, or something around one that protects them."""

    def connect(self, address: tuple[str, int]) -> None:
        """Connect to a server, as its client."""

    def fill(self, views: list[memoryview]) -> int:
        """Receive into `views`. Returns the number of bytes, 0 if the peer has closed the connection."""

    def drain(self, views: list[memoryview]) -> int:
        """Send some of `views`, at least one byte. Returns their number."""


class Plain:
    """The bytes as they are."""

    def __init__(self, sock: socket.socket) -> None:
        self.connect = sock.connect
        self._sock = sock

    def fill(self, views: list[memoryview]) -> int:
        return self._sock.recvmsg_into(views)[0]

    def drain(self, views: list[memoryview]) -> int:
        return self._sock.sendmsg(views)


class PeerSocket:
    """A socket to a peer, used through a `channel` around it. Operations raise `OSError` or `TransportError`. Only one
    thread at a time may use it, except for `abort`."""

    def __init__(self, sock: socket.socket, channel: Callable[[socket.socket], Channel] = Plain) -> None:
        self._sock = sock
        self._channel = channel(sock)
        self._end_s: float | None = None
        self._each_s: float | None = None
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def local_host(self) -> str:
        """Our address, as this peer reaches it."""
        return self._sock.getsockname()[0]

    def limit(self, seconds: float | None, *, each: bool = False) -> None:
        """Limit all operations from now on to `seconds` in total or, with `each`, the time without any bytes received
        or sent. None: no limit."""
        self._each_s = seconds if each else None
        self._end_s = None if seconds is None else time.monotonic() + seconds

    def connect(self, address: tuple[str, int]) -> None:
        self._arm()
        self._channel.connect(address)

    def send(self, message: Packet) -> None:
        self.drain([memoryview(encode(message))])

    def receive(self) -> Packet:
        """The next message. Raises `TransportError` for invalid bytes, and for `Refused`."""
        return decode(self.exactly(length(self.exactly(4))))

    def exactly(self, n: int) -> bytes:
        found = bytearray(n)
        self.fill([memoryview(found)])
        return bytes(found)

    def fill(self, views: Iterable[memoryview]) -> None:
        """Receive into `views`, until all are full."""
        rest = deque(v for v in views if v.nbytes)
        while rest:
            self._arm()
            n = self._channel.fill(list(islice(rest, _BUFFERS)))
            if n == 0:
                raise TransportError("the peer closed the connection")
            self._moved()
            _skip(rest, n)

    def drain(self, views: Iterable[memoryview]) -> None:
        """Send all of `views`."""
        rest = deque(v for v in views if v.nbytes)
        while rest:
            self._arm()
            n = self._channel.drain(list(islice(rest, _BUFFERS)))
            self._moved()
            _skip(rest, n)

    def send_bytes(self, data: bytes) -> None:
        self.drain([memoryview(data)])

    def abort(self) -> None:
        """Make operations that wait on the socket fail now. Any thread, even after `close`."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()

    def _moved(self) -> None:
        if self._each_s is not None:
            self._end_s = time.monotonic() + self._each_s

    def _arm(self) -> None:
        rest_s = None if self._end_s is None else self._end_s - time.monotonic()
        if rest_s is not None and rest_s <= 0:
            raise TransportError("timed out")
        self._sock.settimeout(rest_s)


def _skip(views: deque[memoryview], n: int) -> None:
    while n:
        head = views.popleft()
        if n < head.nbytes:
            views.appendleft(head[n:])
            return
        n -= head.nbytes


def admit(connection: PeerSocket, secret: bytes) -> None:
    """Do the source's half of the handshake. Raises unless the other side knows the secret."""
    nonce = secrets.token_bytes(_NONCE)
    connection.send_bytes(MAGIC + nonce)
    answer = connection.exactly(_NONCE + _MAC)
    both = nonce + answer[:_NONCE]
    if not hmac.compare_digest(_mac(secret, b"target", both), answer[_NONCE:]):
        raise TransportError("a peer does not know the cluster's secret")
    connection.send_bytes(_mac(secret, b"source", both))


def enter(connection: PeerSocket, secret: bytes, owner: str) -> None:
    """Do the target's half of the handshake, and send `Attach` with the wanted owner."""
    greeting = connection.exactly(len(MAGIC) + _NONCE)
    if not greeting.startswith(MAGIC):
        raise TransportError("no block server of this version")
    nonce = secrets.token_bytes(_NONCE)
    both = greeting[len(MAGIC) :] + nonce
    connection.send_bytes(nonce + _mac(secret, b"target", both))
    if not hmac.compare_digest(_mac(secret, b"source", both), connection.exactly(_MAC)):
        raise TransportError("the server does not know the cluster's secret")
    connection.send(Attach(owner))


def _mac(secret: bytes, side: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, side + nonces, "sha256")


def address_of(text: str) -> tuple[tuple[str, int], str]:
    """((host, port), spec) of `HOST:PORT/SPEC`."""
    place, _, spec = text.partition("/")
    host, _, port = place.rpartition(":")
    if not (host and spec and port.isdecimal() and 0 < int(port) < 65536):
        raise TransportError(f"{text!r} is no address of a block server")
    return (host, int(port)), spec


def new_socket(host: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)


class BlockClient:
    """One connection to a peer's block server, opened at first use."""

    def __init__(self, owner: str, address: tuple[str, int], secret: bytes) -> None:
        self._owner, self._address, self._secret = owner, address, secret
        self._connection: PeerSocket | None = None
        self._aborted = False

    def open(self, timeout_s: float) -> PeerSocket:
        """The connection. It fails if no bytes are received or sent for `timeout_s`. Raises `Unreachable` if it cannot
        be made."""
        connection = self._connection
        if connection is not None:
            connection.limit(timeout_s, each=True)
            return connection
        connection = self._connection = PeerSocket(new_socket(self._address[0]))
        if self._aborted:
            raise TransportError("given up")
        connection.limit(min(timeout_s, HANDSHAKE_S))
        try:
            connection.connect(self._address)
        except OSError as e:
            raise Unreachable(f"{self._owner} cannot be connected: {e}") from e
        enter(connection, self._secret, self._owner)
        connection.limit(timeout_s, each=True)
        return connection

    def abort(self) -> None:
        self._aborted = True
        if self._connection is not None:
            self._connection.abort()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
