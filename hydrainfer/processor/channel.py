"""Headers and raw bytes between the server and one of its media workers, over a stream socket."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from typing import Any

_LENGTH = struct.Struct("<I")
_FOREVER_S = 1e9
_ENOUGH_S = 1e6  # what the kernel counts as one wait


class Channel:
    """One thread at a time. Each call moves everything or raises: `TimeoutError` when it is not done by `deadline_s`
    (of `time.monotonic`), `EOFError` when the other side has gone. The kernel does the waiting, whole arrays at once:
    a thread that receives 40 MB takes the interpreter's lock once, not once per packet."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def send(self, header: bytes, *bulk: Any, deadline_s: float = _FOREVER_S) -> None:
        """`bulk`: contiguous buffers, sent as they are; the header must say how many bytes they have."""
        for data in (_LENGTH.pack(len(header)) + header, *bulk):
            self._move(self._sock.send, data, socket.SO_SNDTIMEO, deadline_s)

    def receive(self, max_bytes: int, deadline_s: float = _FOREVER_S) -> bytes:
        """A header. A longer one than `max_bytes` counts as gone: nobody who is well sends such."""
        length = bytearray(_LENGTH.size)
        self.receive_into(length, deadline_s)
        (n,) = _LENGTH.unpack(length)
        if n > max_bytes:
            raise EOFError(f"a header of {n} bytes")
        header = bytearray(n)
        self.receive_into(header, deadline_s)
        return bytes(header)

    def receive_into(self, buffer: Any, deadline_s: float = _FOREVER_S) -> None:
        """Fill it."""
        self._move(lambda v: self._sock.recv_into(v, 0, socket.MSG_WAITALL), buffer, socket.SO_RCVTIMEO, deadline_s)

    def close(self) -> None:
        self._sock.close()

    def _move(self, call: Callable[[memoryview], int], data: Any, option: int, deadline_s: float) -> None:
        view = memoryview(data).cast("B") if memoryview(data).nbytes else memoryview(b"")
        while view:
            left_s = min(deadline_s - time.monotonic(), _ENOUGH_S)
            if left_s <= 0:
                raise TimeoutError
            # rounded up: to the kernel, zero means for ever
            self._sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(left_s), int(left_s % 1 * 1e6) + 1))
            try:
                n = call(view)
            except BlockingIOError:
                raise TimeoutError from None
            except OSError:
                raise EOFError from None
            if not n:
                raise EOFError
            view = view[n:]
