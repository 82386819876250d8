"""What a plan is doing: a bar on a terminal; elsewhere a line when a phase begins and ends, and every ten seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from hydrainfer.workload.output import EVERY_S, Ticker

OnProgress = Callable[[str, int, int], None]
_SAYS = {
    "start": "starting",
    "load": "loading the model; the first time, kernels are compiled",
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
    """Progress as lines. The last one is repeated while nothing is told. Phases that have no words of their own, such
    as each batch that is measured, begin without a line."""

    def __init__(self, console: Console, first: str) -> None:
        self._console = console
        self._begun_s = time.monotonic()
        self._phase = ""
        self._count = ""
        self._is_over = False
        self._ticker = Ticker(self._say, EVERY_S)
        self.told(first, 0, 0)

    def told(self, phase: str, done: int, total: int) -> None:
        with self._ticker.lock:
            new = phase != self._phase and (phase in _SAYS or not self._phase)
            is_over = bool(total) and done >= total
            ended = is_over and (phase in _SAYS or not self._is_over)
            self._phase = phase
            self._is_over = is_over
            self._count = f": {done} of {total}" if total else ""
            if new or ended or self._ticker.due:
                self._say()

    def close(self) -> None:
        self._ticker.close()

    def _say(self) -> None:
        self._ticker.said()
        passed_s = time.monotonic() - self._begun_s
        line = f"{_SAYS.get(self._phase, self._phase)}{self._count} ({passed_s:.0f} s)"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
