"""One endpoint of the cluster's messages: a ZeroMQ socket that receives, and one per peer that sends.

A message is bytes, in several parts if it is long. Sending never blocks. A message to a peer that is gone is lost,
which the protocol expects. Addresses are `ipc://` or loopback. Other addresses need `Keys`: CURVE encryption, and a ZAP
authenticator that admits only the cluster's own key.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable

import msgspec
import zmq
from zmq.utils.z85 import decode as z85

from hydrainfer.core import ConfigError, SeldomLog

_log = logging.getLogger(__name__)
_LOCAL = ("ipc://", "inproc://", "tcp://127.", "tcp://[::1]", "tcp://localhost")
_QUEUE = 100_000  # messages queued for one peer; further ones are dropped
_LONGEST_PART = 32 << 20  # bytes in a part of a message; a peer that sends a longer part is disconnected
_CURVE_BYTES = 1024  # the most that encryption adds to a part
_LAST_WORDS_MS = 500


class Keys(msgspec.Struct, frozen=True):
    """The cluster's CURVE key pair (Z85). Every process that has the secret key is a member."""

    public: str
    secret: str

    @classmethod
    def new(cls) -> Keys:
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())


class _Bell:
    """An eventfd, which is closed once nobody refers to it: whoever is about to write to it keeps it open."""

    __slots__ = ("fd",)

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __del__(self) -> None:
        os.close(self.fd)


class Mesh:
    """One endpoint. All methods but `wake` are called on one thread. `bind`: the address at which it receives; a tcp
    port may be `*`. Raises `ConfigError` if the address cannot be bound or needs `keys`."""

    def __init__(self, bind: str, keys: Keys | None = None) -> None:
        if keys is None and not bind.startswith(_LOCAL):
            raise ConfigError(f"{bind} leaves this machine, which needs keys")
        self._context = zmq.Context(io_threads=1)
        self._keys = keys
        self._of_strangers = SeldomLog(_log)
        self._peers: dict[str, zmq.Socket] = {}
        self._poller = zmq.Poller()
        self._gate = self._open_gate() if keys is not None else None
        self._bell: _Bell | None = _Bell()
        self._wake_fd = self._bell.fd
        self._poller.register(self._wake_fd, zmq.POLLIN)
        try:
            self._socket = self.listen(zmq.PULL, bind)
        except BaseException:
            self.close()
            raise
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def listen(self, kind: int, bind: str) -> zmq.Socket:
        """A bound socket that `poll` also watches. Raises `ConfigError` if the address cannot be bound."""
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.RCVHWM, _QUEUE)
        socket.setsockopt(zmq.MAXMSGSIZE, _LONGEST_PART + _CURVE_BYTES)
        socket.setsockopt(zmq.LINGER, _LAST_WORDS_MS)
        socket.setsockopt(zmq.IPV6, "[" in bind)
        if self._keys is not None:
            socket.curve_server = True
            socket.curve_publickey, socket.curve_secretkey = self._keys.public.encode(), self._keys.secret.encode()
        try:
            socket.bind(bind)
        except zmq.ZMQError as e:
            raise ConfigError(f"cannot listen on {bind}: {os.strerror(e.errno or 0)}") from None
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def connect(self, name: str, address: str) -> None:
        """Send messages for `name` to `address` from now on. Messages still queued for an earlier address are
        dropped."""
        self.forget(name)
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, _QUEUE)
        socket.setsockopt(zmq.LINGER, _LAST_WORDS_MS)
        try:
            speak_with(socket, address, self._keys)
        except zmq.ZMQError as e:
            _log.warning("%s says that it is at %r: %s", name, address, os.strerror(e.errno or 0))
            socket.close(linger=0)
            return
        self._peers[name] = socket

    def forget(self, name: str) -> None:
        socket = self._peers.pop(name, None)
        if socket is not None:
            socket.close(linger=0)

    def send(self, name: str, data: bytes) -> None:
        """Queue a message and return. It is lost if `name` is not connected or has stopped reading."""
        socket = self._peers.get(name)
        if socket is None:
            return
        try:
            if len(data) <= _LONGEST_PART:
                socket.send(data, zmq.NOBLOCK)
            else:
                parts = [data[at : at + _LONGEST_PART] for at in range(0, len(data), _LONGEST_PART)]
                socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            _log.warning("%s does not read; a message to it is lost", name)

    def poll(self, timeout_s: float | None) -> None:
        """Wait for a message, a `wake` or the timeout (None: for ever), whichever is first."""
        ready = dict(self._poller.poll(None if timeout_s is None else int(timeout_s * 1000)))
        if not ready and timeout_s is not None:
            time.sleep(timeout_s % 0.001)  # the rest: a poll counts whole milliseconds
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        if self._gate is not None and self._gate in ready:
            self._admit(self._gate)

    def watch(self, fd: int) -> None:
        """Let `poll` return also when `fd` is readable."""
        self._poller.register(fd, zmq.POLLIN)

    def unwatch(self, fd: int) -> None:
        self._poller.unregister(fd)

    def receive(self) -> Iterable[bytes]:
        """The messages that have arrived."""
        while True:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield parts[0] if len(parts) == 1 else b"".join(parts)

    def wake(self) -> None:
        """Make `poll` return. May be called from any thread, also after `close`, when it does nothing."""
        bell = self._bell
        if bell is not None:
            os.eventfd_write(bell.fd, 1)

    def close(self) -> None:
        """Close the sockets; messages not yet sent get half a second to leave."""
        self._context.destroy(linger=_LAST_WORDS_MS)
        self._bell = None  # its descriptor is closed now or, if another thread is in `wake`, after that

    # ---- authentication

    def _open_gate(self) -> zmq.Socket:
        """The socket at which this context asks whether to admit a key (ZAP, ZeroMQ RFC 27)."""
        gate = self._context.socket(zmq.REP)
        gate.bind("inproc://zeromq.zap.01")
        self._poller.register(gate, zmq.POLLIN)
        return gate

    def _admit(self, gate: zmq.Socket) -> None:
        assert self._keys is not None
        version, request, _, address, _, mechanism, *credentials = gate.recv_multipart()
        ours = mechanism == b"CURVE" and credentials == [z85(self._keys.public.encode())]
        if not ours:
            where = address.decode(errors="replace")
            self._of_strangers("refused a connection from %s: not a key of this cluster", where)
        status = (b"200", b"OK") if ours else (b"400", b"not a member")
        gate.send_multipart([version, request, *status, b"", b""])


def speak_with(socket: zmq.Socket, address: str, keys: Keys | None) -> None:
    """Connect `socket` to a member of the cluster. `keys`: the CURVE keys that make it one itself."""
    socket.setsockopt(zmq.IPV6, "[" in address)
    if keys is not None:
        socket.curve_serverkey = keys.public.encode()
        socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
    socket.connect(address)


__all__ = ["Keys", "Mesh", "speak_with"]
