"""How much of the machine others took while a server was measured: on a busy one, that is what is compared.

Linux only (/proc); elsewhere nothing is known.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from hydrainfer.workload.processes import ServerProcess

NOISY_CORES = 0.2
"""Mean cores taken by others beyond which a run says so."""


class Noise:
    """From its creation to `others_cores`."""

    def __init__(self, server: ServerProcess | None) -> None:
        self._server = server
        self._before = self._read()

    def others_cores(self) -> float | None:
        """Mean cores in use by neither the server nor this process; None if the server's share is not known."""
        if self._server is None or self._before is None or (after := self._read()) is None:
            return None
        busy_s, known_s, at_s = (b - a for a, b in zip(self._before, after, strict=True))
        return max(0.0, busy_s - known_s) / at_s if at_s > 0 else None

    def _read(self) -> tuple[float, float, float] | None:
        """Busy seconds of all cores, of those this process and the server, and the time."""
        stat = Path("/proc/stat")
        if not stat.exists() or self._server is None:
            return None
        tick_s = 1.0 / os.sysconf("SC_CLK_TCK")
        times = [int(t) * tick_s for t in stat.read_text().split("\n", 1)[0].split()[1:9]]
        busy_s = sum(times) - times[3] - times[4] - times[7]  # not: idle, waiting for a disk, stolen
        # utime, stime and those of children that have ended
        server_s = sum(sum(int(t) for t in fields[11:15]) * tick_s for fields in self._server.family().values())
        return busy_s, server_s + time.process_time(), time.perf_counter()
