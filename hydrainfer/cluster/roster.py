"""The instances that live, and what is known of each: its role, how busy it is, whom it reaches, what it has cached."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from hydrainfer.cluster.locate import Locator, PrefixIndex
from hydrainfer.cluster.messages import Peer
from hydrainfer.cluster.rolling import Incarnation
from hydrainfer.core import Load, Request, Role, Stage, ring_of

_IDLE = Load()
_GUESS = Load(picture_s=0.05, token_s=5e-4, decode_s=2e-3, pull_s=5e-5)
"""The times that are assumed for an instance that has not measured its own yet."""


class Busy(NamedTuple):
    """The seconds of work that an instance has. `least_s`: without the waiting prompts, which a short one may pass.
    `longest`: the most tokens of such a prompt; a prompt with more passes none of them. `token_s`: to prefill one."""

    delay_s: float
    least_s: float
    longest: float
    token_s: float
    load: Load

    @classmethod
    def of(cls, load: Load) -> Busy:
        busy_s, token_s = delay_s(load), load.token_s or _GUESS.token_s
        if not load.sizes:
            return cls(busy_s, busy_s, 0.0, token_s, load)
        longest = max(tokens / n for n, tokens in load.sizes)
        return cls(busy_s, busy_s - load.n_tokens * token_s, longest, token_s, load)

    def before_s(self, n_tokens: int) -> float:
        """The seconds of work that go before a prompt of which `n_tokens` are to be computed."""
        if n_tokens >= self.longest:
            return self.delay_s
        return self.delay_s - (self.load.n_tokens - self.load.n_before(n_tokens)) * self.token_s


class Roster:
    """`peers` and `roles`: of the instances that live, by name. `loads`: as last reported, plus the requests placed
    since; see `hear`. `cuts`: the peers that an instance cannot reach, as last reported. `locator`: knows the cached
    prefixes. `turns`: the number of the choice that placed a request there last."""

    def __init__(self, locator: Locator | None = None) -> None:
        self.peers: dict[str, Peer] = {}
        self.roles: dict[str, Role] = {}
        self.loads: dict[str, Load] = {}
        self.cuts: dict[str, tuple[str, ...]] = {}
        self.locator = locator or PrefixIndex()
        self.turns: dict[str, int] = {}
        self._n_placed = 0
        self._running: dict[Stage, list[str]] = {stage: [] for stage in Stage}
        self._sound = self._running  # those that are not suspect
        self._busy: dict[str, Busy] = {}
        self._unread: set[str] = set()  # those whose load has changed since

    # ---- who lives

    def update(self, peers: Iterable[Peer]) -> list[Peer]:
        """Set the peers that live now. Returns the earlier ones that have died."""
        now = {p.name: p for p in peers}
        gone = [p for name, p in self.peers.items() if name not in now or now[name].incarnation != p.incarnation]
        for p in gone:
            if self.loads.pop(p.name, None) is not None:
                self._unread.add(p.name)
            self.locator.forget(p.name)
            self.cuts.pop(p.name, None)
        self.peers = now
        self.roles = {name: Role.parse(p.role) for name, p in now.items()}
        self._running = {s: sorted(name for name, role in self.roles.items() if role.runs(s)) for s in Stage}
        self._sound = {s: [name for name in names if not now[name].suspect] for s, names in self._running.items()}
        for name in now:
            self.turns.setdefault(name, 0)
            self._busy.setdefault(name, Busy.of(_IDLE))
        return gone

    def knows(self, name: str, incarnation: int) -> bool:
        peer = self.peers.get(name)
        return peer is not None and peer.incarnation == incarnation

    def listeners(self) -> set[Incarnation]:
        """The instances that choose among several prefilling ones, so that they need to know what those have cached."""
        if len(self._running[Stage.PREFILL]) < 2:
            return set()
        return {(n, p.incarnation) for n, p in self.peers.items() if not self.roles[n].runs(Stage.PREFILL)}

    # ---- who can take a request

    def running(self, stage: Stage) -> Sequence[str]:
        """The instances that run `stage`, in alphabetical order."""
        return self._running[stage]

    def sound(self, stage: Stage, exclude: Collection[str]) -> list[str]:
        """Those that are not suspect either."""
        return [name for name in self._sound[stage] if name not in exclude]

    def able(self, request: Request, stage: Stage, exclude: Collection[str]) -> list[str]:
        """The instances to choose among. A suspect is better than none, and so is one that cannot reach the instances
        of a later stage."""
        names = self.sound(stage, exclude) or [name for name in self._running[stage] if name not in exclude]
        if any(self.cuts.values()):
            step = request.plan().index(stage)
            names = [name for name in names if self._leads_on(name, request, step)] or names
        if request.prefill_cluster and stage is not Stage.DECODE:
            names = self.in_cluster(request.prefill_cluster, names) or names
        return names

    def in_cluster(self, cluster: str, names: Iterable[str]) -> list[str]:
        """Those of these instances that belong to the cluster."""
        return [name for name in names if self.peers[name].cluster == cluster]

    def encoder_of(self, request: Request, names: Collection[str]) -> str:
        """The one of these encoders that consistent hashing names for the first picture."""
        owner = ring_of(tuple(self._running[Stage.ENCODE])).owner(request.media[0].key, names)
        assert owner is not None, "no encoder to choose from"
        return owner

    def has_way(self, request: Request) -> bool:
        """Whether the request can pass all its stages without a pair of instances that cannot reach each other."""
        return any(self._leads_on(name, request, 0) for name in self._running[request.plan()[0]])

    def is_cut(self, name: str, other: str) -> bool:
        return other in self.cuts.get(name, ()) or name in self.cuts.get(other, ())

    def _leads_on(self, name: str, request: Request, step: int) -> bool:
        """Whether a request that is at this step of its plan at this instance can pass its later steps."""
        role = self.roles[name]
        for beyond, stage in enumerate(request.plan()):
            if beyond > step and not role.runs(stage):
                others = (other for other in self._running[stage] if not self.is_cut(name, other))
                return any(self._leads_on(other, request, beyond) for other in others)
        return True

    # ---- how busy they are

    def hear(self, name: str, load: Load) -> None:
        """Note the load that an instance has reported."""
        self.loads[name] = load
        self._unread.add(name)

    def load(self, name: str) -> Load:
        return self.loads.get(name, _IDLE)

    @property
    def busy(self) -> Mapping[str, Busy]:
        """By name, for all that live."""
        if self._unread:
            self._busy.update((name, Busy.of(self.load(name))) for name in self._unread)
            self._unread.clear()
        return self._busy

    def busy_s(self, name: str, n_tokens: int) -> float:
        """The seconds of work that an instance does before a prompt of which `n_tokens` are to be computed."""
        return self.busy[name].before_s(n_tokens)

    def encode_s(self, name: str, request: Request) -> float:
        """The seconds that an instance takes to encode the pictures of `request`."""
        return len(request.media) * (self.load(name).picture_s or _GUESS.picture_s)

    def pull_s(self, name: str) -> float:
        """The seconds that an instance takes to copy the KV of a token from another."""
        own_s = self.load(name).pull_s
        return own_s or max((load.pull_s for load in self.loads.values()), default=0.0) or _GUESS.pull_s

    def place(self, name: str, request: Request, stage: Stage, n_cached: int) -> None:
        """Count a request that begins with `stage` at an instance, which has `n_cached` tokens of its prompt."""
        self._n_placed += 1
        self.turns[name] = self._n_placed
        load = self.load(name)
        if stage is Stage.DECODE:
            self.hear(name, msgspec.structs.replace(load, n_decoding=load.n_decoding + 1))
            return
        n_pictures = len(request.media) if stage is Stage.ENCODE else 0
        n_tokens = request.n_prompt - n_cached if self.roles[name].runs(Stage.PREFILL) else 0
        placed = msgspec.structs.replace(
            load,
            n_pictures=load.n_pictures + n_pictures,
            n_tokens=load.n_tokens + n_tokens,
            sizes=_with_prompt(load.sizes, n_tokens) if load.sizes else (),
        )
        self.hear(name, placed)


def _with_prompt(sizes: tuple[tuple[int, int], ...], n_tokens: int) -> tuple[tuple[int, int], ...]:
    """`Load.sizes` with one more prompt. The groups stay few: thousands of requests may be placed between two
    reports."""
    for i, (n, tokens) in enumerate(sizes):
        if (tokens // n).bit_length() == n_tokens.bit_length():
            return (*sizes[:i], (n + 1, tokens + n_tokens), *sizes[i + 1 :])
    return (*sizes, (1, n_tokens))


def delay_s(load: Load) -> float:
    """The seconds of work that an instance has. The lanes share one device, so all of it delays a new request."""
    return (
        load.n_pictures * (load.picture_s or _GUESS.picture_s)
        + load.n_tokens * (load.token_s or _GUESS.token_s)
        + load.n_decoding * (load.decode_s or _GUESS.decode_s)
    )
