"""Copies between any two hosts, over a few sockets per peer, directly from the source's memory into the target's."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing

import torch

from hydrainfer.core import ExportHandle
from hydrainfer.storage.packets import MAX_PIECES, Granted, Read
from hydrainfer.storage.staging import incoming
from hydrainfer.storage.store import BlockStore
from hydrainfer.storage.transport import TIMEOUT_S, BlockRun, PeerTransport, TransportError, pieces_of
from hydrainfer.storage.way import Way, anywhere
from hydrainfer.storage.wire import BlockClient, PeerSocket, address_of

_ALONE_BYTES = 1 << 20  # fewer bytes are not worth a second connection


class TcpTransport(PeerTransport["_Lines"]):
    """The transport over TCP. It keeps at most `n_connections` per peer."""

    def __init__(self, secret: bytes, timeout_s: float = TIMEOUT_S, n_connections: int = 2) -> None:
        self._secret, self._timeout_s, self._n = secret, timeout_s, n_connections
        super().__init__()

    def copy(self, source: ExportHandle, source_ids: list[int], store: BlockStore, ids: list[int]) -> None:
        pieces = pieces_of(source, source_ids, store, ids)
        address, spec = address_of(source.ways["tcp"])
        if not pieces:
            return
        try:
            with self._peers.use(source.owner, lambda: _Lines(source.owner, address, self._secret, self._n)) as lines:
                lines.read(spec, pieces, store, self._timeout_s, source.offer)
        except OSError as e:
            raise TransportError(f"{source.owner}: {e}") from e


class _Lines:
    """The connections to one peer, with a thread for each but the first."""

    def __init__(self, owner: str, address: tuple[str, int], secret: bytes, n: int) -> None:
        self._lines = [BlockClient(owner, address, secret) for _ in range(n)]
        self._threads = ThreadPoolExecutor(max(1, n - 1), f"hydrainfer-tcp-{owner}")

    def read(self, spec: str, pieces: list[BlockRun], store: BlockStore, timeout_s: float, offer: str) -> None:
        n_bytes = sum(p.n for p in pieces) * store.spec.block_bytes
        n = len(self._lines) if n_bytes > _ALONE_BYTES else 1
        first, *others = zip(self._lines, shares(pieces, n))
        what = store, timeout_s, offer
        beside = [self._threads.submit(self._guarded, line, spec, share, *what) for line, share in others]
        try:
            self._guarded(first[0], spec, first[1], *what)
        finally:
            wait(beside)  # no thread may write after this
        for future in beside:
            future.result()

    def _guarded(
        self, line: BlockClient, spec: str, pieces: list[BlockRun], store: BlockStore, timeout_s: float, offer: str
    ) -> None:
        try:
            with torch.inference_mode():
                _read(line.open(timeout_s), spec, pieces, store, offer)
        except BaseException:
            self.abort()  # the other connections need not go on
            raise

    def abort(self) -> None:
        for line in self._lines:
            line.abort()

    def close(self) -> None:
        self._threads.shutdown()  # immediate: the threads are idle, because `read` has waited for them
        for line in self._lines:
            line.close()


def _read(connection: PeerSocket, spec: str, pieces: list[BlockRun], store: BlockStore, offer: str) -> None:
    for start in range(0, len(pieces), MAX_PIECES):
        some = pieces[start : start + MAX_PIECES]
        connection.send(Read(spec, store.spec.block_bytes, tuple((p.first, p.n) for p in some), offer))
        if not isinstance(connection.receive(), Granted):
            raise TransportError("the peer answered something else")
        with closing(incoming(store, [(p.into, p.n) for p in some])) as places:
            for views in places:
                connection.fill(views)


def shares(pieces: list[BlockRun], n: int) -> Iterator[list[BlockRun]]:
    """`pieces` divided into at most `n` lists with nearly the same number of blocks."""
    most = -(-sum(p.n for p in pieces) // n)
    share: list[BlockRun] = []
    room = most
    for piece in pieces:
        rest = piece
        while rest.n:
            k = min(rest.n, room)
            share.append(BlockRun(rest.first, rest.into, k))
            rest = BlockRun(rest.first + k, rest.into + k, rest.n - k)
            room -= k
            if room == 0:
                yield share
                share, room = [], most
    if share:
        yield share


WAY = Way(
    "tcp",
    check=lambda _: "",
    offer=None,
    reaches=anywhere,
    open=lambda tools: TcpTransport(tools.secret, tools.timeout_s),
    maps=False,
)
