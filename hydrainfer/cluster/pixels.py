"""Pictures on their way to an encoder: asked for by reference when they are needed, as frames beside the messages.

The server keeps them until the request ends, so that a lost encode can be repeated anywhere.
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
    """The frame before the bytes of a uint8 array."""

    shape: tuple[int, ...]


def answer_pixels(socket: zmq.Socket, pixels: PixelSource) -> None:
    """Answer what has been asked of the ROUTER `socket`; a picture that is no longer there gets an empty answer."""
    while True:
        try:
            who, ref = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        except ValueError:
            continue  # not a question
        try:
            array = pixels(ref.decode())
        except (KeyError, UnicodeDecodeError):
            socket.send_multipart([who, ref, b"", b""])
            continue
        header = msgspec.msgpack.encode(_Header(array.shape))
        frames: list[Any] = [who, ref, header, np.ascontiguousarray(array)]
        socket.send_multipart(frames, copy=False)


class PixelClient:
    """A `PixelSource` over a socket of its own. Used on one thread at a time, which it blocks."""

    def __init__(self, address: str, keys: Keys | None = None) -> None:
        self._address, self._keys = address, keys
        self._context = zmq.Context(io_threads=1)
        self._socket: zmq.Socket | None = None
        self._lock = threading.Lock()

    def __call__(self, ref: str) -> np.ndarray:
        """uint8, as stored. Raises `KeyError` if the server has it no longer, `Unavailable` if it does not answer."""
        with self._lock:
            socket = self._socket or self._open()
            for _ in range(_QUESTIONS):  # one may be lost with a connection
                if not socket.poll(_TIMEOUT_MS, zmq.POLLOUT):
                    continue  # nobody is there, or nobody who admits us
                socket.send(ref.encode())
                while socket.poll(_TIMEOUT_MS):
                    got, header, data = socket.recv_multipart(copy=False)
                    if got.bytes != ref.encode():
                        continue  # the answer to a question that was given up
                    if not header.bytes:
                        raise KeyError(ref)
                    shape = msgspec.msgpack.decode(header.bytes, type=_Header).shape
                    return np.frombuffer(data.buffer, dtype=np.uint8).reshape(shape)
            raise Unavailable("the server did not hand out a picture in time; retry later", retry_after_s=1.0)

    def _open(self) -> zmq.Socket:
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)  # a question nobody waits for keeps no thread alive
        speak_with(self._socket, self._keys)
        self._socket.connect(self._address)
        return self._socket

    def close(self) -> None:
        self._context.destroy(linger=0)
