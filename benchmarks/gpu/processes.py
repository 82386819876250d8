"""Instances as plain processes on one machine, where there is no Ray."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any
from unittest import mock

from hydrainfer.assemble import instances
from hydrainfer.cluster import Facts, Node, NodePlan, RunFolder
from hydrainfer.cluster.node import run_node
from hydrainfer.core import HydraError
from hydrainfer.engine import Engine

Build = Callable[[NodePlan], Callable[[Node], tuple[Engine, Facts]]]


def _live(plan: NodePlan, build: Build) -> None:
    with contextlib.suppress(HydraError):  # the hub has been told
        run_node(plan, build(plan))


class Processes:
    """A launcher that runs every instance in a spawned process. One that dies is not started again."""

    def __init__(self, build: Build) -> None:
        self.revives = False
        self.lost: str | None = None
        self._build = build
        self._processes: dict[str, BaseProcess] = {}
        self._on_gone: Callable[[str, int], None] = lambda *_: None

    def start(self, plans: Sequence[NodePlan], on_gone: Callable[[str, int], None]) -> None:
        self._on_gone = on_gone
        for plan in plans:
            process = multiprocessing.get_context("spawn").Process(target=_live, args=(plan, self._build), daemon=True)
            process.start()
            self._processes[plan.name] = process

    def watch(self, name: str, incarnation: int) -> None:
        def wait() -> None:
            self._processes[name].join()
            self._on_gone(name, incarnation)

        threading.Thread(target=wait, name=f"watch-{name}", daemon=True).start()

    def kill(self, name: str, incarnation: int) -> None:  # noqa: ARG002 - there is only one
        self._processes[name].kill()

    def restart(self, name: str) -> None:
        """Nothing to do, since it does not revive."""

    def rouse(self, name: str) -> None:
        """Nothing to do, for the same reason."""

    def close(self, timeout_s: float) -> None:
        end_s = time.monotonic() + timeout_s
        for process in self._processes.values():
            process.join(max(0.0, end_s - time.monotonic()))
            process.kill()


@contextlib.contextmanager
def in_processes() -> Iterator[None]:
    """Within it, instances that Ray would start are plain processes."""

    def launcher_of(config: Any, specs: Any, births: Any, by_ray: bool) -> tuple[Processes, RunFolder]:  # noqa: ARG001
        return Processes(partial(instances.build_node, births, None)), RunFolder(for_ray=False)

    with mock.patch.object(instances, "_launcher_of", launcher_of):
        yield
