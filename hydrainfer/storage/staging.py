"""Blocks as buffers that sockets read and write: a CPU store's own memory; for CUDA, two pieces of pinned memory in
between, of which the device copies one while the socket has the other."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

import torch
from torch import Tensor

from hydrainfer.storage.store import BlockStore

_PINNED_BYTES = 8 << 20


def outgoing(store: BlockStore, pieces: Sequence[tuple[int, int]]) -> Iterator[list[memoryview]]:
    """The bytes of (first block, how many), in order; each list is valid until the next is asked for."""
    if store.device.type == "cpu":
        yield [_view(store.bytes[first : first + n]) for first, n in pieces]
        return
    stream, buffers = torch.cuda.current_stream(store.device), (_pinned(store), _pinned(store))
    before: tuple[Tensor, torch.cuda.Event] | None = None
    for i, (first, n) in enumerate(cut(pieces, len(buffers[0]))):
        pinned = buffers[i % 2][:n]
        pinned.copy_(store.bytes[first : first + n], non_blocking=True)  # while the one before is sent
        here = pinned, stream.record_event()
        if before is not None:
            yield _when_done(*before)
        before = here
    if before is not None:
        yield _when_done(*before)


def incoming(store: BlockStore, pieces: Sequence[tuple[int, int]]) -> Generator[list[memoryview]]:
    """The places of these blocks' bytes, in order; fill each list before asking for the next. Once it is closed,
    nothing writes to the store any more."""
    if store.device.type == "cpu":
        yield [_view(store.bytes[first : first + n]) for first, n in pieces]
        return
    stream, buffers = torch.cuda.current_stream(store.device), (_pinned(store), _pinned(store))
    copies: list[torch.cuda.Event] = []
    try:
        for i, (first, n) in enumerate(cut(pieces, len(buffers[0]))):
            if i >= 2:
                copies[i - 2].synchronize()
            pinned = buffers[i % 2][:n]
            yield [_view(pinned)]
            store.bytes[first : first + n].copy_(pinned, non_blocking=True)  # while the next one is received
            copies.append(stream.record_event())
    finally:
        stream.synchronize()


def cut(pieces: Sequence[tuple[int, int]], n_most: int) -> Iterator[tuple[int, int]]:
    """The same blocks in pieces of at most `n_most`."""
    for first, n in pieces:
        for start in range(0, n, n_most):
            yield first + start, min(n_most, n - start)


def _pinned(store: BlockStore) -> Tensor:
    n = max(1, _PINNED_BYTES // store.spec.block_bytes)
    return torch.empty((n, store.spec.block_bytes), dtype=torch.uint8, pin_memory=True)


def _when_done(pinned: Tensor, copied: torch.cuda.Event) -> list[memoryview]:
    copied.synchronize()
    return [_view(pinned)]


def _view(blocks: Tensor) -> memoryview:
    return blocks.numpy().reshape(-1).data
