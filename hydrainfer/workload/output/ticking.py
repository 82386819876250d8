"""A line every while, so that whoever reads a pipe sees that work goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

EVERY_S = 10.0
"""Where there is no terminal, something is printed at least as often."""
_LET_GO_S = 1.0  # then the thread is left alone: it may write to a pipe that nobody reads


class Ticker:
    """A thread that calls `say` when nothing has been said for `every_s` seconds. Whoever prints a line calls `said`;
    `lock` is held while `say` runs. `close` ends the thread."""

    def __init__(self, say: Callable[[], None], every_s: float) -> None:
        self.lock = threading.RLock()
        self._say = say
        self._every_s = every_s
        self._said_s = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="progress", daemon=True)
        self._thread.start()

    @property
    def due(self) -> bool:
        return time.monotonic() - self._said_s >= self._every_s

    def said(self) -> None:
        self._said_s = time.monotonic()

    def close(self) -> None:
        self._over.set()
        self._thread.join(_LET_GO_S)

    def _repeat(self) -> None:
        while not self._over.wait(self._every_s / 20):
            with self.lock:
                if self.due:
                    self.said()
                    self._say()
