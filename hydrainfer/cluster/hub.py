"""The server's side of the cluster: an `EngineHandle` over all instances, with a thread that owns the sockets."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import msgspec
import zmq

from hydrainfer.cluster.keeper import LAST_WORDS_S, Keeper
from hydrainfer.cluster.launch import Facts, Launcher
from hydrainfer.cluster.mesh import Mesh
from hydrainfer.cluster.messages import Close, Failed, Hello, Orders, Submit, ToHub, decode_to_hub, encode
from hydrainfer.cluster.node import NodePlan
from hydrainfer.cluster.pixels import answer_pixels
from hydrainfer.cluster.rolling import Incarnation
from hydrainfer.cluster.server_side import ServerSide
from hydrainfer.core import (
    ConfigError,
    Forgotten,
    HydraError,
    InstanceInfo,
    InstanceStats,
    InternalError,
    PixelSource,
    Request,
    Role,
    shutting_down,
    total,
)

_log = logging.getLogger(__name__)
_CLOSE_S = 6.0


class Hub:
    """The `EngineHandle` over all instances. `start` waits until every instance runs. All other methods may be called
    from any thread. `pixels_at`: the address at which instances get pictures from `pixels`."""

    def __init__(
        self,
        side: ServerSide,
        mesh: Mesh,
        launcher: Launcher,
        pixels: PixelSource,
        pixels_at: str,
        on_closed: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.launcher = launcher
        self.facts: dict[str, Facts] = {}
        self._side = side
        self._mesh = mesh
        self._clock = clock
        self._keeper = Keeper(launcher, clock, mesh.wake, mesh.watch, mesh.unwatch)
        self._plans: Sequence[NodePlan] = ()
        self.address = mesh.address
        self._pixels = pixels
        self._on_closed = on_closed
        self._pixel_socket = mesh.listen(zmq.ROUTER, pixels_at)
        self.pixels_at: str = self._pixel_socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._lock = threading.Lock()  # around the server's side
        self._connected: dict[str, int] = {}
        self._failed: dict[str, HydraError] = {}
        self._closing = False
        self._over = False
        self._broken = False
        self._started = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="hub", daemon=True)

    # ---- EngineHandle

    def submit(self, request: Request) -> None:
        order = Orders(0, 0.0, (Submit(request),))
        encode(order)  # a request that no message can carry is the caller's error, and not the hub's
        with self._lock:
            if self._closing:
                raise shutting_down(retry_after_s=1.0)
            self._side.lives.submit(request, self._clock())
        self._mesh.wake()

    def cancel(self, request_ids: list[str]) -> None:
        with self._lock:
            self._side.lives.cancel(request_ids, self._clock())
        self._mesh.wake()

    def stats(self) -> InstanceStats:
        stats = total([i.stats for i in self.instances() if i.stats is not None])
        return msgspec.structs.replace(stats, stalled_s=float("inf")) if self._broken else stats

    def lost(self) -> str | None:
        """The reason why the cluster can never serve again, or None."""
        if self._broken:
            return "the hub stopped after an internal error; see the log"
        lost = self._side.census.lost
        return self.launcher.lost if lost is None else lost.why

    def instances(self) -> list[InstanceInfo]:
        """Every instance of the layout, running or not."""
        with self._lock:
            members = dict(self._side.census.members)
            now = self._clock()
            silent_s = {name: now - link.heard_s for name, link in self._side.links.items()}
            trouble = self._side.census.restarts.trouble
            troubles = {plan.name: trouble(plan.name) or self.launcher.trouble for plan in self._plans}
        infos = []
        for plan in self._plans:
            member, role = members.get(plan.name), plan.role
            if member is None or self._broken:
                infos.append(InstanceInfo(plan.name, role, "dead", trouble=troubles[plan.name]))
                continue
            peer = member.hello.peer
            state = "suspect" if peer.suspect else "alive"
            facts = (peer.incarnation, member.hello.pid, silent_s[plan.name], member.stats)
            infos.append(InstanceInfo(plan.name, role, state, *facts))
        return infos

    def forget_cached(self) -> Future[Forgotten]:
        with self._lock:
            if self._closing:
                raise shutting_down(retry_after_s=1.0)
            future = self._side.forgetting.begin()
        self._mesh.wake()
        return future

    def restart_all(self) -> bool:
        """Begin to restart every instance, one at a time, while requests go on. Returns False if the launcher does not
        restart instances."""
        if not self.launcher.revives:
            return False
        with self._lock:
            self._side.census.rolling.begin([plan.name for plan in self._plans])
        return True

    def add(self, plan: NodePlan) -> None:
        """Begin to start one more instance, which gets requests once it runs. Raises `ConfigError` if there is no room
        for it, or if the launcher cannot."""
        with self._lock:  # before it starts, or its `Hello` would be that of a stranger
            self._side.census.add(plan.name, Role.parse(plan.role))
        try:
            self._keeper.add(plan)
        except BaseException:
            with self._lock:
                del self._side.census.roles[plan.name]
            raise
        self._plans = [*self._plans, plan]

    def remove(self, name: str) -> None:
        """Let an instance end once it has no requests. Raises `ConfigError` if no other runs its stages, or if the
        launcher restarts nothing, so that its instances are fixed."""
        if not self.launcher.revives:
            raise ConfigError("instances of one process cannot come and go: use --launcher ray", param="launcher")
        with self._lock:
            self._side.census.retire(name)
        self._mesh.wake()

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
            self._keeper.start(self._plans)
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
                self._side.lives.end_all(shutting_down(), self._clock())
                self._side.forgetting.end(shutting_down())

    def _give_up(self) -> None:
        """End every request and the wait in `start`, since the server ends."""
        _log.error("the server ends: %s", self.launcher.lost)
        with self._lock:
            self._closing = True
            self._side.lives.end_all(shutting_down(), self._clock())
        with self._started:
            self._started.notify_all()

    def _turn(self) -> None:
        census = self._side.census
        answer_pixels(self._pixel_socket, self._pixels)
        gone = self._keeper.ended({*self.facts, *self._failed})  # before reading, since they may have sent messages
        messages = [m for m in map(self._read, self._mesh.receive()) if m is not None]
        with self._lock:
            for message in messages:
                self._hear(message)
            self._bury(gone)
            had_lost = census.lost
            wake_at = self._side.tick(self._clock())
            kills, closed = census.kills[:], census.told_to_close[:]
            census.kills.clear()
            census.told_to_close.clear()
            retries = census.restarts.due(self._clock()) if not self._closing else []
            silent = census.restarts.silent(self._clock()) if not self._closing else []
            self._connect()
            orders = self._orders()
        if census.lost is not had_lost:
            _log.error("%s", self.lost())
        for name, order in orders:
            self._mesh.send(name, encode(order))
        for dead in kills:
            self._keeper.kill(*dead, restarted=dead == census.rolling.ended)
        for name in closed:
            self._keeper.remove(name)
        for name in retries:
            self._keeper.restart(name)
        for name in silent:
            self._keeper.rouse(name)
        wake_at = min(wake_at, self._clock() + LAST_WORDS_S / 5) if self._keeper.n_awaited else wake_at
        self._mesh.poll(max(wake_at - self._clock(), 0.0))

    def _orders(self) -> list[tuple[str, Orders]]:
        """The messages to send, by the name of the instance. The caller holds the lock."""
        messages = [(name, link.message(self._clock())) for name, link in self._side.links.items()]
        return [(name, message) for name, message in messages if message is not None]

    @staticmethod
    def _read(data: bytes) -> ToHub | None:
        try:
            return decode_to_hub(data)
        except msgspec.DecodeError:
            _log.warning("the hub got a message it cannot read")
            return None

    def _hear(self, message: ToHub) -> None:
        match message:
            case Failed(name, _, error) if name in self.facts:
                _log.error("instance %s: %s", name, error.message)
            case Failed(name, _, error):  # `start` raises the error
                with self._started:
                    self._failed[name] = error.exception()
                    self._started.notify_all()
                return
            case Hello(peer) if peer.name not in self._side.census.roles:
                _log.warning("the hub heard of %r, which is not in the layout", peer.name)
                return
        self._side.hear(message, self._clock())
        if isinstance(message, Hello):
            self._keeper.watch(message)
            with self._started:
                self.facts[message.peer.name] = message.facts
                self._failed.pop(message.peer.name, None)
                self._started.notify_all()

    def _connect(self) -> None:
        members = self._side.census.members
        for name in self._connected.keys() - members.keys():
            del self._connected[name]
            self._mesh.forget(name)
        for name, member in members.items():
            peer = member.hello.peer
            if self._connected.get(name) != peer.incarnation:
                self._connected[name] = peer.incarnation
                try:
                    self._mesh.connect(name, peer.address)
                except zmq.ZMQError as e:  # out of file descriptors: it would never hear of us
                    _log.error("instance %s cannot be connected: %s", name, e)
                    self._side.census.kills.append((name, peer.incarnation))
                if self._closing:  # it came after `_shut` had told the others to close
                    self._side.links[name].post(Close())

    # ---- ends

    def _bury(self, gone: list[Incarnation]) -> None:
        for name, incarnation in gone:
            if name in self._side.census.leaving:
                _log.warning("instance %s has left", name)
                self._plans = [plan for plan in self._plans if plan.name != name]
                self.facts.pop(name, None)
            elif not self._closing and name not in self._failed:  # `start` raises the error of a failed one
                _log.error("instance %s has died", name)
            for_good = not self.launcher.revives and not self._closing
            self._side.census.gone(name, incarnation, self._clock(), for_good)

    def _shut(self) -> None:
        """Tell all instances to close, read their last reports, and end those that do not close in time."""
        with self._lock:
            for link in self._side.links.values():
                link.post(Close())
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
        self._keeper.forget()
