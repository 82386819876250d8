"""The guardian: a process that ends the other processes of a run once its server is gone, even if it was killed.

`RunFolder.guard` starts this file as a process of its own, which needs the standard library only. The processes of a
run have `MARK=<the run's folder>` in their environment. Children inherit it and keep it when their parent dies.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time
from contextlib import suppress

MARK = "_HYDRAINFER_RUN"
_KILL_S = 10.0
_PAUSE_S = 0.01


def end_processes(folder: str) -> None:
    """Kill every process of the run and wait until they have ended."""
    give_up_s = time.monotonic() + _KILL_S
    while (found := _processes(folder)) and time.monotonic() < give_up_s:  # repeat: a process may have started another
        for pid in found:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE_S)


def end_run(folder: str) -> None:
    """Kill every process of the run and remove its folder."""
    end_processes(folder)
    shutil.rmtree(folder, ignore_errors=True)


def _processes(folder: str) -> list[int]:
    """The ids of the run's processes, without this one. Only this user's are found: other environments are secret."""
    mark, found = f"{MARK}={folder}".encode(), []
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) != os.getpid():
            with suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                if mark in file.read().split(b"\0"):
                    found.append(int(name))
    return found


def main(folder: str, server: str) -> None:
    """Wait until standard input closes, or gets a byte, or the server ends; then end the run. `server`: its process
    id."""
    for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a service manager may signal all processes at once:
        signal.signal(sig, signal.SIG_IGN)  # the server cleans up first
    poll = select.poll()
    poll.register(sys.stdin.fileno(), select.POLLIN)
    with suppress(OSError):  # the kernel has no pidfds, or the server is gone, which closes the input, too
        poll.register(os.pidfd_open(int(server)), select.POLLIN)
    if os.getppid() == int(server):
        poll.poll()
    end_run(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
