"""The process of an instance that is a Ray actor.

The process runs one incarnation of the instance, on a thread:

    built ─> runs until told to close ─> waits for the launcher, which ends it for good
      │            └─ crashes, or the hub is silent ─> the process exits ─> Ray starts the next incarnation
      └─ cannot be built ─> tells the hub, waits until the launcher ends it ─┘
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
from hydrainfer.core import HydraError, log_formatter
from hydrainfer.engine import Engine
from hydrainfer.machine import host_identity

_log = logging.getLogger(__name__)
_LET_GO_S = 30.0  # an instance that has closed waits this long for its launcher to end it
_START_PAUSE_S = 1.0  # before an instance that cannot start, and cannot tell the hub so, exits and is started again
_RETRY_S = 120.0  # an instance that has told the hub so exits after this long if nobody ends it


class ActorInstance:
    """The object in the actor's process. Its methods only wait; no data of a request passes through them. `build`: the
    pickled `Build` of the instance, unpickled once cores and threads are set."""

    def __init__(self, plan: NodePlan, build: bytes) -> None:
        self._plan = plan
        self._incarnation: int | None = None
        self._node: Node | None = None  # from then on, the hub is told if the instance fails
        self._over = threading.Event()
        threading.Thread(target=self._live, args=(build,), name=f"instance-{plan.name}", daemon=True).start()

    def __repr__(self) -> str:
        """The name that Ray puts before each line of the actor's log."""
        return self._plan.name

    def outlast(self, incarnation: int) -> None:
        """Wait until this incarnation is over; return at once if the process runs another one."""
        if incarnation == self._incarnation:
            self._over.wait()

    def finish(self) -> tuple[str, int]:
        """Wait until the instance, which has been told to close, has closed; return at once if it never ran. Returns
        host and process id."""
        if self._incarnation is not None:
            self._over.wait()
        return host_identity(), os.getpid()

    def _live(self, build: bytes) -> None:
        self._log_to_stderr()

        def make(node: Node) -> tuple[Engine, Facts]:
            self._node = node
            engine, facts = pickle.loads(build)(self._plan)(node)
            self._incarnation = node.incarnation
            gc.collect()
            gc.freeze()  # loaded objects live until the end: keep them out of every later collection
            return engine, facts

        try:
            self._settle()
            run_node(self._plan, make)
        except HydraError:  # the hub has been told, or the error is in the log
            self._exit()
        except BaseException:
            _log.exception("instance %s ended", self._plan.name)
            self._exit()
        self._over.set()
        if self._node is None or not self._node.deserted:  # else the hub may still live and wait for the next one
            time.sleep(_LET_GO_S)
        os._exit(1)  # the server is gone and cannot end us, or was silent; Ray decides about a restart

    def _log_to_stderr(self) -> None:
        """Log to stderr, which Ray carries to the server."""
        if self._plan.log_form == "json":
            lines = logging.StreamHandler()
            lines.setFormatter(log_formatter("json", self._plan.name))
            logging.basicConfig(handlers=[lines])
            logging.captureWarnings(True)
        else:
            logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
        logging.getLogger("hydrainfer").setLevel(self._plan.log_level.upper())

    def _settle(self) -> None:
        """Set the cores and the number of threads of this thread and of those that it starts. Called before a module
        that computes is imported."""
        share = self._plan.share
        if share.cores:
            try:
                os.sched_setaffinity(0, share.cores)
            except OSError:
                there = ", ".join(map(str, sorted(os.sched_getaffinity(0))))
                _log.warning("instance %s cannot be pinned to %s; there are %s", self._plan.name, share.cores, there)
        os.environ["OMP_NUM_THREADS"] = str(share.threads_of_one(self._plan.n_instances))  # Ray has set it to num_cpus

    def _exit(self) -> None:
        if self._incarnation is None:
            time.sleep(_START_PAUSE_S if self._node is None else _RETRY_S)
        os._exit(1)
