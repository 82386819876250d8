"""One lane of an instance, or both: a thread (and, on CUDA, a stream) that executes batches in the order launched."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import NamedTuple

import torch

from hydrainfer.core import DEVICE_LOST, InternalError, StepBatch, StepResult

_log = logging.getLogger(__name__)
LaneJob = Callable[[], StepResult]


class LaneTicket:
    """A batch in flight. The lane's thread sets `result` once; any thread may poll."""

    __slots__ = ("result",)

    def __init__(self, result: StepResult | None = None) -> None:
        self.result = result

    def poll(self, now: float) -> StepResult | None:  # noqa: ARG002 - a modelled device needs the time
        """The result once it is there, else None. Never blocks or raises."""
        return self.result

    def ready_at(self) -> float | None:
        """Unknown here: the waker tells."""
        return None


class _Item(NamedTuple):
    batch: StepBatch
    work: LaneJob
    ticket: LaneTicket


class LaneThread:
    """Runs work on its own thread with its own number of compute threads.

    `wake()` is called on that thread after each ticket is complete. `threads()` is asked before each batch for the
    number of CPU threads to compute with, so that lanes can share the cores when both are busy; None leaves torch's
    default. `priority` is of the CUDA stream: a GPU starts the kernels of -1 before those of 0. Work that raises
    completes its ticket with an `InternalError`; the thread lives on.

    Where vision and language share a lane, the work of a vision batch calls `pause()` between its parts: there a
    language batch is executed that was launched meanwhile.
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        wake: Callable[[], None],
        threads: Callable[[], int] | None = None,
        priority: int = 0,
    ) -> None:
        self._wake = wake
        self._priority = priority
        self._threads = threads
        self._device = device
        self._queue: SimpleQueue[_Item | None] = SimpleQueue()
        self._next: _Item | None = None  # taken from the queue by `pause`, and not due yet
        self._resumed_s = self._paused_s = 0.0  # when the batch under way went on; when it could pause last
        self._others_s = 0.0  # how long it has waited for others
        self._thread = threading.Thread(target=self._loop, name=f"hydrainfer-{name}", daemon=True)
        self._thread.start()

    def submit(self, batch: StepBatch, work: LaneJob) -> LaneTicket:
        ticket = LaneTicket()
        self._queue.put(_Item(batch, work, ticket))
        return ticket

    def complete(self, result: StepResult) -> LaneTicket:
        """A ticket for work that ended before it began."""
        self._wake()
        return LaneTicket(result)

    def close(self) -> None:
        """Wait for what is running, then end the thread. Safe to repeat."""
        self._queue.put(None)
        self._thread.join()

    def pause(self) -> None:
        """Execute what was launched meanwhile, if it is due before the next pause. Called by the work under way."""
        now = time.perf_counter()
        since_s, self._paused_s = now - self._paused_s, now
        if self._next is None and not self._queue.empty():
            self._next = self._take()
        item = self._next
        if item is None or now - self._resumed_s + since_s < item.batch.after_s:
            return
        self._next = None
        others_s = self._others_s
        self._execute(item)
        self._resumed_s = self._paused_s = time.perf_counter()
        self._others_s = others_s + self._resumed_s - now

    def _take(self) -> _Item | None:
        """The next item; None if there is none, or only the end."""
        try:
            item = self._queue.get_nowait()
        except Empty:
            return None
        if item is None:
            self._queue.put(None)
        return item

    def _loop(self) -> None:
        used = torch.get_num_threads()  # initialises this thread's own setting
        stream = torch.cuda.Stream(self._device, self._priority) if self._device.type == "cuda" else None
        while (item := self._next or self._queue.get()) is not None:
            self._next = None
            wanted = self._threads() if self._threads is not None else used
            if wanted != used:
                torch.set_num_threads(wanted)
                used = wanted
            with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
                self._execute(item if stream is None else item._replace(work=_whole(item.work, stream)))
            del item  # frees what the batch held before the next one waits

    def _execute(self, item: _Item) -> None:
        self._resumed_s = self._paused_s = began_s = time.perf_counter()
        self._others_s = 0.0
        result = guarded(item.batch, item.work)
        result.own_s = time.perf_counter() - began_s - self._others_s
        item.ticket.result = result
        self._wake()


def _whole(work: LaneJob, stream: torch.cuda.Stream) -> LaneJob:
    """`work`, which ends when the device is done with it, also where it raised: until then its blocks are in use."""

    def run() -> StepResult:
        try:
            return work()
        finally:
            stream.synchronize()

    return run


def guarded(batch: StepBatch, work: LaneJob) -> StepResult:
    """`work()`, or a result that carries why it failed. Out of memory is an answer, not a crash. Any other error of the
    device has the code `DEVICE_LOST`: most of CUDA's leave a context in which every later call fails."""
    try:
        return work()
    except (MemoryError, torch.OutOfMemoryError) as e:
        _log.error("out of memory in batch %d on the %s lane: %s", batch.id, batch.lane.value, e)
        return StepResult(batch, error=InternalError("the device ran out of memory", code="out_of_memory"))
    except torch.AcceleratorError:
        _log.exception("batch %d lost the device on the %s lane", batch.id, batch.lane.value)
        return StepResult(batch, error=InternalError("the device failed; see the server's log", code=DEVICE_LOST))
    except Exception:
        _log.exception("batch %d failed on the %s lane", batch.id, batch.lane.value)
        return StepResult(batch, error=InternalError("the model step failed; see the server's log"))
