"""Server processes under test: start, wait for health, watch processor time and memory, stop. Linux only (/proc)."""

from __future__ import annotations

import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from hydrainfer.machine import TICK_S, processor_s
from hydrainfer.workload.client import ChatClient, Endpoint
from hydrainfer.workload.deployments import ServerFailed, ServerProcess, all_stats, free_port

__all__ = ["QUIET_CORES", "CpuUse", "CpuWatch", "Server", "ServerFailed", "free_port"]

QUIET_CORES = 0.1
"""Other processes may take this many cores during a measurement."""


class Server(ServerProcess):
    """One server and the processes it starts, watched. Stop it in any case: use as a context."""

    def __init__(self, name: str, command: list[str], port: int, log: Path, env: dict[str, str]) -> None:
        super().__init__(name, command, port, log, env)
        self.startup_hwm_bytes: int | None = None

    def __enter__(self) -> Server:
        return self

    async def wait_healthy(self, limit_s: float) -> None:
        """Wait until `/health` answers 200; then `startup_s` and `startup_hwm_bytes` are set. Raises `ServerFailed`."""
        await super().wait_healthy(limit_s)
        self.startup_hwm_bytes = self.memory()["hwm_sum_bytes"]

    async def model(self) -> str:
        """The first name it serves."""
        async with ChatClient(Endpoint(base_url=self.url), time.perf_counter) as client:
            return (await client.models())[0]

    def version(self) -> str:
        """The answer of `/version` as it stands; empty if there is none."""
        try:
            with urllib.request.urlopen(f"{self.url}/version", timeout=10) as answer:
                return answer.read().decode()
        except OSError:
            return ""

    def cpu_s(self) -> float:
        """Processor time of all its processes so far, reaped children included."""
        stats = (stat for _, stat in all_stats() if int(stat[3]) == self.pid)
        return sum(sum(int(t) for t in stat[11:15]) for stat in stats) * TICK_S

    def cpu_by_process(self) -> dict[int, tuple[str, float]]:
        """Name and processor time so far of each of its processes that runs, by pid: its session and all descendants.
        The first is the server itself."""
        family = self.family()
        found = {p: (_name(p), sum(int(t) for t in stat[11:13]) * TICK_S) for p, stat in family.items()}
        return dict(sorted(found.items(), key=lambda item: item[0] != self.pid))

    def memory(self) -> dict[str, int]:
        """`hwm_sum_bytes`: the processes' peak resident sizes added up (shared pages count in each); `pss_bytes`:
        their proportional sizes now. `shared_bytes`: their shared anonymous mappings, `shared_touched_bytes`: of those,
        what is resident now. `file_bytes`: resident pages of files, most of them code."""
        pids = self._session()
        return {
            "processes": len(pids),
            "hwm_sum_bytes": sum(_field(f"/proc/{p}/status", "VmHWM:") for p in pids),
            "pss_bytes": sum(_field(f"/proc/{p}/smaps_rollup", "Pss:") for p in pids),
            "shared_bytes": sum(_shared_anonymous(p, "Size:") for p in pids),
            "shared_touched_bytes": sum(_shared_anonymous(p, "Rss:") for p in pids),
            "file_bytes": sum(_field(f"/proc/{p}/status", "RssFile:") for p in pids),
        }


def _name(pid: int) -> str:
    """The kernel's name of the process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _field(path: str, key: str) -> int:
    """A size of /proc in bytes; 0 if the process has ended."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key)), 0)


def _shared_anonymous(pid: int, key: str) -> int:
    """`key` summed over the mappings that the kernel calls /dev/zero: what `mmap(-1, n)` makes."""
    try:
        lines = Path(f"/proc/{pid}/smaps").read_text().splitlines()
    except OSError:
        return 0
    total, inside = 0, False
    for line in lines:
        first, _, rest = line.partition(" ")
        if not first.endswith(":"):  # the head of a mapping
            inside = "/dev/zero" in rest
        elif inside and first == key:
            total += int(rest.split()[0]) * 1024
    return total


@dataclass(frozen=True)
class CpuUse:
    """Mean cores in use over a stretch of time. `others`: neither the servers nor this process; `steal`: the host."""

    wall_s: float
    servers: dict[str, float]
    client: float
    others: float
    steal: float


class CpuWatch:
    """Processor use from its creation to `stop`."""

    def __init__(self, servers: list[Server]) -> None:
        self._servers = servers
        self._before = self._read()

    def _read(self) -> tuple[float, dict[str, float], float, float, float]:
        seconds = processor_s()
        assert seconds is not None, "this machine does not say how busy its cores are"
        busy_s, stolen_s = seconds
        return time.perf_counter(), {s.name: s.cpu_s() for s in self._servers}, time.process_time(), busy_s, stolen_s

    def stop(self) -> CpuUse:
        (t0, servers0, client0, busy0, steal0), (t1, servers1, client1, busy1, steal1) = self._before, self._read()
        wall_s = t1 - t0
        servers = {name: (servers1[name] - servers0[name]) / wall_s for name in servers1}
        client = (client1 - client0) / wall_s
        others = max(0.0, (busy1 - busy0) / wall_s - sum(servers.values()) - client)
        return CpuUse(wall_s, servers, client, others, (steal1 - steal0) / wall_s)
