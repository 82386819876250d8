"""The processes of the instances, around a census: a launcher that starts them, and pidfds that tell of their ends."""

from __future__ import annotations

import logging
import os
import signal
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import zmq

from hydrainfer.cluster.launch import Launcher
from hydrainfer.cluster.messages import Hello
from hydrainfer.cluster.node import NodePlan
from hydrainfer.cluster.rolling import Incarnation
from hydrainfer.machine import host_identity

_log = logging.getLogger(__name__)
LAST_WORDS_S = 0.25
"""The time that a message may take whose sender has ended."""


class _Watched(NamedTuple):
    name: str
    incarnation: int
    fd: int  # a pidfd, readable once the process has ended


class Keeper:
    """Starts, watches and kills instances. `on_gone` is called from any thread when one has ended; `look_at` and
    `look_away` add and remove a file descriptor that wakes the caller's loop."""

    def __init__(
        self,
        launcher: Launcher,
        clock: Callable[[], float],
        on_gone: Callable[[], None],
        look_at: Callable[[int], None],
        look_away: Callable[[int], None],
    ) -> None:
        self.launcher = launcher
        self._clock = clock
        self._on_gone = on_gone
        self._look_at = look_at
        self._look_away = look_away
        self._host = host_identity()
        self._watched: list[_Watched] = []
        self._gone: deque[tuple[str, int, float]] = deque()  # dead incarnations, and since when; any thread may append

    def start(self, plans: Sequence[NodePlan]) -> None:
        self.launcher.start(plans, self._report_gone)

    def add(self, plan: NodePlan) -> None:
        """Begin to start one more instance. Raises `ConfigError`."""
        self.launcher.add(plan)

    def remove(self, name: str) -> None:
        """Let an instance end for good, which has been told to close."""
        self._ask(self.launcher.remove, name)

    def watch(self, hello: Hello) -> None:
        """Notice when the process of an instance ends."""
        peer = hello.peer
        if hello.host != self._host or hello.pid == os.getpid():
            self.launcher.watch(peer.name, peer.incarnation)
            return
        try:
            fd = os.pidfd_open(hello.pid)
        except ProcessLookupError:
            self._gone.append((peer.name, peer.incarnation, self._clock()))
            return
        except OSError:  # out of file descriptors
            self.launcher.watch(peer.name, peer.incarnation)
            return
        self._watched.append(_Watched(peer.name, peer.incarnation, fd))
        self._look_at(fd)

    def ended(self, heard: Collection[str]) -> list[Incarnation]:
        """The incarnations that have ended. One that could not start is among them once it has been `heard` to say why,
        or after the time that its message may take."""
        now = self._clock()
        for watched in self._watched[:]:
            if _has_ended(watched.fd):
                self._unwatch(watched)
                self._gone.append((watched.name, watched.incarnation, now))
        ended, late = [], []
        while self._gone:
            gone = name, incarnation, since_s = self._gone.popleft()
            if name in heard or now > since_s + LAST_WORDS_S:
                ended.append((name, incarnation))
            else:
                late.append(gone)
        self._gone.extend(late)
        return ended

    @property
    def n_awaited(self) -> int:
        """Instances that have ended and whose last message may be on its way."""
        return len(self._gone)

    def kill(self, name: str, incarnation: int, restarted: bool) -> None:
        """Kill an instance that hangs, or that is `restarted` on purpose."""
        if restarted:
            _log.warning("instance %s is started again", name)
        else:
            _log.error("instance %s hangs, or its messages are lost: it is killed", name)
        try:
            for watched in self._watched:
                if (watched.name, watched.incarnation) == (name, incarnation):
                    signal.pidfd_send_signal(watched.fd, signal.SIGKILL)
                    return
            self.launcher.kill(name, incarnation)
        except Exception:  # it has ended, belongs to another user, or Ray fails: the instance stays suspect
            _log.exception("instance %s could not be killed", name)

    def restart(self, name: str) -> None:
        """Start an instance again that could not start."""
        self._ask(self.launcher.restart, name)

    def rouse(self, name: str) -> None:
        """Check that an instance that is away is being started."""
        self._ask(self.launcher.rouse, name)

    def forget(self) -> None:
        """Stop watching."""
        for watched in self._watched[:]:
            self._unwatch(watched)

    def _report_gone(self, name: str, incarnation: int) -> None:
        self._gone.append((name, incarnation, self._clock()))
        self._on_gone()

    def _unwatch(self, watched: _Watched) -> None:
        self._watched.remove(watched)
        self._look_away(watched.fd)
        os.close(watched.fd)

    @staticmethod
    def _ask(call: Callable[[str], None], name: str) -> None:
        try:
            call(name)
        except Exception:  # Ray fails: it may recover until the instance has been away for too long
            _log.exception("the launcher could not be asked about instance %s", name)


def _has_ended(pidfd: int) -> bool:
    poll = zmq.Poller()
    poll.register(pidfd, zmq.POLLIN)
    return bool(poll.poll(0))
