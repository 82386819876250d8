"""Transfer of pictures to encoders: fetched by reference when they are needed, over a socket of their own.

The server keeps them until the request ends, so that a lost encode can be repeated at any instance.
"""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import numpy as np
import zmq

from hydrainfer.cluster.mesh import Keys, speak_with
from hydrainfer.core import PixelSource, Unavailable

_TIMEOUT_MS = 2_000
_QUESTIONS = 3


class _Header(msgspec.Struct, frozen=True):
    """The frame that precedes the bytes of a uint8 array."""

    shape: tuple[int, ...]


def answer_pixels(socket: zmq.Socket, pixels: PixelSource) -> None:
    """Answer the requests that have arrived at the ROUTER `socket`. The answer is empty if a picture is gone."""
    while True:
        try:
            who, ref = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        except ValueError:
            continue  # not two frames
        try:
            array = pixels(ref.decode())
        except (KeyError, UnicodeDecodeError):
            socket.send_multipart([who, ref, b"", b""])
            continue
        header = msgspec.msgpack.encode(_Header(array.shape))
        frames: list[Any] = [who, ref, header, np.ascontiguousarray(array)]
        socket.send_multipart(frames, copy=False)


class PixelClient:
    """A `PixelSource` that fetches over a socket of its own. A call blocks; calls of several threads take turns."""

    def __init__(self, address: str, keys: Keys | None = None) -> None:
        self._address, self._keys = address, keys
        self._context = zmq.Context(io_threads=1)
        self._socket: zmq.Socket | None = None
        self._lock = threading.Lock()

    def __call__(self, ref: str) -> np.ndarray:
        """The picture as stored, uint8. Raises `KeyError` if the server no longer has it, `Unavailable` if the server
        does not answer."""
        with self._lock:
            socket = self._socket or self._open()
            for _ in range(_QUESTIONS):  # a request may be lost with a connection
                if not socket.poll(_TIMEOUT_MS, zmq.POLLOUT):
                    continue  # no server is there, or it does not admit us
                socket.send(ref.encode())
                while socket.poll(_TIMEOUT_MS):
                    got, header, data = socket.recv_multipart(copy=False)
                    if got.bytes != ref.encode():
                        continue  # a late answer to an earlier request
                    if not header.bytes:
                        raise KeyError(ref)
                    shape = msgspec.msgpack.decode(header.bytes, type=_Header).shape
                    return np.frombuffer(data.buffer, dtype=np.uint8).reshape(shape)
            raise Unavailable("the server did not hand out a picture in time; retry later", retry_after_s=1.0)

    def _open(self) -> zmq.Socket:
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)  # unsent requests must not delay the end
        speak_with(self._socket, self._address, self._keys)
        return self._socket

    def close(self) -> None:
        self._context.destroy(linger=0)
