"""The protocol of transports, and what they share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from hydrainfer.core import ExportHandle, HydraError
from hydrainfer.storage.store import BlockStore

TIMEOUT_S = 10.0
CopyBlocks = Callable[[Tensor, Tensor, Tensor | int, Tensor], None]
"""`copy_blocks(to, to_ids, source, source_ids)`; `source` is a tensor, or an address at which memory is mapped."""


class TransportError(HydraError):
    """The blocks of a peer could not be copied. Nothing writes into the target any more."""


class Unreachable(TransportError):
    """This transport does not reach that peer from here; another may."""


def compute_alone() -> None:
    """Make torch compute on the calling thread only, from now on."""
    torch.get_num_threads()  # must come first, or the next line would set the number for every thread
    torch.set_num_threads(1)


class Transport(Protocol):
    """One way to read peers' blocks. Only one thread at a time may ask for copies from one owner."""

    def copy(self, source: ExportHandle, source_ids: list[int], store: BlockStore, ids: list[int]) -> None:
        """Copy the peer's blocks `source_ids` into blocks `ids` of `store`, pairwise. Returns when the bytes are there.
        Raises `TransportError` if the copy fails, at the latest after the transport's timeout."""

    def forget(self, owner: str) -> None:
        """Drop the state kept for a peer that is gone. A running copy from it soon fails. Any thread; does not wait."""

    def close(self) -> None:
        """Forget all peers. No copy may be asked for afterwards."""


class BlockRun(NamedTuple):
    """A run of blocks that are consecutive on both sides."""

    first: int
    into: int
    n: int


def runs(source_ids: list[int], ids: list[int]) -> Iterator[BlockRun]:
    start = 0
    for i in range(1, len(ids) + 1):
        if i == len(ids) or source_ids[i] != source_ids[i - 1] + 1 or ids[i] != ids[i - 1] + 1:
            yield BlockRun(source_ids[start], ids[start], i - start)
            start = i


def pieces_of(source: ExportHandle, source_ids: list[int], store: BlockStore, ids: list[int]) -> list[BlockRun]:
    """The runs of a copy. Raises `TransportError` unless both caches have these blocks, of the same size."""
    if source.block_bytes != store.spec.block_bytes:
        raise TransportError(f"blocks of {source.owner} have {source.block_bytes} bytes, ours {store.spec.block_bytes}")
    pieces = list(runs(source_ids, ids)) if len(source_ids) == len(ids) else [BlockRun(-1, -1, 0)]
    check_blocks([(p.first, p.n) for p in pieces], source.n_blocks)
    check_blocks([(p.into, p.n) for p in pieces], store.n_blocks)
    return pieces


def check_blocks(pieces: Sequence[tuple[int, int]], n_blocks: int) -> None:
    """Check that blocks `pieces`, (first block, number of blocks), exist. Raises `TransportError`."""
    for first, n in pieces:
        if first < 0 or n < 1 or first + n > n_blocks:
            raise TransportError(f"there are no blocks {first} to {first + n - 1} among {n_blocks}")


def find(
    stores: Mapping[str, BlockStore], spec: str, block_bytes: int, pieces: Sequence[tuple[int, int]]
) -> BlockStore:
    """The store that a peer asks for. Raises `TransportError` if there is none with these blocks, of this size."""
    store = stores.get(spec)
    if store is None or store.spec.block_bytes != block_bytes:
        raise TransportError(f"no cache {spec!r} with blocks of {block_bytes} bytes here")
    check_blocks(pieces, store.n_blocks)
    return store


class LocalExports:
    """The stores that the instances of this process read from each other, by address."""

    def __init__(self) -> None:
        self._stores: dict[str, BlockStore] = {}

    def add(self, address: str, store: BlockStore) -> None:
        self._stores[address] = store

    def remove(self, address: str) -> None:
        self._stores.pop(address, None)

    def get(self, address: str) -> BlockStore | None:
        return self._stores.get(address)


class PeerSession(Protocol):
    """The state that a transport keeps for one peer."""

    def abort(self) -> None:
        """Make a running use of the session fail soon. Any thread, any time; does not wait."""

    def close(self) -> None:
        """Free everything. Called once, when nobody uses the session."""


S = TypeVar("S", bound=PeerSession)


class _OpenSession(Generic[S]):
    __slots__ = ("busy", "dead", "session")

    def __init__(self, session: S) -> None:
        self.session, self.busy, self.dead = session, False, False


class Peers(Generic[S]):
    """The sessions of a transport, by owner."""

    def __init__(self) -> None:
        self._kept: dict[str, _OpenSession[S]] = {}
        self._lock = threading.Lock()
        self._closed = False

    @contextmanager
    def use(self, owner: str, make: Callable[[], S]) -> Iterator[S]:
        """The session with `owner`, made by `make` (which does not wait) if there is none. An exception ends the
        session."""
        with self._lock:
            if self._closed:
                raise TransportError("closed")
            kept = self._kept.get(owner)
            if kept is None:
                kept = self._kept[owner] = _OpenSession(make())
            assert not kept.busy, owner
            kept.busy = True
        try:
            yield kept.session
        except BaseException:
            self.forget(owner)
            raise
        finally:
            with self._lock:
                kept.busy = False
                dead = kept.dead  # read under the lock: a later `forget` finds it idle and closes it
            if dead:
                kept.session.close()

    def forget(self, owner: str) -> None:
        with self._lock:
            kept = self._kept.pop(owner, None)
            if kept is None:
                return
            kept.dead = True
            idle = not kept.busy  # else its user closes it
        kept.session.abort()
        if idle:
            kept.session.close()

    def close(self) -> None:
        """Forget all peers, and allow no new sessions. Safe to repeat."""
        with self._lock:
            self._closed = True
        for owner in list(self._kept):
            self.forget(owner)


class PeerTransport(Generic[S]):
    """The common part of transports that keep a session per peer."""

    def __init__(self) -> None:
        self._peers: Peers[S] = Peers()

    def forget(self, owner: str) -> None:
        self._peers.forget(owner)

    def close(self) -> None:
        self._peers.close()
