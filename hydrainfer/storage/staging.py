"""Blocks as buffers that sockets read and write: a CPU store's own memory; for CUDA, pinned memory in between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hydrainfer.storage.store import BlockStore

_PINNED_BYTES = 8 << 20


def outgoing(store: BlockStore, pieces: Sequence[tuple[int, int]]) -> Iterator[list[memoryview]]:
    """The bytes of (first block, how many), in order; each list is valid until the next is asked for."""
    if store.device.type == "cpu":
        yield [_view(store.bytes[first : first + n]) for first, n in pieces]
        return
    pinned = _pinned(store)
    for first, n in cut(pieces, len(pinned)):
        pinned[:n].copy_(store.bytes[first : first + n], non_blocking=True)
        torch.cuda.current_stream(store.device).synchronize()
        yield [_view(pinned[:n])]


def incoming(store: BlockStore, pieces: Sequence[tuple[int, int]]) -> Iterator[list[memoryview]]:
    """The places of these blocks' bytes, in order; fill each list before asking for the next."""
    if store.device.type == "cpu":
        yield [_view(store.bytes[first : first + n]) for first, n in pieces]
        return
    pinned = _pinned(store)
    for first, n in cut(pieces, len(pinned)):
        yield [_view(pinned[:n])]
        store.bytes[first : first + n].copy_(pinned[:n], non_blocking=True)
        torch.cuda.current_stream(store.device).synchronize()


def cut(pieces: Sequence[tuple[int, int]], n_most: int) -> Iterator[tuple[int, int]]:
    """The same blocks in pieces of at most `n_most`."""
    for first, n in pieces:
        for start in range(0, n, n_most):
            yield first + start, min(n_most, n - start)


def _pinned(store: BlockStore) -> Tensor:
    n = max(1, _PINNED_BYTES // store.spec.block_bytes)
    return torch.empty((n, store.spec.block_bytes), dtype=torch.uint8, pin_memory=True)


def _view(blocks: Tensor) -> memoryview:
    return blocks.numpy().reshape(-1).data
