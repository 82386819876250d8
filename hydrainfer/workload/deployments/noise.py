"""Measures how much of the machine other processes took while a server was measured.

Linux only (/proc); elsewhere nothing is known.
"""

from __future__ import annotations

import time

from hydrainfer.machine import TICK_S, processor_s
from hydrainfer.workload.deployments.processes import ServerProcess


class Noise:
    """Watches the machine from its creation to `others_cores`."""

    def __init__(self, server: ServerProcess | None) -> None:
        self._server = server
        self._before = self._read()

    def others_cores(self) -> float | None:
        """Mean cores in use by neither the server nor this process; None if the server's share is not known."""
        if self._server is None or self._before is None or (after := self._read()) is None:
            return None
        used_s, known_s, at_s = (b - a for a, b in zip(self._before, after, strict=True))
        return max(0.0, used_s - known_s) / at_s if at_s > 0 else None

    def _read(self) -> tuple[float, float, float] | None:
        """Busy seconds of all cores, of those this process and the server, and the time."""
        busy = processor_s()
        if busy is None or self._server is None:
            return None
        # utime, stime and those of children that have ended
        server_s = sum(sum(int(t) for t in fields[11:15]) * TICK_S for fields in self._server.family().values())
        return busy[0], server_s + time.process_time(), time.perf_counter()
