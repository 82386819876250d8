"""The messages of instances about blocks: frames of a fixed schema."""

from __future__ import annotations

import msgspec

from hydrainfer.storage.transport import TransportError

MAX_FRAME = 1 << 20
MAX_PIECES = 16_384  # pieces of one request


class Attach(msgspec.Struct, frozen=True, tag=True):
    """Target: I want blocks of this owner, of no other incarnation."""

    owner: str


class Read(msgspec.Struct, frozen=True, tag=True):
    """Target: send these (first block, how many) of a cache over this connection."""

    spec: str
    block_bytes: int
    pieces: tuple[tuple[int, int], ...]


class Join(msgspec.Struct, frozen=True, tag=True):
    """Target: make a two-rank group with me, you are rank 0; this connection is its store and tells what to send."""

    backend: str


class Pull(msgspec.Struct, frozen=True, tag=True):
    """Target: send these through the group, as `seq`-th."""

    seq: int
    spec: str
    block_bytes: int
    pieces: tuple[tuple[int, int], ...]


class Put(msgspec.Struct, frozen=True, tag=True):
    """Either: a key of the group's store."""

    key: str
    value: bytes


class Granted(msgspec.Struct, frozen=True, tag=True):
    """Source: it comes. After `Read`: its bytes follow."""


class Sent(msgspec.Struct, frozen=True, tag=True):
    """Source: all of `seq` has left."""

    seq: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Source: no, and this connection ends."""

    reason: str


Frame = Attach | Read | Join | Pull | Put | Granted | Sent | Refused
_decoder = msgspec.msgpack.Decoder(Frame)


def encode(message: Frame) -> bytes:
    body = msgspec.msgpack.encode(message)
    assert len(body) <= MAX_FRAME, len(body)
    return len(body).to_bytes(4, "little") + body


def length(header: bytes) -> int:
    n = int.from_bytes(header, "little")
    if n > MAX_FRAME:
        raise TransportError(f"a frame of {n} bytes")
    return n


def decode(body: bytes) -> Frame:
    try:
        message = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:  # a ValidationError is the first
        raise TransportError(f"not a message: {e}") from None
    if isinstance(message, Refused):
        raise TransportError(f"refused: {message.reason}")
    return message
