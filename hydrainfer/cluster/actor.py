"""The process of an instance that is a Ray actor.

It has one incarnation of the instance, on a thread:

    built ─> runs until told to close ─> waits for the launcher, who ends it for good
      │            └─ crashes ─> the process exits ─> Ray starts another: the next incarnation says `Hello`
      └─ cannot be ─> tells the hub, waits until the launcher ends it ─┘
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import threading
import time

from hydrainfer.cluster.launch import Facts
from hydrainfer.cluster.node import Node, NodePlan, run_node
from hydrainfer.core import HydraError
from hydrainfer.engine import Engine
from hydrainfer.machine import host_identity

_log = logging.getLogger(__name__)
_LET_GO_S = 30.0  # an instance that has closed waits this long to be ended by its launcher
_START_PAUSE_S = 1.0  # so that one which cannot start, and cannot say so, does not spin
_RETRY_S = 120.0  # one that has said so ends by itself after this long, should nobody end it


class ActorInstance:
    """The object in the actor's process. Calls only wait; nothing of a request passes here. `build`: the pickled
    `Build` of the instance, unpickled once cores and threads are set."""

    def __init__(self, plan: NodePlan, build: bytes) -> None:
        self._plan = plan
        self._incarnation: int | None = None
        self._heard_of = False  # by the hub, if it fails from now on
        self._over = threading.Event()
        threading.Thread(target=self._live, args=(build,), name=f"instance-{plan.name}", daemon=True).start()

    def __repr__(self) -> str:
        """The name that Ray puts before each line of the actor's log."""
        return self._plan.name

    def outlast(self, incarnation: int) -> None:
        """Wait until that incarnation is over."""
        if incarnation == self._incarnation:
            self._over.wait()

    def finish(self) -> tuple[str, int]:
        """Wait until the instance, which has been told to close, has done so, if it ever ran. Returns host and process
        id."""
        if self._incarnation is not None:
            self._over.wait()
        return host_identity(), os.getpid()

    def _live(self, build: bytes) -> None:
        logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
        logging.getLogger("hydrainfer").setLevel(self._plan.log_level.upper())

        def make(node: Node) -> tuple[Engine, Facts]:
            self._heard_of = True
            engine, facts = pickle.loads(build)(self._plan)(node)
            self._incarnation = node.incarnation
            gc.collect()
            gc.freeze()  # what was loaded lives for ever: keep it out of every later collection
            return engine, facts

        try:
            self._settle()
            run_node(self._plan, make)
        except HydraError:  # has been told or logged
            self._exit()
        except BaseException:
            _log.exception("instance %s ended", self._plan.name)
            self._exit()
        self._over.set()
        time.sleep(_LET_GO_S)
        os._exit(1)  # the hub was silent, or its server is not there to end us; Ray knows whether to start another

    def _settle(self) -> None:
        """Set cores and threads, of this thread and all that it starts, before anything that computes is imported."""
        share = self._plan.share
        if share.cores:
            try:
                os.sched_setaffinity(0, share.cores)
            except OSError:
                there = ", ".join(map(str, sorted(os.sched_getaffinity(0))))
                _log.warning("instance %s cannot be pinned to %s; there are %s", self._plan.name, share.cores, there)
        fair = len(share.cores) or len(os.sched_getaffinity(0)) // len(self._plan.roles)
        os.environ["OMP_NUM_THREADS"] = str(share.threads or max(1, fair))  # Ray has set it to num_cpus

    def _exit(self) -> None:
        if self._incarnation is None:
            time.sleep(_RETRY_S if self._heard_of else _START_PAUSE_S)
        os._exit(1)
