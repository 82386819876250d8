"""The messages between the hub and the instances. Between instances it is `core.Parcel`; nothing else is on a socket.

    instance: Hello ─────────────> hub      I am here (or `Failed`: I cannot start)
              <── Orders(Members, Beat) ──  who else is, and how busy
              <── Orders(Learned) ────────  what others have computed, if this one hands requests to them
              <── Orders(Submit, Cancel) ─
              Report ───────────────>       one per step: outputs, events, moves, load; also the heartbeat
              <── Orders(Close) ──────────

Times on the wire are the hub's clock.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import msgspec

from hydrainfer.core import Cached, ErrorInfo, InstanceStats, LifecycleEvent, Load, Output, Parcel, Request


class Peer(msgspec.Struct, frozen=True):
    """One live incarnation of an instance. `suspect`: it has not been heard of for a while."""

    name: str
    role: str
    incarnation: int
    address: str
    suspect: bool = False


class Hello(msgspec.Struct, frozen=True, tag=True):
    """An instance runs. `host`: see `machine.host_identity`; `facts`: what it found out at start, by name of the
    option."""

    peer: Peer
    host: str
    pid: int
    facts: dict[str, str | int | float]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """An instance cannot start, or has broken down."""

    name: str
    incarnation: int
    error: ErrorInfo


class Moved(NamedTuple):
    """A request belongs to that incarnation of an instance after `hops` moves."""

    request_id: str
    owner: str
    incarnation: int
    hops: int


class Report(msgspec.Struct, frozen=True, tag=True):
    """The results of a step, at `at_s`. `stats` only now and then. `cached`: of an instance that keeps KV. `n`: number
    of the report, from 1: one that is missing was lost on its way, and its sender is of no use any more (0: not
    counted)."""

    name: str
    incarnation: int
    at_s: float
    outputs: tuple[Output, ...] = ()
    events: tuple[LifecycleEvent, ...] = ()
    moved: tuple[Moved, ...] = ()
    load: Load = Load()
    stats: InstanceStats | None = None
    n: int = 0
    cached: Cached | None = None


ToHub = Hello | Failed | Report


class Members(msgspec.Struct, frozen=True, tag=True):
    """All live incarnations. One that is no longer named is known to be dead."""

    peers: tuple[Peer, ...]


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Run a request, with the tokens that it has from an earlier life."""

    request: Request
    produced: tuple[int, ...] = ()


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """End these requests, wherever they are or will be."""

    request_ids: tuple[str, ...]


class Beat(msgspec.Struct, frozen=True, tag=True):
    """The hub lives; how busy each instance is."""

    loads: dict[str, Load]


class Learned(msgspec.Struct, frozen=True, tag=True):
    """The prefixes that came to and went from instance `name`, which prefills."""

    name: str
    cached: Cached


class Close(msgspec.Struct, frozen=True, tag=True):
    """End everything and stop."""


HubOrder = Members | Submit | Cancel | Beat | Learned | Close


class Orders(msgspec.Struct, frozen=True, tag=True):
    """All that the hub has to say to one incarnation, sent at `hub_s`; `n` as in `Report`."""

    incarnation: int
    hub_s: float
    orders: tuple[HubOrder, ...]
    n: int = 0


ToInstance = Orders | Parcel

_M = TypeVar("_M")
_to_hub = msgspec.msgpack.Decoder(ToHub)
_to_instance = msgspec.msgpack.Decoder(ToInstance)
_encoder = msgspec.msgpack.Encoder()


def encode(message: ToHub | ToInstance) -> bytes:
    return _encoder.encode(message)


def decode_to_hub(data: bytes) -> ToHub:
    """The message. Raises `msgspec.DecodeError` on anything else."""
    return _decode(_to_hub, data)


def decode_to_instance(data: bytes) -> ToInstance:
    """The message. Raises `msgspec.DecodeError` on anything else."""
    return _decode(_to_instance, data)


def _decode(decoder: msgspec.msgpack.Decoder[_M], data: bytes) -> _M:
    try:
        return decoder.decode(data)
    except (UnicodeDecodeError, RecursionError) as e:  # msgspec lets these out as they are
        raise msgspec.DecodeError(str(e)) from None
