"""A bound on the CPU time of Python code that runs in threads, such as a template that a checkpoint brings."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_IDLE_S = 5.0
_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc


class TooSlow(Exception):
    """The watched code has taken too much CPU time."""


class _Stop(BaseException):
    """Raised within the watched code. What it calls may handle exceptions that are no `BaseException`."""


class Watchdog:
    """Raises `TooSlow` in threads whose watched code takes more than `limit_s` of CPU time; in time that it waits for
    others it is not counted. It only stops code of the interpreter, between two instructions. One thread watches all
    others, while there are any."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._ends: dict[int, float] = {}  # by thread: the value of its CPU clock at which it is stopped
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what the calling thread does in the block."""
        me = threading.get_ident()
        with self._changed:
            self._ends[me] = _cpu_s(me) + self.limit_s
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="hydra-watchdog", daemon=True)
                self._thread.start()
            if len(self._ends) == 1:
                self._changed.notify()
        try:
            try:
                yield
            finally:
                with self._changed:
                    if self._ends.pop(me, None) is None:  # stopped, but perhaps not yet told
                        _raise_in(ctypes.c_ulong(me), None)
        except _Stop:
            raise TooSlow("it takes too long") from None

    def _watch(self) -> None:
        while True:
            with self._changed:
                if not self._ends and not self._changed.wait(_IDLE_S):
                    self._thread = None
                    return
                for thread in [t for t, end_s in self._ends.items() if _cpu_s(t) > end_s]:
                    del self._ends[thread]
                    _raise_in(ctypes.c_ulong(thread), ctypes.py_object(_Stop))
            time.sleep(self.limit_s / 4)


def _cpu_s(thread: int) -> float:
    """The CPU time of a living thread so far."""
    return time.clock_gettime(time.pthread_getcpuclockid(thread))
