"""Rate-limited log lines, for events that strangers can cause, so that nobody can fill a disk with them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable


class SeldomLog:
    """A log that writes at most `n_lines` lines in `every_s` seconds. The next line after that is preceded by the
    number of lines left out. Any thread may call it."""

    def __init__(
        self,
        log: logging.Logger,
        level: int = logging.WARNING,
        n_lines: int = 5,
        every_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log, self._level, self._clock = log, level, clock
        self._n_lines, self._every_s = n_lines, every_s
        self._lock = threading.Lock()
        self._since_s = -every_s
        self._n = 0

    def __call__(self, message: str, *args: object) -> None:
        with self._lock:
            now, left_out = self._clock(), 0
            if now >= self._since_s + self._every_s:
                left_out = max(self._n - self._n_lines, 0)
                self._since_s, self._n = now, 0
            self._n += 1
            if self._n > self._n_lines:
                return
        if left_out:
            self._log.log(self._level, "%d more lines like the next one were left out", left_out)
        self._log.log(self._level, message, *args)
