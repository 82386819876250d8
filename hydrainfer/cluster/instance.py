"""One instance without sockets: `Node` runs it in production, the planner on a virtual clock.

hear ─> step: the engine's step ─> report to the hub, if there is news or a beat is due ─> parcels to peers
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import msgspec

from hydrainfer.cluster.messages import Beat, Cancel, Forget, HubOrder, Learned, Moved, Submit
from hydrainfer.cluster.roster import Roster
from hydrainfer.core import Output, Parcel
from hydrainfer.engine import Engine


class Pulse(msgspec.Struct, frozen=True):
    """The intervals and time limits by which the hub and the instances notice failures. `beat_s`: the hub and every
    instance send a message at least this often. `suspect_s`: an instance that was silent for this long gets requests
    only if no other can take them; after `dead_s` it is killed. `gap_s`: how long an output that came too early waits
    for the missing one before it. `patience_s`: how long a request waits for an instance of its stage. `handover_s`:
    how long an instance may take to report a request that another has handed to it; longer than a lease of `Timing`.
    `grace_s`: how late after its deadline an instance may report the end of a request."""

    beat_s: float = 0.25
    suspect_s: float = 5.0
    dead_s: float = 20.0
    gap_s: float = 1.0
    patience_s: float = 20.0
    handover_s: float = 15.0
    grace_s: float = 5.0


class Instance(ABC):
    """The engine of one instance and its connection to hub and peers. The owner sets `engine`, whose `PeerLink` is this
    object, whose `Placement` is a `Placer` by `roster`, and which calls `sink` and `moved`. A report is made at least
    every `beat_s`."""

    def __init__(self, name: str, incarnation: int, roster: Roster, beat_s: float) -> None:
        self.name, self.incarnation, self.roster = name, incarnation, roster
        self.engine: Engine | None = None
        self.outputs: list[Output] = []  # these two are for the next report
        self.moves: list[Moved] = []
        self.forgotten: list[tuple[int, dict[str, int]]] = []  # as these
        self.beat_at = 0.0
        self._beat_s = beat_s
        self._parcels: list[tuple[str, Parcel]] = []

    @abstractmethod
    def report(self, now: float) -> None:
        """Send `outputs`, `moves`, `forgotten` and the load to the hub."""

    @abstractmethod
    def post(self, peer: str, parcel: Parcel) -> None:
        """Send a parcel. It may be lost."""

    # ---- what the engine calls

    def send(self, peer: str, parcel: Parcel) -> None:
        self._parcels.append((peer, parcel))

    def host_of(self, peer: str) -> str:
        known = self.roster.peers.get(peer)
        return known.host if known is not None else ""

    def is_abroad(self, peer: str) -> bool:
        return self._cluster_of(peer) != self._cluster_of(self.name)

    def sink(self, outputs: list[Output]) -> None:
        self.outputs += outputs

    def moved(self, request_id: str, owner: str, hops: int) -> None:
        peer = self.roster.peers.get(owner)
        incarnation = self.incarnation if owner == self.name else peer.incarnation if peer is not None else 0
        self.moves.append(Moved(request_id, owner, incarnation, hops))

    # ---- turns

    def hear(self, message: Parcel | HubOrder, now: float) -> None:
        """Handle a message of a peer or the hub. `Members` and `Close` are left to `Node`."""
        engine = self.engine
        assert engine is not None
        match message:
            case Parcel(sender, incarnation):
                if self.roster.knows(sender, incarnation):  # if not, it is dead or not yet announced
                    self.roster.hear(sender, message.load)
                    engine.deliver(message)
            case Submit(request, produced):
                engine.submit(request, now, produced)
            case Cancel(request_ids):
                engine.cancel(request_ids, now)
            case Beat(loads, cuts):
                for name, load in loads.items():
                    if name != self.name:
                        self.roster.hear(name, load)
                self.roster.cuts = cuts
            case Forget(number):
                self.forgotten.append((number, engine.forget_cached()))
            case Learned(name, cached):
                self.roster.locator.learn(name, cached)

    def step(self, now: float) -> float:
        """Step the engine, report to the hub, send parcels. Returns the time of the next step; infinity: when woken."""
        engine = self.engine
        assert engine is not None
        wake_at = engine.step(now)
        if self.outputs or self.moves or self.forgotten or now >= self.beat_at:
            self.speak(now)
        if self._parcels:  # after the report: the hub has the outputs from which a peer continues
            for peer, parcel in self._parcels:
                self.post(peer, parcel)
            self._parcels.clear()
        return float("inf") if wake_at is None else wake_at

    def speak(self, now: float) -> None:
        """Send a report and clear the outputs and moves that it contained."""
        self.report(now)
        self.outputs.clear()
        self.moves.clear()
        self.forgotten.clear()
        if now >= self.beat_at:
            self.beat_at = now + self._beat_s

    def _cluster_of(self, name: str) -> str:
        known = self.roster.peers.get(name)
        return known.cluster if known is not None else ""
