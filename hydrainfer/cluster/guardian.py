"""Ends what is left of a run once its server is gone, whichever way it went.

`RunFolder.guard` starts this file as a process of its own, which needs the standard library only. Who belongs to a
run has `MARK` with the run's folder in the environment, which children inherit and keep when their parent dies.
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
    """Kill every process of the run, wait until they have ended."""
    give_up_s = time.monotonic() + _KILL_S
    while (found := _processes(folder)) and time.monotonic() < give_up_s:  # again: one may have started another
        for pid in found:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE_S)


def end_run(folder: str) -> None:
    """Kill every process of the run, remove its folder."""
    end_processes(folder)
    shutil.rmtree(folder, ignore_errors=True)


def _processes(folder: str) -> list[int]:
    """The processes of the run: of this user, as nobody else's environment can be read."""
    mark, found = f"{MARK}={folder}".encode(), []
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) != os.getpid():
            with suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                if mark in file.read().split(b"\0"):
                    found.append(int(name))
    return found


def main(folder: str, server: str) -> None:
    """Wait until standard input or the server ends."""
    for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a service is stopped by one signal to all: the server
        signal.signal(sig, signal.SIG_IGN)  # tidies up first
    poll = select.poll()
    poll.register(sys.stdin.fileno(), select.POLLIN)
    with suppress(OSError):  # this kernel has none; or the server has gone already, which ends the input, too
        poll.register(os.pidfd_open(int(server)), select.POLLIN)
    if os.getppid() == int(server):
        poll.poll()
    end_run(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
