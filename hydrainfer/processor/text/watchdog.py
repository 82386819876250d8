"""A bound on the CPU time of Python code that runs in threads, such as a template that a checkpoint brings."""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections.abc import Callable
from typing import TypeVar

_IDLE_S = 5.0
_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
_Result = TypeVar("_Result")


class TooSlow(Exception):
    """The watched code has taken too much CPU time."""


class _Stop(BaseException):
    """Raised within the watched code. What it calls may handle exceptions that are no `BaseException`."""


class _Watch:
    """One call that is watched. `clock`: the id of its thread's CPU clock. `end_s`: the time of that clock at which the
    call is stopped. `stopped`: `_Stop` has been raised in the thread, though it may not have arrived yet."""

    __slots__ = ("clock", "end_s", "stopped")

    def __init__(self, clock: int) -> None:
        self.clock = clock
        self.end_s = math.inf
        self.stopped = False


class Watchdog:
    """Raises `TooSlow` in threads whose watched code takes more than `limit_s` of CPU time; in time that it waits for
    others it is not counted. It only stops code of the interpreter, between two instructions. One thread watches all
    others, while there are any.

    `_Stop` may arrive at any instruction of the watched thread. It must find it in the outer `try` of `run`:

        registered, end_s = inf │ try: end_s = … ── work() ── claimed by the thread: `_Stop` never comes
                                │                     └────── claimed by the watchdog: wait until it was raised, drop it
                                                              if it has not arrived

    Whoever takes a watch out of `_watched` first has claimed it, and `dict.pop` is one indivisible step. So nothing is
    raised in a thread that has claimed its watch, or has not entered the `try`. The thread holds no lock in it."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._watched: dict[_Watch, int] = {}  # the threads
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def run(self, work: Callable[[], _Result]) -> _Result:
        """The result of `work`, which runs in the calling thread. Raises `TooSlow`, or what `work` raises."""
        watch = self._begin(threading.get_ident())
        try:
            try:
                watch.end_s = _cpu_s(watch.clock) + self.limit_s
                return work()
            finally:
                self._end(watch)
        except _Stop:
            raise TooSlow("it takes too long") from None

    def _begin(self, thread: int) -> _Watch:
        """Register the calling thread. It is not stopped before `end_s` is set."""
        watch = _Watch(time.pthread_getcpuclockid(thread))
        with self._changed:
            self._watched[watch] = thread
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="hydra-watchdog", daemon=True)
                self._thread.start()
            self._changed.notify()
        return watch

    def _end(self, watch: _Watch) -> None:
        """Return once `_Stop` can no longer arrive."""
        if self._watched.pop(watch, None) is None:
            while not watch.stopped:
                time.sleep(0.001)
            _raise_in(ctypes.c_ulong(threading.get_ident()), None)  # drop it, unless it has arrived

    def _watch(self) -> None:
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: self._watched, _IDLE_S):
                    self._thread = None
                    return
            self._stop_slow()
            time.sleep(self.limit_s / 4)

    def _stop_slow(self) -> None:
        """Stop the threads that are over their limit. A thread that is claimed here stays in `run` until `stopped`."""
        for watch in list(self._watched):
            if _cpu_s(watch.clock) > watch.end_s:
                thread = self._watched.pop(watch, None)
                if thread is not None:
                    _raise_in(ctypes.c_ulong(thread), ctypes.py_object(_Stop))
                    watch.stopped = True


def _cpu_s(clock: int) -> float:
    """The CPU time of a thread so far; 0 if the thread has ended."""
    try:
        return time.clock_gettime(clock)
    except OSError:
        return 0.0
