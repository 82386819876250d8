"""How much of the machine others took while a server was measured: on a busy one, that is what is compared.

Linux only (/proc); elsewhere nothing is known.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from hydrainfer.workload.processes import ServerProcess

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
NOISY_CORES = 0.2
"""Mean cores taken by others beyond which a run says so."""


def busy_s() -> float | None:
    """Processor time that all of this machine has used since it started; None where it does not say."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    times = [int(t) for t in stat.read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(times) - times[3] - times[4] - times[7]) * _TICK_S  # not: idle, waiting for a disk, stolen


class Noise:
    """From its creation to `others_cores`."""

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
        busy = busy_s()
        if busy is None or self._server is None:
            return None
        # utime, stime and those of children that have ended
        server_s = sum(sum(int(t) for t in fields[11:15]) * _TICK_S for fields in self._server.family().values())
        return busy, server_s + time.process_time(), time.perf_counter()
