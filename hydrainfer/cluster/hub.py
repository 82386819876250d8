"""The server's side of the cluster: an `EngineHandle` over all instances, with a thread that owns the sockets."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import zmq

from hydrainfer.cluster.front import Front
from hydrainfer.cluster.launch import Facts, Launcher
from hydrainfer.cluster.mesh import Mesh
from hydrainfer.cluster.messages import Close, Failed, Hello, HubOrder, Orders, Submit, ToHub, decode_to_hub, encode
from hydrainfer.cluster.node import NodePlan
from hydrainfer.cluster.pixels import answer_pixels
from hydrainfer.core import (
    ConfigError,
    HydraError,
    InstanceInfo,
    InstanceStats,
    InternalError,
    PixelSource,
    Request,
    shutting_down,
    total,
)
from hydrainfer.machine import host_identity

_log = logging.getLogger(__name__)
_CLOSE_S = 6.0
_LAST_WORDS_S = 0.25  # the time that a message may take whose sender has ended


class _Watched(NamedTuple):
    name: str
    incarnation: int
    fd: int  # a pidfd, readable once the process has ended


class Hub:
    """The `EngineHandle` over all instances. `start` waits until every instance runs. All other methods may be called
    from any thread. `pixels_at`: the address at which instances get pictures from `pixels`."""

    def __init__(
        self,
        front: Front,
        mesh: Mesh,
        launcher: Launcher,
        pixels: PixelSource,
        pixels_at: str,
        on_closed: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.launcher = launcher
        self.facts: dict[str, Facts] = {}
        self._front, self._mesh, self._clock = front, mesh, clock
        self._plans: Sequence[NodePlan] = ()
        self.address = mesh.address
        self._pixels = pixels
        self._on_closed = on_closed
        self._pixel_socket = mesh.listen(zmq.ROUTER, pixels_at)
        self.pixels_at: str = self._pixel_socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._lock = threading.Lock()  # around the front
        self._connected: dict[str, int] = {}
        self._n_orders: dict[str, int] = {}  # by name, the messages sent since it was connected
        self._watched: list[_Watched] = []
        self._gone: deque[tuple[str, int, float]] = deque()  # dead incarnations, and since when; any thread may append
        self._failed: dict[str, HydraError] = {}
        self._host = host_identity()
        self._closing = False
        self._over = self._broken = False
        self._started = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="hub", daemon=True)

    # ---- EngineHandle

    def submit(self, request: Request) -> None:
        order = Orders(0, 0.0, (Submit(request),))
        encode(order)  # a request that no message can carry is the caller's error, and not the hub's
        with self._lock:
            if self._closing:
                raise shutting_down(retry_after_s=1.0)
            self._front.submit(request, self._clock())
        self._mesh.wake()

    def cancel(self, request_ids: list[str]) -> None:
        with self._lock:
            self._front.cancel(request_ids, self._clock())
        if not self._over:
            self._mesh.wake()

    def stats(self) -> InstanceStats:
        stats = total([i.stats for i in self.instances() if i.stats is not None])
        return msgspec.structs.replace(stats, stalled_s=float("inf")) if self._broken else stats

    def lost(self) -> str | None:
        """The reason why the cluster can never serve again, or None."""
        if self._broken:
            return "the hub stopped after an internal error; see the log"
        lost = self._front.lost
        return self.launcher.lost if lost is None else lost.why

    def instances(self) -> list[InstanceInfo]:
        """Every instance of the layout, running or not."""
        with self._lock:
            members, now = dict(self._front.members), self._clock()
            trouble = self._front.restarts.trouble
            troubles = {plan.name: trouble(plan.name) or self.launcher.trouble for plan in self._plans}
        infos = []
        for plan in self._plans:
            member, role = members.get(plan.name), plan.roles[plan.name]
            if member is None or self._broken:
                infos.append(InstanceInfo(plan.name, role, "dead", trouble=troubles[plan.name]))
                continue
            peer = member.hello.peer
            state = "suspect" if peer.suspect else "alive"
            facts = (peer.incarnation, member.hello.pid, now - member.heard_s, member.stats)
            infos.append(InstanceInfo(plan.name, role, state, *facts))
        return infos

    def restart_all(self) -> bool:
        """Begin to restart every instance, one at a time, while requests go on. Returns False if the launcher does not
        restart instances."""
        if not self.launcher.revives:
            return False
        with self._lock:
            self._front.rolling.begin([plan.name for plan in self._plans])
        return True

    def close(self) -> None:
        """End every request and every instance. Safe to repeat."""
        if self._over:
            return
        self._closing = True
        self._mesh.wake()
        if self._thread.is_alive():
            self._thread.join()
        if self._broken:
            self.launcher.close(_CLOSE_S)
        self._over = True
        self._mesh.close()
        self._on_closed()

    # ---- start

    def start(self, plans: Sequence[NodePlan], timeout_s: float) -> None:
        """Start every instance and wait for them. Raises the error of an instance that could not start, or
        `ConfigError` after `timeout_s`."""
        self._plans = plans
        self._thread.start()
        try:
            self.launcher.start(self._plans, self._report_gone)
            with self._started:
                if not self._started.wait_for(self._settled, timeout_s):
                    missing = [p.name for p in self._plans if p.name not in self.facts]
                    raise ConfigError(f"{', '.join(missing)} did not start within {timeout_s:g} s; see their logs")
            for error in self._failed.values():
                raise error
            if len(self.facts) < len(self._plans):
                raise InternalError(f"the instances cannot be started: {self.lost()}")
        except BaseException:
            self.close()
            raise

    def _settled(self) -> bool:
        return bool(self._failed) or len(self.facts) == len(self._plans) or self.lost() is not None

    def _report_gone(self, name: str, incarnation: int) -> None:
        self._gone.append((name, incarnation, self._clock()))
        if not self._over:
            self._mesh.wake()

    # ---- the loop

    def _run(self) -> None:
        try:
            while not self._closing and self.launcher.lost is None:
                self._turn()
            if not self._closing:
                self._give_up()
            self._shut()
        except Exception:
            _log.exception("the hub stopped after an internal error")
            with self._lock:
                self._closing = self._broken = True
        finally:
            with self._lock:
                self._front.end_all(shutting_down(), self._clock())

    def _give_up(self) -> None:
        """End every request and the wait in `start`, since the server ends."""
        _log.error("the server ends: %s", self.launcher.lost)
        with self._lock:
            self._closing = True
            self._front.end_all(shutting_down(), self._clock())
        with self._started:
            self._started.notify_all()

    def _turn(self) -> None:
        answer_pixels(self._pixel_socket, self._pixels)
        gone = self._ended()  # before the messages are read, since it may have sent some
        messages = [m for m in map(self._read, self._mesh.receive()) if m is not None]
        with self._lock:
            for message in messages:
                self._hear(message)
            self._bury(gone)
            had_lost = self._front.lost
            wake_at = self._front.tick(self._clock())
            orders, kills = self._front.orders(), self._front.kills[:]
            self._front.kills.clear()
            retries = self._front.restarts.due(self._clock()) if not self._closing else []
            silent = self._front.restarts.silent(self._clock()) if not self._closing else []
            self._connect()
        if self._front.lost is not had_lost:
            _log.error("%s", self.lost())
        for name, given in orders.items():
            if name in self._connected:
                self._order(name, *given)
        for name, incarnation in kills:
            self._kill(name, incarnation)
        for name in retries:
            self._ask_launcher(self.launcher.restart, name)
        for name in silent:
            self._ask_launcher(self.launcher.rouse, name)
        wake_at = min(wake_at, self._clock() + _LAST_WORDS_S / 5) if self._gone else wake_at
        self._mesh.poll(max(wake_at - self._clock(), 0.0))

    def _order(self, name: str, *orders: HubOrder) -> None:
        self._n_orders[name] += 1
        message = Orders(self._connected[name], self._clock(), orders, self._n_orders[name])
        self._mesh.send(name, encode(message))

    @staticmethod
    def _read(data: bytes) -> ToHub | None:
        try:
            return decode_to_hub(data)
        except msgspec.DecodeError:
            _log.warning("the hub got a message it cannot read")
            return None

    def _hear(self, message: ToHub) -> None:
        now = self._clock()
        if isinstance(message, Failed) and message.name in self.facts:
            _log.error("instance %s: %s", message.name, message.error.message)
            self._front.failed(message.name, message.incarnation, message.error, now)
        elif isinstance(message, Failed):  # `start` raises the error
            with self._started:
                self._failed[message.name] = message.error.exception()
                self._started.notify_all()
        elif isinstance(message, Hello) and message.peer.name not in self._front.roster.roles:
            _log.warning("the hub heard of %r, which is not in the layout", message.peer.name)
        elif isinstance(message, Hello):
            self._front.hello(message, now)
            self._watch(message)
            with self._started:
                self.facts[message.peer.name] = message.facts
                self._failed.pop(message.peer.name, None)
                self._started.notify_all()
        else:
            self._front.report(message, now)

    def _connect(self) -> None:
        members = self._front.members
        for name in self._connected.keys() - members.keys():
            del self._connected[name]
            self._mesh.forget(name)
        for name, member in members.items():
            peer = member.hello.peer
            if self._connected.get(name) != peer.incarnation:
                self._connected[name], self._n_orders[name] = peer.incarnation, 0
                try:
                    self._mesh.connect(name, peer.address)
                except zmq.ZMQError as e:  # out of file descriptors: it would never hear of us
                    _log.error("instance %s cannot be connected: %s", name, e)
                    self._front.kills.append((name, peer.incarnation))
                if self._closing:  # it came after `_shut` had told the others to close
                    self._order(name, Close())

    # ---- deaths

    def _watch(self, hello: Hello) -> None:
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
        self._mesh.watch(fd)

    def _ended(self) -> list[tuple[str, int]]:
        """Name and incarnation of instances that have ended. One that could not start is among them once it has been
        heard to say why, or after the time that its message may take."""
        now = self._clock()
        for watched in self._watched[:]:
            if _has_ended(watched.fd):
                self._unwatch(watched)
                self._gone.append((watched.name, watched.incarnation, now))
        ended, late = [], []
        while self._gone:
            gone = name, incarnation, since_s = self._gone.popleft()
            if name in self.facts or name in self._failed or now > since_s + _LAST_WORDS_S:
                ended.append((name, incarnation))
            else:
                late.append(gone)
        self._gone.extend(late)
        return ended

    def _bury(self, gone: list[tuple[str, int]]) -> None:
        for name, incarnation in gone:
            if not self._closing and name not in self._failed:  # `start` raises the error of a failed one
                _log.error("instance %s has died", name)
            for_good = not self.launcher.revives and not self._closing
            self._front.gone(name, incarnation, self._clock(), for_good)

    def _unwatch(self, watched: _Watched) -> None:
        self._watched.remove(watched)
        self._mesh.unwatch(watched.fd)
        os.close(watched.fd)

    def _kill(self, name: str, incarnation: int) -> None:
        if (name, incarnation) == self._front.rolling.ended:
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

    @staticmethod
    def _ask_launcher(call: Callable[[str], None], name: str) -> None:
        try:
            call(name)
        except Exception:  # Ray fails: it may recover until the instance has been away for too long
            _log.exception("instance %s could not be started again", name)

    def _shut(self) -> None:
        """Tell all instances to close, read their last reports, and end those that do not close in time."""
        for name in self._connected:
            self._order(name, Close())
        closed = threading.Event()

        def end_instances() -> None:
            self.launcher.close(_CLOSE_S)
            closed.set()
            self._mesh.wake()

        thread = threading.Thread(target=end_instances, name="hub-close", daemon=True)
        thread.start()
        while not closed.is_set():
            self._turn()
        thread.join()
        self._turn()
        for watched in self._watched[:]:
            self._unwatch(watched)


def _has_ended(pidfd: int) -> bool:
    poll = zmq.Poller()
    poll.register(pidfd, zmq.POLLIN)
    return bool(poll.poll(0))
