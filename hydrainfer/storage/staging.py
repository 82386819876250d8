"""Blocks as buffers that sockets read and write. For a CPU store they are its own memory. For CUDA they are two pieces
of pinned memory: the device copies one while the socket uses the other."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

import torch
from torch import Tensor

from hydrainfer.storage.store import BlockStore

_PINNED_BYTES = 8 << 20


def outgoing(store: BlockStore, pieces: Sequence[tuple[int, int]]) -> Iterator[list[memoryview]]:
    """The bytes of these (first block, number of blocks), in order. Each list is valid until the next is asked for."""
    if store.device.type == "cpu":
        yield [_view(store.bytes[first : first + n]) for first, n in pieces]
        return
    stream, buffers = torch.cuda.current_stream(store.device), (_pinned(store), _pinned(store))
    before: tuple[Tensor, torch.cuda.Event] | None = None
    for i, (first, n) in enumerate(cut(pieces, len(buffers[0]))):
        pinned = buffers[i % 2][:n]
        pinned.copy_(store.bytes[first : first + n], non_blocking=True)  # while the previous piece is sent
        here = pinned, stream.record_event()
        if before is not None:
            yield _when_done(*before)
        before = here
    if before is not None:
        yield _when_done(*before)


def incoming(store: BlockStore, pieces: Sequence[tuple[int, int]]) -> Generator[list[memoryview]]:
    """Buffers for the bytes of these blocks, in order. Fill each list before asking for the next. Once the generator is
    closed, nothing writes to the store any more."""
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
            store.bytes[first : first + n].copy_(pinned, non_blocking=True)  # while the next piece is received
            copies.append(stream.record_event())
    finally:
        stream.synchronize()


def cut(pieces: Sequence[tuple[int, int]], n_most: int) -> Iterator[tuple[int, int]]:
    """The same blocks in pieces of at most `n_most` blocks."""
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
