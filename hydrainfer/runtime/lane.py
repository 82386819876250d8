"""One lane of an instance, or both: a thread (and, on CUDA, a stream) that executes batches in the order launched."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import NamedTuple, TypeVar

import torch

from hydrainfer.core import DEVICE_LOST, InternalError, StepBatch, StepResult
from hydrainfer.runtime.threads import Team, ThreadCount

_log = logging.getLogger(__name__)
Read = Callable[[], StepResult]
"""Reads the results of a batch, once the device is done with it."""
LaneJob = Callable[[], StepResult | Read]
"""Computes a batch or, on CUDA, launches its kernels."""
_T = TypeVar("_T")


class LaneTicket:
    """A batch in flight. The lane's thread sets `result` once; any thread may poll."""

    __slots__ = ("result",)

    def __init__(self, result: StepResult | None = None) -> None:
        self.result = result

    def poll(self, now: float) -> StepResult | None:  # noqa: ARG002 - a modelled device needs the time
        """The result once it is there, else None. Never blocks or raises."""
        return self.result

    def ready_at(self) -> float | None:
        """Always None: the time is unknown, and `wake` is called then."""
        return None


class _Item(NamedTuple):
    batch: StepBatch
    work: LaneJob
    ticket: LaneTicket


class _Launched(NamedTuple):
    """A batch whose work was given to the device; `done` is recorded after that work."""

    item: _Item
    began_s: float
    outcome: StepResult | Read
    done: torch.cuda.Event

    def land(self) -> StepResult:
        self.done.synchronize()
        return _read(self.outcome)


class LaneThread:
    """Runs work on its own thread with its own number of compute threads. On CUDA it launches one batch after the other
    on its stream, and a second thread completes their tickets, each when the device is done with the batch. Until then
    the batch's blocks are in use, even if its work raised.

    `wake()` is called after each ticket is complete, on the thread that completed it. `threads` is asked before each
    batch for the number of CPU threads to compute with, and told how long it took; None leaves torch's default.
    `priority`: the CUDA stream's; a GPU starts kernels of priority -1 before those of 0. Work that raises completes its
    ticket with an `InternalError`; the thread lives on.

    Where vision and language share a lane, the work of a vision batch calls `pause()` between its parts, which executes
    a language batch that was launched meanwhile.
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        wake: Callable[[], None],
        threads: ThreadCount | None = None,
        priority: int = 0,
    ) -> None:
        self._wake = wake
        self._priority = priority
        self._threads = threads
        self._n_threads = 0  # torch's present setting in this thread
        self._device = device
        self._queue: SimpleQueue[_Item | None] = SimpleQueue()
        self._next: _Item | None = None  # taken from the queue by `pause`, and not due yet
        self._resumed_s = self._paused_s = 0.0  # when the batch under way went on; when it could pause last
        self._others_s = 0.0  # how long it has waited for others
        self._launched: SimpleQueue[_Launched | None] = SimpleQueue()
        self._landing = threading.Thread(target=self._land_all, name=f"hydrainfer-{name}-landing", daemon=True)
        if device.type == "cuda":
            self._landing.start()
        self._thread = threading.Thread(target=self._loop, name=f"hydrainfer-{name}", daemon=True)
        self._thread.start()

    def submit(self, batch: StepBatch, work: LaneJob) -> LaneTicket:
        ticket = LaneTicket()
        self._queue.put(_Item(batch, work, ticket))
        return ticket

    def complete(self, result: StepResult) -> LaneTicket:
        """A finished ticket, for a batch that failed before it was submitted."""
        self._wake()
        return LaneTicket(result)

    def close(self) -> None:
        """Wait for what is running, then end the thread. Safe to repeat."""
        self._queue.put(None)
        self._thread.join()
        self._launched.put(None)
        if self._landing.ident is not None:
            self._landing.join()

    def pause(self) -> None:
        """Execute the batch that was launched meanwhile, if it is due before the next pause. Called by the running
        work."""
        now = time.perf_counter()
        since_s, self._paused_s = now - self._paused_s, now
        if self._next is None and not self._queue.empty():
            self._next = self._take()
        item = self._next
        if item is None or now - self._resumed_s + since_s < item.batch.after_s:
            return
        self._next = None
        others_s, n_threads = self._others_s, self._n_threads
        self._execute(item)
        self._compute_with(n_threads)
        self._resumed_s = self._paused_s = time.perf_counter()
        self._others_s = others_s + self._resumed_s - now

    def _take(self) -> _Item | None:
        """The next item; None if there is none, or only the end mark."""
        try:
            item = self._queue.get_nowait()
        except Empty:
            return None
        if item is None:
            self._queue.put(None)
        return item

    def _loop(self) -> None:
        self._n_threads = torch.get_num_threads()  # initialises this thread's own setting
        stream = torch.cuda.Stream(self._device, self._priority) if self._device.type == "cuda" else None
        while (item := self._next or self._queue.get()) is not None:
            self._next = None
            if stream is None:
                self._execute(item)
            else:
                with torch.cuda.stream(stream):
                    self._launch(item, stream)
            del item  # frees what the batch held before the next one waits

    def _execute(self, item: _Item) -> None:
        team = self._team_for(item.batch)
        self._resumed_s = self._paused_s = began_s = time.perf_counter()
        self._others_s = 0.0
        result = guarded(item.batch, lambda: _read(item.work()))
        own_s = time.perf_counter() - began_s - self._others_s
        if result.error is None:
            team.took(own_s)
        self._complete(item, result, own_s)

    def _team_for(self, batch: StepBatch) -> Team:
        team = Team(self._n_threads) if self._threads is None else self._threads.choose(batch)
        self._compute_with(team.n)
        return team

    def _compute_with(self, n_threads: int) -> None:
        if n_threads != self._n_threads:
            torch.set_num_threads(n_threads)
            self._n_threads = n_threads

    def _launch(self, item: _Item, stream: torch.cuda.Stream) -> None:
        self._team_for(item.batch)
        began_s, done = time.perf_counter(), torch.cuda.Event()

        def work() -> StepResult | Read:
            try:
                return item.work()
            finally:
                done.record(stream)

        self._launched.put(_Launched(item, began_s, guarded(item.batch, work), done))

    def _land_all(self) -> None:
        landed_s = 0.0
        while (launched := self._launched.get()) is not None:
            result = guarded(launched.item.batch, launched.land)
            began_s, landed_s = max(launched.began_s, landed_s), time.perf_counter()
            self._complete(launched.item, result, landed_s - began_s)
            del launched

    def _complete(self, item: _Item, result: StepResult, own_s: float) -> None:
        result.own_s = own_s
        item.ticket.result = result
        self._wake()


def _read(outcome: StepResult | Read) -> StepResult:
    return outcome if isinstance(outcome, StepResult) else outcome()


def guarded(batch: StepBatch, work: Callable[[], _T]) -> _T | StepResult:
    """The result of `work()`, or a `StepResult` that carries why it failed. Running out of memory is an answer, not a
    crash. Any other error of the device has the code `DEVICE_LOST`: after most CUDA errors every later call fails."""
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
