"""The front of several instances: where a request starts, where it goes next, and what they are doing together.

A request that may stay where it is never comes here (the scheduler keeps it): self first. Pictures go to the encoder
that their content names, everything else by `Balancing`.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Literal, NamedTuple, Protocol

from hydrainfer.cluster.hashing import HashRing
from hydrainfer.core import InstanceStats, Layout, Parcel, Request, Role, Stage, Unavailable
from hydrainfer.engine import EngineHandle

Balancing = Literal["least_load", "round_robin", "random"]


class InstanceHandle(EngineHandle, Protocol):
    """An engine with peers. All methods may be called from any thread."""

    def deliver(self, parcel: Parcel) -> None:
        """A peer's messages."""

    def peer_dead(self, peer: str, incarnation: int) -> None:
        """A peer's process, or its thread, is gone."""

    def stop(self) -> None:
        """Begin to close, without waiting."""

    def bury(self, peers: dict[str, int]) -> None:
        """After `close` of it and of `peers` (name → incarnation): free what was between them."""

    @property
    def alive(self) -> bool:
        """It takes requests."""


class Member(NamedTuple):
    name: str
    role: Role
    handle: InstanceHandle
    incarnation: int = 0


class Router:
    """An `EngineHandle` over all instances and the `Placement` of each. `lock` is the links' (see `LocalLink`)."""

    def __init__(
        self,
        members: Iterable[Member],
        lock: threading.Lock,
        balancing: Balancing = "least_load",
        rng: random.Random | None = None,
    ) -> None:
        self.members = {m.name: m for m in members}
        self._lock = lock
        self._balancing = balancing
        self._rng = rng or random.Random()
        self._n_chosen = 0
        self._chosen_at = dict.fromkeys(self.members, 0)
        self._encoders = HashRing(m.name for m in self.members.values() if m.role.runs(Stage.ENCODE))

    # ---- EngineHandle

    def submit(self, request: Request) -> None:
        stage = request.plan()[0]
        name = self.choose(request, stage, ())
        if name is None:
            raise Unavailable(f"no instance can {stage.value} now; retry later", retry_after_s=5.0)
        self.members[name].handle.submit(request)

    def cancel(self, request_ids: list[str]) -> None:
        with self._lock:
            for member in self.members.values():
                member.handle.cancel(request_ids)

    def stats(self) -> InstanceStats:
        return total([m.handle.stats() for m in self.members.values()])

    def close(self) -> None:
        for member in self.members.values():
            member.handle.stop()
        for member in self.members.values():
            member.handle.close()
        for member in self.members.values():
            member.handle.bury({m.name: m.incarnation for m in self.members.values() if m.name != member.name})

    def lost(self, name: str) -> None:
        """That instance is dead: its peers need not wait for its word."""
        for member in self.members.values():
            if member.name != name:
                member.handle.peer_dead(name, self.members[name].incarnation)

    # ---- Placement

    def choose(self, request: Request, stage: Stage, exclude: Collection[str]) -> str | None:
        able = [m for m in self.members.values() if m.role.runs(stage) and m.name not in exclude and m.handle.alive]
        if not able:
            return None
        if stage is Stage.ENCODE:
            return self._encoders.owner(request.media[0].key, {m.name for m in able})
        if self._balancing == "random":
            return self._rng.choice(able).name
        with self._lock:  # whose turn it is also settles ties: stats lag behind what was just sent
            load = {m.name: 0 if self._balancing == "round_robin" else _load(m.handle.stats()) for m in able}
            name = min(load, key=lambda n: (load[n], self._chosen_at[n]))
            self._n_chosen += 1
            self._chosen_at[name] = self._n_chosen
        return name


def _load(s: InstanceStats) -> int:
    return s.n_waiting + s.n_running + s.n_arriving


def total(parts: list[InstanceStats]) -> InstanceStats:
    """All instances as one: counts add up, and it stalls where the worst of them does."""
    blocks: dict[str, tuple[int, int, int]] = {}
    pulled: Counter[str] = Counter()
    for part in parts:
        for spec, (n, leased, cached) in part.cache_blocks.items():
            a, b, c = blocks.get(spec, (0, 0, 0))
            blocks[spec] = (a + n, b + leased, c + cached)
        pulled.update(part.blocks_pulled)

    def add(name: str) -> int:
        return sum(getattr(part, name) for part in parts)

    return InstanceStats(
        role=str(Layout(tuple(Role.parse(part.role) for part in parts))),
        n_waiting=add("n_waiting"),
        n_running=add("n_running"),
        n_encoding=add("n_encoding"),
        n_prefilling=add("n_prefilling"),
        n_decoding=add("n_decoding"),
        cache_blocks=blocks,
        embed_hits=add("embed_hits"),
        embed_queries=add("embed_queries"),
        n_preemptions=add("n_preemptions"),
        n_steps=add("n_steps"),
        stalled_s=max(part.stalled_s for part in parts),
        n_migrating=add("n_migrating"),
        n_arriving=add("n_arriving"),
        blocks_pulled=dict(pulled),
        n_landed=add("n_landed"),
    )
