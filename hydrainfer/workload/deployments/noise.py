"""The processor time that other processes took while a server was measured.

Linux only (/proc); on other systems it is not known.
"""

from __future__ import annotations

import time

from hydrainfer.machine import TICK_S, processor_s
from hydrainfer.workload.deployments.processes import ServerProcess


class Noise:
    """The load of the machine between the creation of this object and the call of `others_cores`."""

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
        """Busy seconds of all cores, busy seconds of this process and the server together, and the time."""
        busy = processor_s()
        if busy is None or self._server is None:
            return None
        # utime and stime, own and of children that have ended
        server_s = sum(sum(int(t) for t in fields[11:15]) * TICK_S for fields in self._server.family().values())
        return busy[0], server_s + time.process_time(), time.perf_counter()
