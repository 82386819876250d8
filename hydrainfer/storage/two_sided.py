"""The transports over Gloo and NCCL. Each (pair of instances, direction, incarnations) has one two-rank group: the
source is rank 0, the target rank 1. A control connection to the source's block server is the group's store, orders the
transfers, and tells the target at once when the source is gone. A group that fails is discarded, and the next pull
makes a new one.

    target                     source
      Join            ──────>   then both make the group, keys by Put
      Pull(seq, ...)  ──────>
      <──────  Granted          both post, in the order of the pieces
      <──────  Sent(seq)        the target waits for the rest, which is on its way
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

from hydrainfer.core import ExportHandle
from hydrainfer.storage.packets import MAX_PIECES, Granted, Join, Packet, Pull, Put, Sent
from hydrainfer.storage.staging import cut
from hydrainfer.storage.store import BlockStore
from hydrainfer.storage.transport import TIMEOUT_S, BlockRun, PeerTransport, TransportError, find, pieces_of
from hydrainfer.storage.wire import BlockClient, PeerSocket, address_of

_SEND_BYTES = 16 << 20  # the most bytes of one send
_STALL_S = 2.0  # the most time of one send, even over a slow network
_SOURCE, _TARGET = 0, 1


class ControlStore(dist.Store):
    """The key-value store of two ranks over their authenticated connection, so that no other port is open. What one
    rank sets, both have."""

    def __init__(self, connection: PeerSocket) -> None:
        super().__init__()
        self._connection = connection
        self._kept: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override] # torch's stub says str, torch gives bytes
        self._kept[key] = bytes(value)
        self._connection.send(Put(key, bytes(value)))

    def get(self, key: str) -> bytes:
        while key not in self._kept:
            message = self._connection.receive()
            if not isinstance(message, Put):
                raise TransportError(f"{type(message).__name__} while a group is made")
            self._kept[message.key] = message.value
        return self._kept[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # noqa: ARG002 - the connection's holds
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        return all(key in self._kept for key in keys)

    def message(self) -> Packet:
        """The next message that is not for the store."""
        while isinstance(message := self._connection.receive(), Put):
            self._kept[message.key] = message.value
        return message


class Backend(NamedTuple):
    """A library for two-sided transfers. `make(store, rank, host, stall_s)` makes a process group of two.
    `finish(works, group, device, timeout_s)` waits until the works are complete, and raises if they fail."""

    name: str
    make: Callable[[dist.Store, int, str, float], Any]
    finish: Callable[[list[Any], Any, torch.device, float], None]


class Group:
    """One rank of a process group of two."""

    def __init__(self, backend: Backend, rank: int, connection: PeerSocket, timeout_s: float) -> None:
        self._backend, self._rank, self._timeout_s = backend, rank, timeout_s
        self.store = ControlStore(connection)
        stall_s = min(_STALL_S, timeout_s)
        self._group = backend.make(self.store, rank, connection.local_host, stall_s)
        self._works: list[Any] = []

    def post(self, store: BlockStore, pieces: list[tuple[int, int]]) -> None:
        """Begin to send (as source) or receive (as target) these blocks."""
        _do(lambda: self._post(store, pieces))

    def _post(self, store: BlockStore, pieces: list[tuple[int, int]]) -> None:
        call = self._group.send if self._rank == _SOURCE else self._group.recv
        n_most = max(1, _SEND_BYTES // store.spec.block_bytes)
        for tag, (first, n) in enumerate(cut(pieces, n_most)):
            self._works.append(call([store.bytes[first : first + n]], 1 - self._rank, tag))

    def finish(self, device: torch.device) -> None:
        """Wait for the posted transfers."""
        _do(lambda: self._backend.finish(self._works, self._group, device, self._timeout_s))
        self._works.clear()

    def drop(self) -> None:
        """Abort the group. After this nothing reads or writes blocks."""
        with suppress(Exception):  # a broken group may raise again
            self._group.abort()
        self._works.clear()  # first: each holds its buffers
        self._group = None


def _do(call: Callable[[], None]) -> None:
    """Raise torch's errors as `TransportError`, without their stack frames, which would keep the group and its buffers
    alive."""
    problem = None
    try:
        call()
    except Exception as e:
        problem = str(e)
    if problem is not None:
        raise TransportError(problem)


def serve_group(
    connection: PeerSocket,
    backend: Backend,
    stores: Mapping[str, BlockStore],
    timeout_s: float,
    reads: Callable[[str], AbstractContextManager[None]],
) -> None:
    """Serve the source's side of a group until the target leaves. `reads`: surrounds the transfer of an offer's blocks,
    and raises if it is over."""
    connection.send(Granted())
    try:
        group = Group(backend, _SOURCE, connection, timeout_s)
    except RuntimeError as e:  # torch's word for a peer that is gone
        raise TransportError(str(e)) from e
    seq = 0
    try:
        while True:
            connection.limit(None)
            request = group.store.message()
            connection.limit(timeout_s, each=True)
            if not isinstance(request, Pull) or request.seq != seq + 1:
                raise TransportError(f"not the pull after {seq}: {request}")
            seq = request.seq
            store = find(stores, request.spec, request.block_bytes, request.pieces)
            with reads(request.offer):
                connection.send(Granted())
                group.post(store, list(request.pieces))
                group.finish(store.device)
            connection.send(Sent(seq))
    finally:
        group.drop()


class TwoSidedTransport(PeerTransport["_Receiver"]):
    """The transport over groups of `backend`."""

    def __init__(self, backend: Backend, secret: bytes, timeout_s: float = TIMEOUT_S) -> None:
        self._backend, self._secret, self._timeout_s = backend, secret, timeout_s
        super().__init__()

    def copy(self, source: ExportHandle, source_ids: list[int], store: BlockStore, ids: list[int]) -> None:
        pieces = pieces_of(source, source_ids, store, ids)
        address, spec = address_of(source.ways[self._backend.name])
        make = lambda: _Receiver(BlockClient(source.owner, address, self._secret), self._backend, self._timeout_s)  # noqa: E731
        try:
            with self._peers.use(source.owner, make) as receiver:
                receiver.pull(spec, pieces, store, source.offer)
        except (OSError, RuntimeError) as e:
            raise TransportError(f"{source.owner}: {e}") from e


class _Receiver:
    """The target's side of one group."""

    def __init__(self, line: BlockClient, backend: Backend, timeout_s: float) -> None:
        self._line, self._backend, self._timeout_s = line, backend, timeout_s
        self._group: Group | None = None
        self._seq = 0

    def pull(self, spec: str, pieces: list[BlockRun], store: BlockStore, offer: str) -> None:
        connection = self._line.open(self._timeout_s)
        group = self._group or self._join(connection)
        for start in range(0, len(pieces), MAX_PIECES):
            some = pieces[start : start + MAX_PIECES]
            self._seq += 1
            runs = tuple((p.first, p.n) for p in some)
            connection.send(Pull(self._seq, spec, store.spec.block_bytes, runs, offer))
            _expect(group.store.message(), Granted())
            group.post(store, [(p.into, p.n) for p in some])
            _expect(group.store.message(), Sent(self._seq))
            group.finish(store.device)

    def _join(self, connection: PeerSocket) -> Group:
        connection.send(Join(self._backend.name))
        _expect(connection.receive(), Granted())
        self._group = Group(self._backend, _TARGET, connection, self._timeout_s)
        return self._group

    def abort(self) -> None:
        self._line.abort()

    def close(self) -> None:
        if self._group is not None:
            self._group.drop()
        self._line.close()


def _expect(found: Packet, wanted: Packet) -> None:
    if found != wanted:
        raise TransportError(f"the peer answered {found}, not {wanted}")
