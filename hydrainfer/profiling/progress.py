"""What a plan is doing: a bar on a terminal; elsewhere a line when a phase begins and ends, and every ten seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

OnProgress = Callable[[str, int, int], None]
EVERY_S = 10.0
_SAYS = {
    "prepare": "reading what each step takes, and drawing requests of the workload",
    "screen": "bounds and short simulations of every layout",
    "measure": "long simulations of layouts that may be best",
    "simulate": "simulations at the given rate",
    "explain": "why each layout carries no more",
    "grid": "the best layouts for other limits",
}
"""What the phases are, in words."""


@contextmanager
def shown(console: Console, first: str = "prepare") -> Iterator[OnProgress]:
    """A context in which progress is shown. Yields a function of (phase, how much is done, of how much). `first`: the
    phase until it is called."""
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(30), TextColumn("{task.fields[count]}"))
        with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
            task = progress.add_task(_SAYS.get(first, first), total=None, count="")
            yield lambda what, done, total: progress.update(
                task, description=_SAYS.get(what, what), completed=done, total=total, count=f"{done}/{total}"
            )
        return
    lines = _Lines(console, first)
    try:
        yield lines.told
    finally:
        lines.close()


class _Lines:
    """Progress as lines. A thread repeats the last one while nothing is told."""

    def __init__(self, console: Console, first: str) -> None:
        self._console, self._begun_s, self._said_s = console, time.monotonic(), 0.0
        self._phase, self._count = "", ""
        self._lock, self._over = threading.Lock(), threading.Event()
        self.told(first, 0, 0)
        self._thread = threading.Thread(target=self._repeat, name="progress", daemon=True)
        self._thread.start()

    def told(self, phase: str, done: int, total: int) -> None:
        with self._lock:
            new, ended = phase != self._phase, bool(total) and done >= total
            self._phase, self._count = phase, f": {done} of {total}" if total else ""
            if new or ended or self._due():
                self._say()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _repeat(self) -> None:
        while not self._over.wait(EVERY_S / 10):
            with self._lock:
                if self._due():
                    self._say()

    def _due(self) -> bool:
        return time.monotonic() - self._said_s >= EVERY_S

    def _say(self) -> None:
        self._said_s = time.monotonic()
        line = f"{_SAYS.get(self._phase, self._phase)}{self._count} ({self._said_s - self._begun_s:.0f} s)"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
