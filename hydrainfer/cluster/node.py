"""One instance between its sockets: drives the engine, hears the hub and the peers, reports after each step."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from hydrainfer.cluster.mesh import Keys, Mesh
from hydrainfer.cluster.messages import (
    Beat,
    Cancel,
    Close,
    Failed,
    Hello,
    Learned,
    Members,
    Moved,
    Order,
    Peer,
    Report,
    Submit,
    ToHub,
    decode_to_instance,
    encode,
)
from hydrainfer.cluster.roster import Balancing, Roster
from hydrainfer.config import Share
from hydrainfer.core import (
    ErrorInfo,
    EventKind,
    HydraError,
    InternalError,
    LifecycleEvent,
    Output,
    Parcel,
    Role,
    Unavailable,
)
from hydrainfer.engine import Engine
from hydrainfer.machine import host_identity, local_ip

_log = logging.getLogger(__name__)
HUB = "hub"
_GOODBYE_S = 2.0  # for peers to say that they read our blocks no more
_REPORTED_BY_OUTPUTS = (EventKind.TOKEN, EventKind.FINISHED)


class Pulse(msgspec.Struct, frozen=True):
    """The intervals and limits by which instances are judged alive. `beat_s`: the hub and every instance speak at least
    this often. `suspect_s`, `dead_s`: after this silence an instance gets requests only if nobody else can, and is
    killed. `gap_s`: how long an output that came before its turn waits for the missing one. `patience_s`: how long a
    request waits for an instance of its stage. `grace_s`: an instance may be this late with a request's end after its
    deadline."""

    beat_s: float = 0.25
    suspect_s: float = 5.0
    dead_s: float = 20.0
    gap_s: float = 1.0
    patience_s: float = 20.0
    grace_s: float = 5.0


_PULSE = Pulse()


@dataclass(frozen=True, slots=True)
class NodePlan:
    """All that an instance is told when it is started. `hub`: where the hub hears, on machine `hub_host`; `pixels`:
    where it gives out pictures; `bind`: where to hear, with places for `name`, `incarnation` and the `ip` from which
    this machine reaches the hub. `roles`: of every instance of the layout. `secret`: what its transports know members
    by. `share`: what it gets of its machine."""

    name: str
    roles: dict[str, str]
    hub: str
    pixels: str
    bind: str
    hub_host: str
    secret: bytes = b""
    keys: Keys | None = None
    balancing: Balancing = "least_load"
    pulse: Pulse = _PULSE
    share: Share = field(default_factory=Share)


class Wire(Protocol):
    """The part of `Mesh` that a node uses."""

    address: str

    def connect(self, name: str, address: str) -> None: ...
    def forget(self, name: str) -> None: ...
    def send(self, name: str, data: bytes) -> None: ...
    def receive(self) -> Iterable[bytes]: ...
    def poll(self, timeout_s: float | None) -> None: ...
    def wake(self) -> None: ...


class Node:
    """`ip`: at which peers reach this machine. Satisfies the engine's `PeerLink`; its `roster` is the engine's
    `Placement`, its `sink`, `record` and `moved` are what the engine reports to. Everything but `wake` on one thread,
    the one that calls `run`. `at_end`: called when the engine has been closed."""

    def __init__(
        self,
        plan: NodePlan,
        incarnation: int,
        mesh: Wire,
        clock: Callable[[], float] = time.monotonic,
        ip: str = "127.0.0.1",
    ) -> None:
        self.plan = plan
        self.name = plan.name
        self.incarnation = incarnation
        self.ip = ip
        self.roster = Roster({n: Role.parse(r) for n, r in plan.roles.items()}, plan.balancing)
        self.engine: Engine | None = None
        self._pulse = plan.pulse
        self._mesh = mesh
        self._mesh.connect(HUB, plan.hub)
        self.wake = mesh.wake
        self._outputs: list[Output] = []
        self._events: list[LifecycleEvent] = []
        self._moved: list[Moved] = []
        self._parcels: list[tuple[str, Parcel]] = []
        self._host = host_identity()
        self._local = clock
        self.clock = HubClock(clock, same=self._host == plan.hub_host)
        self._heard_s = clock()
        self._report_at = 0.0
        self.closing = self._deserted = False
        self._n_reports = self._n_orders = 0
        self.at_end: list[Callable[[], None]] = []

    # ---- what the engine calls

    def send(self, peer: str, parcel: Parcel) -> None:
        self._parcels.append((peer, parcel))

    def sink(self, outputs: list[Output]) -> None:
        self._outputs += outputs

    def record(self, event: LifecycleEvent) -> None:
        if event.kind not in _REPORTED_BY_OUTPUTS:
            self._events.append(event)

    def moved(self, request_id: str, owner: str, hops: int) -> None:
        peer = self.roster.peers.get(owner)
        incarnation = self.incarnation if owner == self.name else peer.incarnation if peer is not None else 0
        self._moved.append(Moved(request_id, owner, incarnation, hops))

    # ---- the life of an instance

    def start(self, engine: Engine, facts: dict[str, str | int | float]) -> None:
        """Say `Hello`."""
        self.engine = engine
        self._heard_s = self._local()  # the silence counts from here: nobody speaks to who has not said Hello
        role = self.plan.roles[self.name]
        me = Peer(self.name, role, self.incarnation, self._mesh.address)
        self._tell(Hello(me, self._host, os.getpid(), facts))

    def run(self) -> None:
        """Take turns until the hub says `Close` or has been silent for too long."""
        engine = self.engine
        assert engine is not None, "run before start"
        try:
            while not self.closing:
                self._mesh.poll(self.turn())
            end_s = self._local() + _GOODBYE_S
            while self._closes(engine) and (not engine.still or (not engine.idle and self._local() < end_s)):
                self._mesh.poll(min(self.turn(), _GOODBYE_S / 10))
            self._report(engine, self.clock())
        except Exception:
            _log.exception("instance %s stopped after an internal error", self.name)
            self.fail(InternalError(f"instance {self.name} stopped after an internal error; see its log"))
            raise
        finally:
            engine.close()
            for call in self.at_end:
                call()

    def _closes(self, engine: Engine) -> bool:
        """End every request that is here, also those that have come meanwhile."""
        engine.fail_all(Unavailable("the server is shutting down", retry_after_s=5.0), self.clock())
        return True

    def turn(self) -> float:
        """Hear what has come, step, report. Returns how long nothing is to do, in seconds."""
        engine = self.engine
        assert engine is not None
        for data in self._mesh.receive():
            self._hear(engine, data)
        self._watch_hub()
        if not self.clock.known:
            return self._pulse.beat_s
        now = self.clock()
        wake_at = engine.step(now)
        if self._outputs or self._moved or self._local() >= self._report_at:
            self._report(engine, now)
        for peer, parcel in self._parcels:  # after the report: what a peer goes on from has been told
            self._mesh.send(peer, encode(parcel))
        self._parcels.clear()
        wait_s = self._report_at - self._local()
        if wake_at is not None:
            wait_s = min(wait_s, wake_at - self.clock())
        return max(wait_s, 0.0)

    def fail(self, error: HydraError) -> None:
        """Say why there will be no instance."""
        self._tell(Failed(self.name, self.incarnation, ErrorInfo.of(error)))

    def _report(self, engine: Engine, now: float) -> None:
        stats = None
        if self._local() >= self._report_at:
            stats = engine.stats(now)
            self._report_at = self._local() + self._pulse.beat_s
        lists = tuple(self._outputs), tuple(self._events), tuple(self._moved)
        if not self._deserted:
            self._n_reports += 1
            said = now, *lists, engine.load(), stats, self._n_reports, engine.news()
            self._tell(Report(self.name, self.incarnation, *said))
        for each in (self._outputs, self._events, self._moved):
            each.clear()

    def _tell(self, message: ToHub) -> None:
        self._mesh.send(HUB, encode(message))

    def _watch_hub(self) -> None:
        """Close if the server is silent for too long: without it nobody wants the answers."""
        if self._local() - self._heard_s > self._pulse.dead_s and not self.closing:
            _log.error("instance %s has not heard of the server for %.0f s and stops", self.name, self._pulse.dead_s)
            self.closing = self._deserted = True  # should it still live, others go on with what was here

    # ---- what is heard

    def _hear(self, engine: Engine, data: bytes) -> None:
        try:
            message = decode_to_instance(data)
        except msgspec.DecodeError:
            _log.warning("instance %s got a message it cannot read", self.name)
            return
        if isinstance(message, Parcel):
            if self.roster.knows(message.sender, message.incarnation):  # others are dead, or not yet announced
                self.roster.loads[message.sender] = message.load
                engine.deliver(message)
        elif message.incarnation == self.incarnation:
            self._heard_s = self._local()
            self.clock.hear(message.hub_s)
            self._n_orders += 1
            if message.n and message.n != self._n_orders:
                raise InternalError("orders of the hub were lost on their way")
            for order in message.orders:
                self._obey(engine, order)

    def _obey(self, engine: Engine, order: Order) -> None:
        now = self.clock()
        match order:
            case Submit(request, produced) if not self.closing:
                engine.submit(request, now, produced)
            case Cancel(request_ids):
                engine.cancel(request_ids, now)
            case Beat(loads):
                self.roster.loads.update({n: load for n, load in loads.items() if n != self.name})
            case Learned(name, cached):
                self.roster.learn(name, cached)
            case Members(peers):
                self._meet(engine, peers)
            case Close():
                self.closing = True

    def _meet(self, engine: Engine, peers: tuple[Peer, ...]) -> None:
        before = {(p.name, p.incarnation) for p in self.roster.peers.values()}
        for gone in self.roster.update(peers):
            if gone.name != self.name:
                self._mesh.forget(gone.name)
                engine.peer_dead(gone.name, gone.incarnation, self.clock())
        for peer in peers:
            if peer.name != self.name and (peer.name, peer.incarnation) not in before:
                self._mesh.connect(peer.name, peer.address)


class HubClock:
    """The hub's clock as heard here: the local one, shifted. On the `same` machine they are one clock; elsewhere the
    least delayed message of late tells the shift, and nothing is `known` before the first. Never runs backwards."""

    def __init__(self, local: Callable[[], float], same: bool) -> None:
        self._local = local
        self._same = same
        self.known = same
        self._shift_s: float | None = None
        self._last_s = 0.0

    def hear(self, hub_s: float) -> None:
        """A message of the hub, sent at `hub_s`, has arrived."""
        if self._same:
            return
        self.known = True
        shift_s = hub_s - self._local()  # too small by the time it travelled
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
    """The whole life of an instance: `build` makes its engine. The hub hears why, if that fails."""
    incarnation = time.time_ns() // 1000
    ip = local_ip(plan.hub) if "{ip}" in plan.bind else "127.0.0.1"
    try:
        mesh = Mesh(plan.bind.format(name=plan.name, incarnation=incarnation, ip=ip), plan.keys)
    except HydraError as e:
        _log.error("instance %s: %s", plan.name, e)  # no way to tell the hub
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
