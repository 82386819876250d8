"""Instances as plain processes, forked from one that has everything imported: a `Launcher` that starts in no time."""

import contextlib
import gc
import logging
import multiprocessing
import sys
import threading
import time
from multiprocessing.connection import wait
from pathlib import Path

from hydrainfer.cluster import run_node
from hydrainfer.core import HydraError

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload([m for m in ("pytest.__main__", "tests.cluster.fleet") if m in sys.modules or "." in m])


class Processes:
    """`build`: picklable, as of `InProcess`. Starts those again that die, while `restarts`. `pids`: of all that ever
    ran, by name."""

    def __init__(self, build):
        self.lost = None
        self.pids = {}
        self.revives = self.restarts = True
        self.trouble = ""
        self._build = build
        self._plans = {}
        self._processes = {}
        self._closing = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="keeper", daemon=True)

    def start(self, plans, on_gone):
        for plan in plans:
            self._plans[plan.name] = plan
            self._spawn(plan.name)
        self._keeper.start()

    def watch(self, name, incarnation):
        """The hub sees its children's deaths itself."""

    def kill(self, name, incarnation):
        self._processes[name].kill()

    def restart(self, name):
        """It was, at once."""

    rouse = restart

    def add(self, plan):
        self._plans[plan.name] = plan
        self._spawn(plan.name)

    def remove(self, name):
        del self._plans[name]

    def close(self, timeout_s):
        self._closing.set()
        self._keeper.join()
        end = time.monotonic() + timeout_s
        for process in self._processes.values():
            process.join(max(end - time.monotonic(), 0.0))
            process.kill()
            process.join()

    def _spawn(self, name):
        process = context.Process(target=live, args=(self._plans[name], self._build), name=name)
        process.start()
        self._processes[name] = process
        self.pids.setdefault(name, []).append(process.pid)

    def _keep(self):
        while not self._closing.is_set():
            sentinels = {p.sentinel: name for name, p in self._processes.items()}
            for sentinel in wait(list(sentinels), timeout=0.05):
                self._processes[sentinels[sentinel]].join()
                if sentinels[sentinel] not in self._plans:
                    del self._processes[sentinels[sentinel]]
                elif self.restarts and not self._closing.is_set():
                    self._spawn(sentinels[sentinel])
            self._closing.wait(0.01)


def live(plan, build):
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    with contextlib.suppress(HydraError):
        run_node(plan, build(plan))


def alive(pids):
    """Those of them that run."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.append(pid)
    return found


def memories(pids):
    """(owned, borrowed): names of the caches' memory that these processes have made, and that they map to read."""
    gc.collect()  # what nobody of this process can reach is no leak
    owned, borrowed = set(), set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                _, mode, _, _, _, *name = line.split()
                if name and "memfd:hydrainfer" in name[0]:
                    (owned if "w" in mode else borrowed).add(name[0])
    return owned, borrowed
