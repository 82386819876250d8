"""One instance with its sockets: runs the engine, receives from the hub and the peers, reports after each step."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from hydrainfer.cluster.instance import Instance, Pulse
from hydrainfer.cluster.link import Link
from hydrainfer.cluster.mesh import Keys, Mesh
from hydrainfer.cluster.messages import (
    Become,
    Close,
    Failed,
    Hello,
    HubOrder,
    Members,
    Peer,
    Report,
    Submit,
    ToHub,
    decode_to_instance,
    encode,
)
from hydrainfer.cluster.placing import Placer
from hydrainfer.cluster.roster import Roster
from hydrainfer.config import MachineShare
from hydrainfer.core import (
    ErrorInfo,
    EventKind,
    HydraError,
    InternalError,
    LifecycleEvent,
    LogForm,
    Parcel,
    Role,
    shutting_down,
)
from hydrainfer.engine import Engine
from hydrainfer.machine import host_identity, in_url, local_ip

_log = logging.getLogger(__name__)
HUB = "hub"
_GOODBYE_S = 2.0  # for peers to confirm that they no longer read our blocks
_REPORTED_BY_OUTPUTS = (EventKind.TOKEN, EventKind.FINISHED)
_PULSE = Pulse()


@dataclass(frozen=True, slots=True)
class NodePlan:
    """The parameters with which an instance is started. `n_instances`: how many the layout has. `hub`: the hub's
    address, on machine `hub_host`; `pixels`: the address from which pictures are fetched; `bind`: the instance's own
    address, with places for `name`, `incarnation` and the `ip` from which this machine reaches the hub. `secret`: the
    shared secret by which transports recognize members. `share`: the instance's share of its machine. `log_level`: the
    least level that is logged, and `log_form` the form, if the instance has its own process. `cluster`: see `Peer`."""

    name: str
    role: str
    n_instances: int
    hub: str
    pixels: str
    bind: str
    hub_host: str
    secret: bytes = b""
    keys: Keys | None = None
    balancing: str = "least_load"
    pulse: Pulse = _PULSE
    share: MachineShare = field(default_factory=MachineShare)
    log_level: str = "info"
    log_form: LogForm = "text"
    cluster: str = ""


class Wire(Protocol):
    """The part of `Mesh` that a node uses."""

    address: str

    def connect(self, name: str, address: str) -> None: ...
    def forget(self, name: str) -> None: ...
    def send(self, name: str, data: bytes) -> None: ...
    def receive(self) -> Iterable[bytes]: ...
    def poll(self, timeout_s: float | None) -> None: ...
    def wake(self) -> None: ...


class Node(Instance):
    """An instance with its sockets. `ip`: the address at which peers reach this machine. All methods but `wake` are
    called on one thread, the one that calls `run`. `at_end`: functions to call once the engine is closed. `deserted`:
    whether it closes because the hub was silent. `links`: to the processes of the server, of which there is one."""

    def __init__(
        self,
        plan: NodePlan,
        incarnation: int,
        mesh: Wire,
        clock: Callable[[], float] = time.monotonic,
        ip: str = "127.0.0.1",
    ) -> None:
        super().__init__(plan.name, incarnation, Roster(), plan.pulse.beat_s)
        self.placer = Placer(self.roster, plan.balancing)
        self.plan = plan
        self.ip = ip
        self._pulse = plan.pulse
        self.mesh = mesh
        self.mesh.connect(HUB, plan.hub)
        self.wake = mesh.wake
        self._events: list[LifecycleEvent] = []
        self._host = host_identity()
        self._local = clock
        self.clock = HubClock(clock, same=self._host == plan.hub_host)
        self._turned_s = clock()
        self.links = {HUB: Link(incarnation, self._turned_s)}
        self.closing = False
        self.deserted = False
        self.at_end: list[Callable[[], None]] = []

    def record(self, event: LifecycleEvent) -> None:
        """Keep an event of the engine for the next report. Token and finish events are left out: outputs imply them."""
        if event.kind not in _REPORTED_BY_OUTPUTS:
            self._events.append(event)

    # ---- the life of an instance

    def start(self, engine: Engine, facts: dict[str, str | int | float]) -> None:
        """Send `Hello` to the hub."""
        self.engine = engine
        self._turned_s = self.links[HUB].heard_s = self._local()  # the hub sends nothing before `Hello`
        me = Peer(self.name, self.plan.role, self.incarnation, self.mesh.address, cluster=self.plan.cluster)
        self._tell(Hello(me, self._host, os.getpid(), facts))

    def run(self) -> None:
        """Take turns until the hub sends `Close` or has been silent for too long. Then end the requests that are left
        and close the engine."""
        engine = self.engine
        assert engine is not None, "run before start"
        try:
            while not self.closing:
                self.mesh.poll(self.turn())
            end_s = self._local() + _GOODBYE_S
            while self._closes(engine) and (not engine.still or (not engine.idle and self._local() < end_s)):
                self.mesh.poll(min(self.turn(), _GOODBYE_S / 10))
            self.speak(self.clock())
        except Exception:
            _log.exception("instance %s stopped after an internal error", self.name)
            self.fail(InternalError(f"instance {self.name} stopped after an internal error; see its log"))
            raise
        finally:
            engine.close()
            for call in self.at_end:
                call()

    def _closes(self, engine: Engine) -> bool:
        """End every request that is here, also those that have arrived since the last call. Always returns True."""
        engine.fail_all(shutting_down(), self.clock())
        return True

    def turn(self) -> float:
        """Read the messages that have arrived, step, report. Returns the seconds until the next turn."""
        for data in self.mesh.receive():
            self._read(data)
        self._watch_hub()
        if not self.clock.known:
            return self._pulse.beat_s
        wake_at = self.step(self.clock())
        return max(min(wake_at, self.beat_at) - self.clock(), 0.0)

    def fail(self, error: HydraError) -> None:
        """Tell the hub why the instance cannot run."""
        self._tell(Failed(self.name, self.incarnation, ErrorInfo.of(error)))

    def report(self, now: float) -> None:
        engine = self.engine
        assert engine is not None
        if not self.deserted:
            lists = tuple(self.outputs), tuple(self._events), tuple(self.moves)
            stats = engine.stats(now) if now >= self.beat_at else None
            body = now, *lists, engine.load(), stats, self.links[HUB].number(), engine.news(), *engine.out_of_reach(now)
            self._tell(Report(self.name, self.incarnation, *body, forgotten=tuple(self.forgotten)))
        self._events.clear()

    def post(self, peer: str, parcel: Parcel) -> None:
        self.mesh.send(peer, encode(parcel))

    def _tell(self, message: ToHub) -> None:
        self.mesh.send(HUB, encode(message))

    def _watch_hub(self) -> None:
        """Close if the server has been silent for too long: without a server nobody waits for the answers. The time by
        which this turn is late does not count: the whole machine may have been paused."""
        now, turned_s = self._local(), self._turned_s
        self._turned_s = now
        self.links[HUB].excuse(max(0.0, now - turned_s - self._pulse.beat_s), now)
        if now - self.links[HUB].heard_s > self._pulse.dead_s and not self.closing:
            _log.error("instance %s has not heard of the server for %.0f s and stops", self.name, self._pulse.dead_s)
            self.closing = self.deserted = True  # if the hub still lives, it places our requests elsewhere

    # ---- messages received

    def _read(self, data: bytes) -> None:
        try:
            message = decode_to_instance(data)
        except msgspec.DecodeError:
            _log.warning("instance %s got a message it cannot read", self.name)
            return
        if isinstance(message, Parcel):
            self.hear(message, self.clock())
        elif message.incarnation == self.incarnation:
            self.clock.hear(message.hub_s)
            if not self.links[HUB].hear(message.n, self._local()):
                raise InternalError("orders of the hub were lost on their way")
            for order in message.orders:
                self._obey(order)

    def _obey(self, order: HubOrder) -> None:
        match order:
            case Members(peers):
                self._meet(peers)
            case Become(role):
                assert self.engine is not None
                self.engine.scheduler.duties.accept(Role.parse(role))
            case Close():
                self.closing = True
            case Submit() if self.closing:
                pass
            case _:
                self.hear(order, self.clock())

    def _meet(self, peers: tuple[Peer, ...]) -> None:
        assert self.engine is not None
        before = {(p.name, p.incarnation) for p in self.roster.peers.values()}
        for gone in self.roster.update(peers):
            if gone.name != self.name:
                self.mesh.forget(gone.name)
                self.engine.peer_dead(gone.name, gone.incarnation, self.clock())
        for peer in peers:
            if peer.name != self.name and (peer.name, peer.incarnation) not in before:
                self.mesh.connect(peer.name, peer.address)


class HubClock:
    """The hub's clock, estimated as the local clock plus a shift. On the `same` machine they are one clock. Elsewhere
    the shift comes from the least delayed of the recent messages, and the time is not `known` before the first one.
    Never runs backwards."""

    def __init__(self, local: Callable[[], float], same: bool) -> None:
        self._local = local
        self._same = same
        self.known = same
        self._shift_s: float | None = None
        self._last_s = 0.0

    def hear(self, hub_s: float) -> None:
        """Note that a message, which the hub sent at `hub_s`, has arrived."""
        if self._same:
            return
        self.known = True
        shift_s = hub_s - self._local()  # too small by the message's travel time
        if self._shift_s is None:
            self._shift_s, self._last_s = shift_s, hub_s
        elif shift_s > self._shift_s:
            self._shift_s = shift_s
        else:
            self._shift_s -= min(self._shift_s - shift_s, _DRIFT_S)

    def __call__(self) -> float:
        self._last_s = max(self._last_s, self._local() + (self._shift_s or 0.0))
        return self._last_s


_DRIFT_S = 1e-5  # per message


def run_node(plan: NodePlan, build: Callable[[Node], tuple[Engine, dict[str, str | int | float]]]) -> None:
    """Run an instance from start to end. `build` makes its engine; if it fails, the hub is told why, and the error is
    raised."""
    incarnation = time.time_ns() // 1000
    ip = local_ip(plan.hub) if "{ip}" in plan.bind else "127.0.0.1"
    try:
        mesh = Mesh(plan.bind.format(name=plan.name, incarnation=incarnation, ip=in_url(ip)), plan.keys)
    except HydraError as e:
        _log.error("instance %s: %s", plan.name, e)  # there is no socket to tell the hub
        raise
    try:
        node = Node(plan, incarnation, mesh, ip=ip)
        try:
            node.start(*build(node))
        except HydraError as e:
            node.fail(e)
            raise
        except Exception as e:
            node.fail(InternalError(f"instance {plan.name} cannot start: {type(e).__name__}: {e}"))
            raise
        node.run()
    finally:
        mesh.close()
