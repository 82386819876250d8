"""An event loop in a thread of its own, for work that must not delay the server's event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from hydrainfer.core import Overloaded, shutting_down

T = TypeVar("T")
_CLOSE_S = 5.0


class LoopThread:
    """A thread with an event loop, started when it is first needed. `n_blocking`: number of threads for blocking calls
    (`to_thread`, name resolution). Thread-safe."""

    def __init__(self, name: str, n_blocking: int) -> None:
        self._name = name
        self._n_blocking = n_blocking
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    @property
    def n_tasks(self) -> int:
        return len(self._tasks)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the thread and return or raise what it does. If the caller is cancelled, the work is cancelled
        too and has ended when this method returns. Raises `Unavailable` when closed, `Overloaded` if the thread cannot
        be started."""
        done: Future[T] = Future()
        tasks: list[asyncio.Task[T]] = []
        with self._lock:
            try:
                loop = self._begun()
            except BaseException:
                work.close()
                raise
            loop.call_soon_threadsafe(self._begin, work, done, tasks)
        outcome = asyncio.wrap_future(done)
        outcome.add_done_callback(lambda o: o.cancelled() or o.exception())  # even if the caller has gone
        try:
            return await asyncio.shield(outcome)
        except asyncio.CancelledError:
            if outcome.cancelled() and self._closed:
                raise shutting_down() from None
            if not outcome.done():
                loop.call_soon_threadsafe(lambda: tasks[0].cancel())
                await asyncio.wait([outcome])
            raise

    def close(self) -> None:
        """Cancel all work and end the thread. Safe to repeat."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is not None:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._stop.set)
            thread.join(_CLOSE_S)

    def _begun(self) -> asyncio.AbstractEventLoop:
        if self._closed:
            raise shutting_down()
        if self._loop is None:
            try:
                loop = asyncio.new_event_loop()
            except OSError:  # no file descriptor left
                raise _full() from None
            thread = threading.Thread(target=self._run, args=(loop,), name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                loop.close()
                raise _full() from None
            self._thread, self._loop = thread, loop
        return self._loop

    # ---- on the thread

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run the loop until `close`. The runner then cancels the tasks that are left."""
        loop.set_default_executor(ThreadPoolExecutor(self._n_blocking, f"{self._name}-blocking"))
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(self._until_closed())

    async def _until_closed(self) -> None:
        await self._stop.wait()

    def _begin(self, work: Coroutine[Any, Any, T], done: Future[T], tasks: list[asyncio.Task[T]]) -> None:
        task = asyncio.ensure_future(work)
        tasks.append(task)
        self._tasks.add(task)
        task.add_done_callback(lambda _: self._settle(task, done))

    def _settle(self, task: asyncio.Task[T], done: Future[T]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            done.cancel()
        elif error := task.exception():
            done.set_exception(error)
        else:
            done.set_result(task.result())


def _full() -> Overloaded:
    return Overloaded("the server has no room for a download now; retry later", retry_after_s=1.0)
