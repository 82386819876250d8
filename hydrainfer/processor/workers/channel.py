"""Transfer of headers and raw bytes between the server and one of its media workers, over a stream socket."""

from __future__ import annotations

import math
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

_LENGTH = struct.Struct("<I")
_FOREVER_S = 1e9
_ENOUGH_S = 1e6  # the longest timeout given to the kernel


class Channel:
    """A socket that one thread at a time may use. Each call transfers everything or raises: `TimeoutError` if that is
    not done by `deadline_s` (of `time.monotonic`), `EOFError` if the other side or the socket is closed. The kernel
    waits for whole arrays: a thread that receives 40 MB takes the GIL once, not once per packet."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def send(self, header: bytes, *bulk: Any, deadline_s: float = _FOREVER_S) -> None:
        """Send a header and then `bulk`, contiguous buffers, as they are. The header must say how many bytes they
        have."""
        for data in (_LENGTH.pack(len(header)) + header, *bulk):
            self._move(self._sock.send, data, socket.SO_SNDTIMEO, deadline_s)

    def receive(self, max_bytes: int, deadline_s: float = _FOREVER_S) -> bytes:
        """The next header. A header longer than `max_bytes` raises `EOFError`, since a healthy process sends none."""
        length = bytearray(_LENGTH.size)
        self.receive_into(length, deadline_s)
        (n,) = _LENGTH.unpack(length)
        if n > max_bytes:
            raise EOFError(f"a header of {n} bytes")
        header = bytearray(n)
        self.receive_into(header, deadline_s)
        return bytes(header)

    def receive_into(self, buffer: Any, deadline_s: float = _FOREVER_S) -> None:
        """Fill a buffer with the next bytes."""
        self._move(lambda v: self._sock.recv_into(v, 0, socket.MSG_WAITALL), buffer, socket.SO_RCVTIMEO, deadline_s)

    def close(self) -> None:
        self._sock.close()

    def _move(self, call: Callable[[memoryview], int], data: Any, option: int, deadline_s: float) -> None:
        view = memoryview(data).cast("B") if memoryview(data).nbytes else memoryview(b"")
        while view:
            left_s = min(deadline_s - time.monotonic(), _ENOUGH_S)
            if left_s <= 0:
                raise TimeoutError
            try:
                self._sock.setsockopt(socket.SOL_SOCKET, option, timeval(left_s))
                n = call(view)
            except BlockingIOError:
                raise TimeoutError from None
            except OSError as e:
                raise EOFError(str(e)) from None
            if not n:
                raise EOFError("the other side has closed")
            view = view[n:]


def timeval(seconds: float) -> bytes:
    """The kernel's `struct timeval`, rounded up, since zero means no timeout. A million microseconds would be an
    error."""
    return struct.pack("ll", *divmod(math.ceil(seconds * 1e6), 1_000_000))
