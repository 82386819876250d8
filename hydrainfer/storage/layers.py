"""Copies of blocks from host memory to a GPU, layer after layer: a batch that reads them begins before the last layer
is there, and waits before each for that one only."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from hydrainfer.cache import Pulls
from hydrainfer.ops import upload
from hydrainfer.storage.store import BlockStore
from hydrainfer.storage.transport import CopyBlocks, compute_alone

_log = logging.getLogger(__name__)
ACCESS = 16
"""The bytes that a copy by kernels takes at once: blocks are a multiple of it."""


class Mark(Protocol):
    """A place in the work of a device, behind what was enqueued when it was made."""

    def wait(self) -> None:
        """Make what the calling thread enqueues from now on wait until the device has come here."""

    def synchronize(self) -> None:
        """Wait until the device has come here."""


class Queue(Protocol):
    """The work of a device that one thread enqueues."""

    def copy(self, to: Tensor, to_ids: Tensor, source: Tensor, source_ids: Tensor) -> None:
        """Enqueue a copy of rows `source_ids` of `source` to rows `to_ids` of `to`."""

    def mark(self) -> Mark: ...


class LayerCopy:
    """A copy of which a batch may wait for each layer; an `engine.ports.CopyTicket`. `wait_for`, once all of it is
    enqueued: `wait_for(layer)` makes what the calling thread enqueues wait for what this layer reads."""

    __slots__ = ("done", "wait_for")

    cut = False

    def __init__(self) -> None:
        self.done: bool | None = None
        self.wait_for: Callable[[int], None] | None = None

    def poll(self, now: float) -> bool | None:  # noqa: ARG002 - as all tickets
        return self.done

    def ready_at(self) -> float | None:
        return None


class _Task(NamedTuple):
    pulls: Pulls
    copy: LayerCopy


class LayerLoader:
    """An `engine.copies.Mover` from the stores `host` to those of the `device`, by cache. A thread of its own enqueues
    the copies, and calls `make_queue` until it has made a queue. It calls `wake()` when a copy is enqueued, and when it
    is over."""

    def __init__(
        self,
        host: Mapping[str, BlockStore],
        device: Mapping[str, BlockStore],
        make_queue: Callable[[], Queue],
        wake: Callable[[], None],
    ) -> None:
        self._host, self._device, self._make_queue, self._wake = host, device, make_queue, wake
        self._queue: Queue | None = None
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="hydrainfer-layers", daemon=True)
        self._thread.start()

    def begin(
        self,
        source: str,  # noqa: ARG002 - as all movers
        pulls: Pulls,
        now: float,  # noqa: ARG002
        limit_s: float = float("inf"),  # noqa: ARG002
    ) -> LayerCopy:
        copy = LayerCopy()
        self._tasks.put(_Task(pulls, copy))
        return copy

    def close(self) -> None:
        """Wait for what is running, then end the thread. Safe to repeat."""
        self._tasks.put(None)
        self._thread.join()

    def _loop(self) -> None:
        compute_alone()
        with torch.inference_mode():
            while (task := self._tasks.get()) is not None:
                task.copy.done = self._copied(task)
                self._wake()

    def _copied(self, task: _Task) -> bool:
        try:
            if self._queue is None:
                self._queue = self._make_queue()
            marks = self._enqueue(self._queue, task.pulls)
            task.copy.wait_for = partial(_wait_for, marks)
            self._wake()
            marks[max(marks)].synchronize()
        except Exception:
            _log.exception("a copy of blocks from host memory failed")
            return False
        return True

    def _enqueue(self, queue: Queue, pulls: Pulls) -> dict[int, Mark]:
        """Enqueue the copies, and mark where each layer is there. What is read before all layers, such as pictures,
        goes with the first."""
        marks: dict[int, Mark] = {}
        pieces = sorted(
            (layer, name, place) for name in pulls.blocks for place, layer in enumerate(self._device[name].spec.layers)
        )
        ids = {
            name: upload({"from": np.array(theirs), "to": np.array(ours)}, self._device[name].device)
            for name, (theirs, ours) in pulls.blocks.items()
        }
        for layer, name, place in pieces:
            source, to, on = self._host[name], self._device[name], ids[name]
            n = rows_of(to)
            if n is not None:
                queue.copy(_rows(to, n), on["to"] * n + place, _rows(source, n), on["from"] * n + place)
            elif place == 0:  # whole blocks, before any of their layers is waited for
                queue.copy(to.bytes, on["to"], source.bytes, on["from"])
            marks[layer] = queue.mark()
        return marks


def _wait_for(marks: Mapping[int, Mark], layer: int) -> None:
    if layer in marks:
        marks[layer].wait()


def rows_of(store: BlockStore) -> int | None:
    """The number of rows that a block consists of, one for each layer and for the padding behind them; None if the
    padding is no whole number of rows."""
    n, rest = divmod(store.spec.block_bytes, store.spec.offsets[-1])
    return None if rest or store.spec.offsets[-1] % ACCESS else n


def _rows(store: BlockStore, n: int) -> Tensor:
    return store.bytes.view(store.n_blocks * n, -1)


class _CudaMark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)

    def synchronize(self) -> None:
        self._event.synchronize()


class CudaQueue:
    """A `Queue` of a stream of its own, whose copies make way for the kernels of batches; for the thread that makes it.
    `copy_blocks` reads pinned memory of the host by its address."""

    def __init__(self, device: torch.device, copy_blocks: CopyBlocks) -> None:
        self._copy_blocks = copy_blocks
        self._stream = torch.cuda.Stream(device, priority=0)
        torch.cuda.set_stream(self._stream)  # of this thread

    def copy(self, to: Tensor, to_ids: Tensor, source: Tensor, source_ids: Tensor) -> None:
        self._copy_blocks(to, to_ids, source.data_ptr(), source_ids)

    def mark(self) -> _CudaMark:
        return _CudaMark(self._stream)
