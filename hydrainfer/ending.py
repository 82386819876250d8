"""Signals of a server: who ends it, and that it ends."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any, Protocol

_END_S = 9.5
"""The time for everything else after `--drain-s`; then the process is ended, whatever still runs. What is left of other
processes is ended by the run's guardian."""
_SOON_S = 0.05


class EndingServer(Protocol):
    """A server that notes signals. `should_exit`: it was told to end."""

    should_exit: bool

    def handle_exit(self, sig: int, frame: FrameType | None) -> None: ...


class Signals:
    """A context that handles SIGINT, SIGTERM and SIGUSR1. During the start, the first SIGINT or SIGTERM ends it, and
    later ones are ignored. Once there is a server, signals go to it, as do a SIGHUP and an end that the start has not
    heeded. `hang_up`: also handle SIGHUP. A server that was told to end and has not, `_END_S` after `drain_s`, is ended
    by the kernel, also if a library holds the GIL.

    Ray installs a handler in front of ours, which prints a stack trace and kills the process by SIGALRM 3 s later."""

    def __init__(self, drain_s: float, hang_up: bool = False) -> None:
        self._drain_s, self._end_s = drain_s, 0.0
        self._server: EndingServer | None = None
        self._signals = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, *([signal.SIGHUP] if hang_up else []))
        self._before: dict[int, Any] = {}
        self._ending = False
        self._early: list[int] = []

    def __enter__(self) -> Signals:
        self._before = {sig: signal.signal(sig, self._handle) for sig in self._signals}
        return self

    def hand_to(self, server: EndingServer) -> None:
        self._server = server
        for sig in self._signals:
            signal.signal(sig, self._handle)  # again, since Ray has installed its handler by now
        for early in self._early:
            server.handle_exit(early, None)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        for sig, handler in self._before.items():
            signal.signal(sig, handler)

    def _handle(self, sig: int, frame: FrameType | None) -> None:
        signal.alarm(0)
        if self._server is not None:
            self._server.handle_exit(sig, frame)
            if self._server.should_exit:
                self._end_in_time()
        elif sig == signal.SIGHUP:
            self._early.append(sig)
        elif not self._ending and sig != signal.SIGUSR1:
            self._ending = True
            self._early.append(sig)
            raise KeyboardInterrupt if sig == signal.SIGINT else SystemExit(128 + sig)

    def _end_in_time(self) -> None:
        """Have this process end, `_END_S` after the time to drain at the latest."""
        now_s = time.monotonic()
        self._end_s = self._end_s or now_s + self._drain_s + _END_S
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, max(self._end_s - now_s, _SOON_S))
