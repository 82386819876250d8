"""Launchers, which start instances: the interface that the hub uses, and one that runs instances as threads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from hydrainfer.cluster.node import Node, NodePlan, run_node
from hydrainfer.core import ConfigError, HydraError
from hydrainfer.engine import Engine

_log = logging.getLogger(__name__)
Facts = dict[str, str | int | float]
Build = Callable[[Node], tuple[Engine, Facts]]
Gone = Callable[[str, int], None]
"""A function that is called with the name and incarnation of a dead instance. Any thread may call it."""


class Launcher(Protocol):
    """Starts one instance per plan. If `revives`, the launcher also restarts instances that die. `lost`: the reason why
    it can start nothing any more, or None; the server ends once it is set."""

    revives: bool
    lost: str | None

    @property
    def trouble(self) -> str:
        """The reason why all instances have ended and are being started again; "" if they are not."""

    def start(self, plans: Sequence[NodePlan], on_gone: Gone) -> None:
        """Begin to start all instances and return. Each sends `Hello` or `Failed` to the hub. Raises `ConfigError` if
        there is no room for them."""

    def watch(self, name: str, incarnation: int) -> None:
        """Call `on_gone` when this instance, which has sent `Hello`, ends."""

    def kill(self, name: str, incarnation: int) -> None:
        """Kill an instance that seems to hang. Its death is then reported as any other."""

    def restart(self, name: str) -> None:
        """Start an instance again after its latest start has `Failed`. Called only if the launcher `revives`."""

    def rouse(self, name: str) -> None:
        """Check that an instance that has died, and is not back yet, is being started. Called every few seconds."""

    def add(self, plan: NodePlan) -> None:
        """Begin to start one more instance. Raises `ConfigError` if there is no room, or if this launcher cannot."""

    def remove(self, name: str) -> None:
        """Do not start an instance again, which has been told to close, and end its process once it has closed."""

    def close(self, timeout_s: float) -> None:
        """Wait for the instances, which have been told to close, then kill those that are left."""


def _is_fixed() -> ConfigError:
    return ConfigError("instances of one process cannot come and go: use --launcher ray", param="launcher")


class InProcess:
    """A launcher that runs every instance as a thread of this process. `build` makes the engine of an instance.
    `nodes`: the nodes by name, for tests."""

    def __init__(self, build: Callable[[NodePlan], Build]) -> None:
        self.revives = False
        self.lost: str | None = None
        self.trouble = ""
        self.nodes: dict[str, Node] = {}
        self._build = build
        self._threads: dict[str, threading.Thread] = {}
        self._on_gone: Gone = lambda *_: None

    def start(self, plans: Sequence[NodePlan], on_gone: Gone) -> None:
        self._on_gone = on_gone
        for plan in plans:
            self._threads[plan.name] = threading.Thread(
                target=self._run, args=(plan,), name=f"instance-{plan.name}", daemon=True
            )
            self._threads[plan.name].start()

    def watch(self, name: str, incarnation: int) -> None:
        """Nothing to do: the thread itself calls `on_gone`."""

    def kill(self, name: str, incarnation: int) -> None:
        """Nothing to do: a thread cannot be killed; the instance stays suspect."""

    def restart(self, name: str) -> None:
        """Nothing to do: a thread that has ended is not started again."""

    def rouse(self, name: str) -> None:
        """Nothing to do, for the same reason."""

    def add(self, plan: NodePlan) -> None:  # noqa: ARG002
        raise _is_fixed()

    def remove(self, name: str) -> None:  # noqa: ARG002
        raise _is_fixed()

    def close(self, timeout_s: float) -> None:
        for thread in self._threads.values():
            thread.join(timeout_s)
        self.nodes.clear()  # so that weights and caches go, whoever still has a closed hub

    def _run(self, plan: NodePlan) -> None:
        build = self._build(plan)

        def keep(node: Node) -> tuple[Engine, Facts]:
            self.nodes[plan.name] = node
            return build(node)

        try:
            run_node(plan, keep)
        except HydraError:
            pass  # the hub has been told
        except Exception:
            _log.exception("instance %s ended", plan.name)
        finally:
            if (node := self.nodes.get(plan.name)) is not None:  # not so if it ends long after `close`
                self._on_gone(plan.name, node.incarnation)
