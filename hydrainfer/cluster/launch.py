"""Launchers start instances. The hub knows one only by this port."""

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
    """Starts one instance per plan and, if it `revives`, starts those again that die. `lost`: why it can start nothing
    any more, once that is so; the server ends then."""

    revives: bool
    lost: str | None

    def start(self, plans: Sequence[NodePlan], on_gone: Gone) -> None:
        """Begin to start them all and return; each says `Hello` or `Failed` to the hub. Raises `ConfigError` if they
        cannot be placed."""

    def watch(self, name: str, incarnation: int) -> None:
        """Call `on_gone` when this instance, which has said `Hello`, ends."""

    def kill(self, name: str, incarnation: int) -> None:
        """End an instance that is believed to hang, so that its death is known."""

    def restart(self, name: str) -> None:
        """Start an instance again whose latest start has `Failed`. Only if the launcher `revives`."""

    def close(self, timeout_s: float) -> None:
        """Wait for the instances, which have been told to close, then end those that are left."""


class InProcess:
    """Every instance is a thread of this process. `build` makes an instance's engine. Tests find the nodes in
    `nodes`."""

    def __init__(self, build: Callable[[NodePlan], Build]) -> None:
        self.revives = False
        self.lost: str | None = None
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
        """A thread cannot be killed; it stays a suspect."""

    def restart(self, name: str) -> None:
        """A thread that has ended does not come back."""

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
