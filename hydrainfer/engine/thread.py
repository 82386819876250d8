"""One engine on a thread of this process: the `EngineHandle` of an in-process instance."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import msgspec

from hydrainfer.core import Forgotten, HydraError, InstanceInfo, InstanceStats, InternalError, Request, shutting_down
from hydrainfer.engine.engine import Engine

logger = logging.getLogger(__name__)
_LONGEST_WAIT_S = 3600.0  # an event's wait cannot take infinity


class EngineThread:
    """An engine with its own thread. Every call is queued and carried out by that thread, so the engine needs no lock.

    `name`: the instance's. Runners, too, call `wake`, when a ticket is complete. `close` aborts what is running
    and joins the thread.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, name: str = "EPD0") -> None:
        self.name = name
        self._clock = clock
        self._inbox: deque[Callable[[Engine, float], None]] = deque()
        self._woken = threading.Event()
        self._closing = False
        self._dead: HydraError | None = None
        self._engine: Engine | None = None
        self._last_stats: InstanceStats | None = None
        self._thread = threading.Thread(target=self._run, name=f"engine-{name}", daemon=True)

    def start(self, engine: Engine) -> None:
        self._engine = engine
        self._thread.start()

    def wake(self) -> None:
        self._woken.set()

    def submit(self, request: Request) -> None:
        if self._closing:
            raise shutting_down(retry_after_s=1.0)
        self._post(lambda engine, now: engine.submit(request, now))

    def cancel(self, request_ids: list[str]) -> None:
        self._post(lambda engine, now: engine.cancel(request_ids, now))

    @property
    def alive(self) -> bool:
        """Whether the engine takes requests."""
        return self._dead is None and not self._closing

    def stats(self) -> InstanceStats:
        """A snapshot; counts may be a step apart from each other. After `close`, the last one."""
        engine = self._engine
        stats = self._last_stats if engine is None else engine.stats(self._clock())
        assert stats is not None, "stats before start"
        return stats if self._dead is None else msgspec.structs.replace(stats, stalled_s=float("inf"))

    def instances(self) -> list[InstanceInfo]:
        """The one instance, as a list."""
        stats = self.stats()
        if not self.alive:
            return [InstanceInfo(self.name, stats.role, "dead", pid=os.getpid(), trouble=self.lost() or "")]
        return [InstanceInfo(self.name, stats.role, "alive", pid=os.getpid(), stats=stats)]

    def lost(self) -> str | None:
        return None if self._dead is None else self._dead.message

    def forget_cached(self) -> Future[Forgotten]:
        if not self.alive:
            raise shutting_down(retry_after_s=1.0)
        future: Future[Forgotten] = Future()
        future.set_running_or_notify_cancel()  # so that a caller that gives up cannot cancel it
        self._post(lambda engine, _: future.set_result({self.name: engine.forget_cached()}))
        return future

    def restart_all(self) -> bool:
        """Returns False: a thread cannot be started again."""
        return False

    def close(self) -> None:
        self._closing = True
        self.wake()
        if self._thread.is_alive():
            self._thread.join()
        if self._engine is not None:
            self._last_stats, self._engine = self.stats(), None  # so that weights and caches go, whoever still has us

    def _post(self, call: Callable[[Engine, float], None]) -> None:
        self._inbox.append(call)
        self.wake()

    def _run(self) -> None:
        engine = self._engine
        assert engine is not None
        try:
            while not self._closing:
                self._turn(engine)
            self._refuse(engine, shutting_down(retry_after_s=1.0))
        except Exception:
            logger.exception("the engine stopped after an internal error")
            self._dead = InternalError("the engine stopped after an internal error; see the server's log")
            while not self._closing:
                self._refuse_dead(engine, self._dead)
                self._woken.wait()
                self._woken.clear()
        finally:
            engine.close()

    def _turn(self, engine: Engine) -> None:
        self._woken.clear()
        self._drain(engine)
        wake_at = engine.step(self._clock())
        if not self._inbox and not (self._closing and engine.still):
            self._woken.wait(None if wake_at is None else min(max(wake_at - self._clock(), 0.0), _LONGEST_WAIT_S))

    def _drain(self, engine: Engine) -> None:
        now = self._clock()
        while self._inbox:
            self._inbox.popleft()(engine, now)

    def _refuse(self, engine: Engine, error: HydraError) -> None:
        """End every request here with `error` and wait for the batches in flight."""
        self._drain(engine)
        engine.fail_all(error, self._clock())
        while not engine.still:
            self._turn(engine)

    def _refuse_dead(self, engine: Engine, error: HydraError) -> None:
        """Answer every request that is here or still comes, after a bug, even if other parts are broken."""
        while self._inbox:
            try:
                self._drain(engine)
            except Exception:
                logger.exception("a call to the stopped engine failed")
        try:
            engine.fail_all(error, self._clock())
        except Exception:
            logger.exception("the stopped engine could not end its requests cleanly")
