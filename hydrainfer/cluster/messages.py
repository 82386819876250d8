"""The messages between the hub and the instances. Instances send each other only `core.Parcel`.

    instance: Hello ─────────────> hub      I am here (or `Failed`: I cannot start)
              <── Orders(Members, Beat) ──  the other instances, and how busy they are
              <── Orders(Learned) ────────  prefixes that others have cached, if this one hands requests to them
              <── Orders(Submit, Cancel) ─
              Report ───────────────>       one per step: outputs, events, moves, load; also the heartbeat
              <── Orders(Become) ─────────          do other stages
              <── Orders(Forget) ─────────          what can be reused; answered in a Report
              <── Orders(Close) ──────────

Times in messages are on the hub's clock.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import msgspec

from hydrainfer.core import Cached, ErrorInfo, InstanceStats, LifecycleEvent, Load, Output, Parcel, Request


class Peer(msgspec.Struct, frozen=True):
    """One live incarnation of an instance. `suspect`: it was silent for a while, or is about to be restarted. `host`:
    see `Hello`; "" before the census has announced it. `cluster`: the cluster that it belongs to."""

    name: str
    role: str
    incarnation: int
    address: str
    suspect: bool = False
    host: str = ""
    cluster: str = ""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """An instance runs. `host`: see `machine.host_identity`; `facts`: values that it determined at start, by name of
    the option."""

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
    """After `hops` moves, a request belongs to this incarnation of instance `owner`."""

    request_id: str
    owner: str
    incarnation: int
    hops: int


class Report(msgspec.Struct, frozen=True, tag=True):
    """The results of a step, at `at_s`. `stats`: only at every beat. `cached`: changes of the prefix cache, from an
    instance that keeps KV. `n`: the number of the report, from 1; if a number is missing, a report was lost and its
    sender is killed (0: not counted). `cut`: the peers that it cannot reach; `stuck`: its requests that only those
    could take. `forgotten`: the answers to `Forget` orders, by their numbers: blocks by cache."""

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
    cut: tuple[str, ...] = ()
    stuck: tuple[str, ...] = ()
    forgotten: tuple[tuple[int, dict[str, int]], ...] = ()


ToHub = Hello | Failed | Report


class Members(msgspec.Struct, frozen=True, tag=True):
    """All live incarnations. An incarnation that is no longer in the list is dead."""

    peers: tuple[Peer, ...]


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Run a request. `produced`: the tokens that it has from an earlier life."""

    request: Request
    produced: tuple[int, ...] = ()


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """End these requests, also if they arrive only later."""

    request_ids: tuple[str, ...]


class Beat(msgspec.Struct, frozen=True, tag=True):
    """The hub's heartbeat, with the load of each instance and the peers that it cannot reach."""

    loads: dict[str, Load]
    cuts: dict[str, tuple[str, ...]] = {}


class Learned(msgspec.Struct, frozen=True, tag=True):
    """The prefixes that the cache of instance `name` gained and lost."""

    name: str
    cached: Cached


class Become(msgspec.Struct, frozen=True, tag=True):
    """Do the stages of this role from now on; they are loaded. Sent to an instance without requests."""

    role: str


class Forget(msgspec.Struct, frozen=True, tag=True):
    """Forget what later requests could reuse, and say how much that was."""

    number: int


class Close(msgspec.Struct, frozen=True, tag=True):
    """End everything and stop."""


HubOrder = Members | Submit | Cancel | Beat | Learned | Become | Forget | Close


class Orders(msgspec.Struct, frozen=True, tag=True):
    """The orders of the hub to one incarnation, sent at `hub_s`. `n` as in `Report`."""

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
    except (UnicodeDecodeError, RecursionError) as e:  # msgspec does not wrap these
        raise msgspec.DecodeError(str(e)) from None
