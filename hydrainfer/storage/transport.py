"""Copying blocks from a peer's caches into ours, on a thread of its own so that no lane waits for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from queue import SimpleQueue
from typing import Protocol

import torch

from hydrainfer.core import ExportHandle
from hydrainfer.storage.store import BlockStore

_log = logging.getLogger(__name__)


class Transport(Protocol):
    """One way to reach a peer's blocks. Used by one thread."""

    def copy(self, source: ExportHandle, source_ids: list[int], store: BlockStore, ids: list[int]) -> None:
        """Blocks `source_ids` of the peer into blocks `ids` of `store`, pairwise; returns when the bytes are there and
        raises if they are not. The two caches have the same spec."""


class LocalExports:
    """The stores of this process that its instances read from each other, by address."""

    def __init__(self) -> None:
        self._stores: dict[str, BlockStore] = {}

    def add(self, address: str, store: BlockStore) -> ExportHandle:
        self._stores[address] = store
        return store.export("local", address)

    def __getitem__(self, address: str) -> BlockStore:
        return self._stores[address]


class LocalTransport:
    """From store to store within the process: one copy per run of neighbouring blocks."""

    def __init__(self, exports: LocalExports) -> None:
        self._exports = exports

    def copy(self, source: ExportHandle, source_ids: list[int], store: BlockStore, ids: list[int]) -> None:
        data = self._exports[source.address].data
        for first, into, n in runs(source_ids, ids):
            store.data[into : into + n].copy_(data[first : first + n], non_blocking=True)
        if store.data.device.type == "cuda":
            torch.cuda.current_stream(store.data.device).synchronize()


def runs(source_ids: list[int], ids: list[int]) -> Iterator[tuple[int, int, int]]:
    """(first source block, first target block, how many) of the pieces that are contiguous on both sides."""
    start = 0
    for i in range(1, len(ids) + 1):
        if i == len(ids) or source_ids[i] != source_ids[i - 1] + 1 or ids[i] != ids[i - 1] + 1:
            yield source_ids[start], ids[start], i - start
            start = i


class Copy:
    """A copy in flight; an `engine.ports.Completion`. The copying thread sets `done` once."""

    __slots__ = ("done",)

    def __init__(self) -> None:
        self.done: bool | None = None

    def poll(self, now: float) -> bool | None:  # noqa: ARG002 - a modelled copy needs the time
        return self.done

    def ready_at(self) -> float | None:
        return None


class StorePuller:
    """An `engine.ports.Puller`: `transports` by name, one thread, and `wake()` after each copy."""

    def __init__(
        self,
        stores: Mapping[str, BlockStore],
        exports: dict[str, ExportHandle],
        transports: Mapping[str, Transport],
        wake: Callable[[], None],
    ) -> None:
        self.exports = exports
        self._stores = stores
        self._transports = transports
        self._wake = wake
        self._queue: SimpleQueue[tuple[dict, dict, Copy] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="hydrainfer-pull", daemon=True)
        self._thread.start()

    def pull(self, sources: dict[str, ExportHandle], pulls: dict[str, tuple[list[int], list[int]]]) -> Copy:
        copy = Copy()
        self._queue.put((sources, pulls, copy))
        return copy

    def close(self) -> None:
        """Safe to repeat."""
        self._queue.put(None)
        self._thread.join()

    def _loop(self) -> None:
        torch.get_num_threads()  # first, or the next line would set the number for every thread
        torch.set_num_threads(1)
        device = next((s.data.device for s in self._stores.values()), torch.device("cpu"))
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        while (item := self._queue.get()) is not None:
            sources, pulls, copy = item
            try:
                with torch.inference_mode(), torch.cuda.stream(stream):
                    for spec, (source_ids, ids) in pulls.items():
                        handle = sources[spec]
                        self._transports[handle.transport].copy(handle, source_ids, self._stores[spec], ids)
                copy.done = True
            except Exception:
                _log.exception("a copy of blocks failed")
                copy.done = False
            self._wake()
