"""Server processes that are started to be measured: placed on cores, waited for until healthy, and ended with all
children."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from hydrainfer.workload.client import ChatClient, Endpoint


class ServerFailed(Exception):
    """The error of a server that did not start, or died; the message ends with the last lines of its log."""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


class ServerProcess:
    """One server and the processes it starts, in a session of their own. Must be stopped in any case: use as a context
    manager. `cores`: the only cores that all of these processes run on; empty: the same as this process."""

    def __init__(
        self,
        name: str,
        command: list[str],
        port: int,
        log: Path,
        env: Mapping[str, str] | None = None,
        cores: Collection[int] = (),
    ) -> None:
        """Raises `ServerFailed` if there is no such command or no such core."""
        self.name = name
        self.command = command
        self._log = log
        self.url = f"http://127.0.0.1:{port}"
        self.startup_s: float | None = None
        self._started_s = time.perf_counter()
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
        try:
            with log.open("wb") as out, _on(cores):
                self._process = subprocess.Popen(command, stdout=out, env=env, start_new_session=True, **pipes)
        except OSError as e:
            raise ServerFailed(f"{name} cannot be started: {e}") from None

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """The exit status once the server has ended; else None."""
        return self._process.poll()

    async def wait_healthy(self, limit_s: float) -> None:
        """Wait until `/health` answers 200; then `startup_s` is set. Raises `ServerFailed`."""
        async with ChatClient(Endpoint(base_url=self.url), time.perf_counter) as client:
            while not await client.healthy():
                self.check_alive()
                if time.perf_counter() - self._started_s > limit_s:
                    raise ServerFailed(f"{self.name} is not healthy after {limit_s:.0f} s\n{self.log_tail()}")
                await asyncio.sleep(0.1)
            self.startup_s = time.perf_counter() - self._started_s

    def check_alive(self) -> None:
        if self._process.poll() is not None:
            raise ServerFailed(f"{self.name} ended with status {self._process.returncode}\n{self.log_tail()}")

    def log_tail(self) -> str:
        """The last 15 lines that the server wrote."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])

    def stop(self, limit_s: float = 30.0) -> list[int]:
        """Interrupt the server (SIGINT), wait, and then kill all processes that are left. Returns the pids that had to
        be killed. None of its processes is left running."""
        family = self.family()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(limit_s)
        left = self.left_of(family) if self._process.poll() is None else self._wait_for_all(family)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._process.poll() is None:  # on systems without /proc
            self._process.kill()
        self._process.wait()
        self._wait_for_all(family)  # a killed process ends when it is scheduled next
        return left

    def family(self) -> dict[int, list[str]]:
        """The processes of the server's session and all descendants in any session: pid → fields of /proc/pid/stat."""
        stats = dict(all_stats())
        pids = {self.pid}
        grown = 0
        while len(pids) > grown:
            grown = len(pids)
            pids |= {p for p, s in stats.items() if int(s[1]) in pids or int(s[3]) == self.pid}
        return {p: stats[p] for p in pids if p in stats}

    def left_of(self, family: dict[int, list[str]]) -> list[int]:
        """The pids of the server's session and of `family`, found earlier, that still run. A pid that was reused
        meanwhile does not count: its start time differs."""
        now = {pid: stat for pid, stat in all_stats() if stat[0] != "Z"}
        known = (pid for pid, stat in family.items() if pid in now and now[pid][19] == stat[19])
        return sorted({*known, *self._session()})

    def _wait_for_all(self, family: dict[int, list[str]]) -> list[int]:
        """Wait up to five seconds until no process of `family` runs. Returns the pids that still do."""
        patience_s = time.perf_counter() + 5.0
        while (left := self.left_of(family)) and time.perf_counter() < patience_s:
            time.sleep(0.02)
        return left

    def _session(self) -> list[int]:
        """The pids of the server's session, without zombies."""
        return [pid for pid, stat in all_stats() if int(stat[3]) == self.pid and stat[0] != "Z"]


@contextlib.contextmanager
def _on(cores: Collection[int]) -> Iterator[None]:
    """Processes started within this context inherit these cores. The cores of this process are set and then set back,
    since a child could not be moved early enough."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(cores))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def all_stats() -> list[tuple[int, list[str]]]:
    """(pid, fields of /proc/pid/stat from the state on) of every process; none where there is no /proc."""
    pids = []
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if entry.isdigit():
            try:
                pids.append((int(entry), Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()))
            except OSError:
                continue  # ended meanwhile
    return pids
