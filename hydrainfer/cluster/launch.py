"""Where instances come from. The hub knows a launcher only by this port."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from hydrainfer.cluster.node import Node, NodePlan, run_node
from hydrainfer.core import HydraError
from hydrainfer.engine import Engine

_log = logging.getLogger(__name__)
Facts = dict[str, str | int | float]
Build = Callable[[Node], tuple[Engine, Facts]]
Gone = Callable[[str, int], None]
"""Hears the name and incarnation of an instance that is known to be dead. Any thread."""


class Launcher(Protocol):
    """Starts one instance per plan and starts those again that die, if it can."""

    def start(self, plans: Sequence[NodePlan], on_gone: Gone) -> None:
        """Begin to start them all and return; each says `Hello` or `Failed` to the hub. Raises `ConfigError` if they
        cannot be placed."""

    def watch(self, name: str, incarnation: int) -> None:
        """It has said `Hello`: call `on_gone` when it ends."""

    def kill(self, name: str, incarnation: int) -> None:
        """It is believed to hang: end it, so that its death is known."""

    def close(self, timeout_s: float) -> None:
        """All have been told to close: wait for them, then end what is left."""


class InProcess:
    """Every instance is a thread of this process. `build` makes an instance's engine. Tests find the nodes in
    `nodes`."""

    def __init__(self, build: Callable[[NodePlan], Build]) -> None:
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
        """The thread itself tells."""

    def kill(self, name: str, incarnation: int) -> None:
        """A thread cannot be killed; it stays a suspect."""

    def close(self, timeout_s: float) -> None:
        for thread in self._threads.values():
            thread.join(timeout_s)

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
            if plan.name in self.nodes:
                self._on_gone(plan.name, self.nodes[plan.name].incarnation)
