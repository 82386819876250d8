"""The messages between instances about blocks, as frames of a fixed schema."""

from __future__ import annotations

import msgspec

from hydrainfer.storage.transport import TransportError

MAX_PACKET = 1 << 20
MAX_PIECES = 16_384  # pieces of one request


class Attach(msgspec.Struct, frozen=True, tag=True):
    """Target: asks for blocks of this owner, and of no other incarnation."""

    owner: str


class Read(msgspec.Struct, frozen=True, tag=True):
    """Target: asks for these (first block, number of blocks) of a cache over this connection. `offer`: as in
    `ExportHandle`."""

    spec: str
    block_bytes: int
    pieces: tuple[tuple[int, int], ...]
    offer: str = ""


class Join(msgspec.Struct, frozen=True, tag=True):
    """Target: asks for a two-rank group in which the source is rank 0. This connection is its store and its control
    channel."""

    backend: str


class Pull(msgspec.Struct, frozen=True, tag=True):
    """Target: asks to send these blocks through the group, as transfer number `seq`."""

    seq: int
    spec: str
    block_bytes: int
    pieces: tuple[tuple[int, int], ...]
    offer: str = ""


class Put(msgspec.Struct, frozen=True, tag=True):
    """Either side: sets a key of the group's store."""

    key: str
    value: bytes


class Granted(msgspec.Struct, frozen=True, tag=True):
    """Source: agrees. After `Read`, the bytes follow."""


class Sent(msgspec.Struct, frozen=True, tag=True):
    """Source: all blocks of transfer `seq` are sent."""

    seq: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Source: refuses, and ends this connection."""

    reason: str


Packet = Attach | Read | Join | Pull | Put | Granted | Sent | Refused
_decoder = msgspec.msgpack.Decoder(Packet)


def encode(message: Packet) -> bytes:
    body = msgspec.msgpack.encode(message)
    assert len(body) <= MAX_PACKET, len(body)
    return len(body).to_bytes(4, "little") + body


def length(header: bytes) -> int:
    n = int.from_bytes(header, "little")
    if n > MAX_PACKET:
        raise TransportError(f"a frame of {n} bytes")
    return n


def decode(body: bytes) -> Packet:
    try:
        message = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:  # a ValidationError is the first
        raise TransportError(f"not a message: {e}") from None
    if isinstance(message, Refused):
        raise TransportError(f"refused: {message.reason}")
    return message
