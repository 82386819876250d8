"""The instances that run, their loads, and the choice of one for a request: the `Placement` of hub and instances.

The scheduler keeps a request whose next stage the instance runs itself; only the others are placed here, by
`Balancing`. A picture goes to the encoder that consistent hashing names, which may have its embedding, unless that
encoder is so much busier than another that encoding the picture again there takes less time.

With `least_load`, the delay of an instance is the work that would go before the request; where short prompts go first,
most of a long prompt does not count. The time that a cached prefix saves is subtracted. A request skips the encoder if
an instance has computed all of its pictures and is ready sooner. A request begins at an instance that keeps more of its
prompt than the prefilling ones do, if fetching that part from there takes less time than computing it.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Literal

import msgspec

from hydrainfer.cluster.hashing import ring_of
from hydrainfer.cluster.messages import Peer
from hydrainfer.cluster.prefixes import Prefixes
from hydrainfer.core import Cached, Load, Request, Role, Stage

Balancing = Literal["least_load", "round_robin", "random"]
_HOP_S = 5e-3  # the cost of one more move (benchmarks/b08_migration.py)
_IDLE = Load()
_GUESS = Load(picture_s=0.05, token_s=5e-4, decode_s=2e-3, pull_s=5e-5)
"""The times that are assumed for an instance that has not measured its own yet."""


class Roster:
    """The instances of a layout. `roles`: the role of each one by name, running or not. `peers`: those that run.
    `loads`: as last reported, plus the requests placed since. `cuts`: the peers that an instance cannot reach, as last
    reported."""

    def __init__(
        self, roles: Mapping[str, Role], balancing: Balancing = "least_load", rng: random.Random | None = None
    ) -> None:
        self.roles = dict(roles)
        self.peers: dict[str, Peer] = {}
        self.loads: dict[str, Load] = {}
        self.cuts: dict[str, tuple[str, ...]] = {}
        self._balancing = balancing
        self._rng = rng or random.Random()
        self._n_chosen = 0
        self._chosen_at = dict.fromkeys(self.roles, 0)
        self._prefixes = Prefixes()
        self._able = {s: sorted(n for n, role in self.roles.items() if role.runs(s)) for s in Stage}
        self._there: dict[Stage, list[str]] = {s: [] for s in Stage}
        self._sound = self._there  # by stage, the running instances that are not suspect
        self._busy: dict[str, tuple[Load, float]] = {}  # by name, the latest load and its `delay_s`
        self._encoders = ring_of(tuple(self._able[Stage.ENCODE]))

    def update(self, peers: Iterable[Peer]) -> list[Peer]:
        """Set the peers that live now. Returns the earlier ones that have died."""
        now = {p.name: p for p in peers}
        gone = [p for name, p in self.peers.items() if name not in now or now[name].incarnation != p.incarnation]
        for p in gone:
            self.loads.pop(p.name, None)
            self._prefixes.forget(p.name)
            self.cuts.pop(p.name, None)
        self.peers = now
        self._there = {s: [n for n in names if n in now] for s, names in self._able.items()}
        self._sound = {s: [n for n in names if not now[n].suspect] for s, names in self._there.items()}
        return gone

    def knows(self, name: str, incarnation: int) -> bool:
        peer = self.peers.get(name)
        return peer is not None and peer.incarnation == incarnation

    def learn(self, name: str, cached: Cached) -> None:
        """Note the prefixes that the caches of an instance have gained and lost."""
        self._prefixes.learn(name, cached)

    def learned(self) -> Iterator[tuple[str, Cached]]:
        """The known prefixes of each instance."""
        return self._prefixes.learned()

    def hands_to(self, name: str, other: str) -> bool:
        """Whether `name` hands its requests to one of several prefilling instances, and `other` is one of those."""
        prefill = self._able[Stage.PREFILL]
        return len(prefill) > 1 and name not in prefill and other in prefill

    def found(self, request: Request, name: str) -> int:
        """The number of tokens of the prompt that an instance need not compute, as last reported."""
        return self._prefixes.found(request, name)

    def choose(self, request: Request, stage: Stage, exclude: Collection[str]) -> str | None:
        names = [n for n in self._sound[stage] if n not in exclude]
        names = names or [n for n in self._there[stage] if n not in exclude]  # a suspect is better than none
        if not names:
            return None
        if any(self.cuts.values()):
            names = [n for n in names if self._leads_on(n, request, request.plan().index(stage))] or names
        delay = dict.fromkeys(names, 0.0)
        if self._balancing == "least_load" and len(names) > 1:
            delay = self._ways_s(names, request, request.plan().index(stage))
        name = min(names, key=lambda n: (delay[n], self._chosen_at[n]))
        if stage is Stage.ENCODE and (owner := self._encoders.owner(request.media[0].key, names)) is not None:
            name = owner if delay[owner] <= delay[name] + self._encode_s(owner, request) else name
            if past := self._past(name, request, exclude):
                name, stage = past, Stage.PREFILL
        elif self._balancing == "random":
            name = self._rng.choice(names)
        works = name
        if stage is not Stage.DECODE and request.keys and (kept := self._keeper(name, request, stage, exclude)):
            (name, works), stage = kept, Stage.PREFILL
        self._n_chosen += 1
        self._chosen_at[works] = self._n_chosen
        self.loads[works] = self._with(works, request, stage)
        return name

    def has_way(self, request: Request) -> bool:
        """Whether the request can pass all its stages without a pair of instances that cannot reach each other."""
        return any(self._leads_on(name, request, 0) for name in self._there[request.plan()[0]])

    def _leads_on(self, name: str, request: Request, n: int) -> bool:
        """Whether a request that is at step `n` of its plan at this instance can pass its later steps."""
        role = self.roles[name]
        for beyond, stage in enumerate(request.plan()):
            if beyond > n and not role.runs(stage):
                others = (other for other in self._there[stage] if not self._is_cut(name, other))
                return any(self._leads_on(other, request, beyond) for other in others)
        return True

    def _is_cut(self, name: str, other: str) -> bool:
        return other in self.cuts.get(name, ()) or name in self.cuts.get(other, ())

    def _past(self, encoder: str, request: Request, exclude: Collection[str]) -> str | None:
        """An instance that has computed all pictures of `request`, if it is ready before the encoder would be."""
        if self._balancing != "least_load" or not self._prefixes or not request.keys:
            return None
        able = [n for n in self._sound[Stage.PREFILL] if n not in exclude]
        able = [n for n in able if self.found(request, n) >= request.media[-1].end]
        name = min(able, key=lambda n: self._prefill_s(n, request), default=None)
        if name is None or name == encoder:
            return None
        by_encoder_s = self._busy_s(encoder, request.n_prompt) + self._encode_s(encoder, request)
        return name if self._prefill_s(name, request) <= by_encoder_s else None

    def _keeper(self, name: str, request: Request, stage: Stage, exclude: Collection[str]) -> tuple[str, str] | None:
        """The instance without prefill that keeps most of the prompt, and the prefilling one that is to fetch that
        part; None if entering `stage` at `name` takes less time. The keeper may have decoded a chat's last answer."""
        there = [n for n, p in self.peers.items() if n not in exclude and not p.suspect]
        able = [n for n in there if not self.roles[n].runs(Stage.PREFILL)]
        takers = [n for n in there if self.roles[n].runs(Stage.PREFILL)]
        if not able or not takers or self._balancing != "least_load":
            return None
        keeper = max(able, key=lambda n: self.found(request, n))
        kept = self.found(request, keeper)
        if kept < (request.media[-1].end if request.media else 1):
            return None
        reached = [n for n in takers if not self._is_cut(keeper, n)]
        if not reached:
            return None
        taker = min(reached, key=lambda n: self._rest_s(n, request, kept))
        else_s = self._encode_s(name, request) if stage is Stage.ENCODE else 0.0
        if self.roles[name].runs(Stage.PREFILL):
            takers = [name]
        else:
            else_s += self._busy_s(name, request.n_prompt)
        else_s += min(self._rest_s(n, request) for n in takers)
        return (keeper, taker) if self._rest_s(taker, request, kept) + _HOP_S < else_s else None

    def _rest_s(self, name: str, request: Request, kept: int = 0) -> float:
        """The seconds until an instance has prefilled `request`, if it can fetch `kept` tokens of the prompt from
        another."""
        load, found = self._load(name), self.found(request, name)
        pull_s = load.pull_s or max((other.pull_s for other in self.loads.values()), default=0.0) or _GUESS.pull_s
        fetch_s = max(0, kept - found) * pull_s
        n_tokens = request.n_prompt - max(kept, found)
        return self._busy_s(name, n_tokens) + fetch_s + n_tokens * (load.token_s or _GUESS.token_s)

    def _encode_s(self, name: str, request: Request) -> float:
        """The seconds that an instance takes to encode the pictures of `request`."""
        return len(request.media) * (self._load(name).picture_s or _GUESS.picture_s)

    def _prefill_s(self, name: str, request: Request) -> float:
        """The seconds of work that an instance has, less those that its cached prefix of `request` saves."""
        saved = self.found(request, name)
        return self._busy_s(name, request.n_prompt - saved) - saved * (self._load(name).token_s or _GUESS.token_s)

    def _busy_s(self, name: str, n_tokens: int) -> float:
        """The seconds of work that an instance does before a prompt of which `n_tokens` are to be computed."""
        load, known = self.loads.get(name, _IDLE), self._busy.get(name)
        if known is None or known[0] is not load:  # cached, since every request asks
            known = self._busy[name] = load, delay_s(load)
        if not load.sizes:
            return known[1]
        return known[1] - (load.n_tokens - load.n_before(n_tokens)) * (load.token_s or _GUESS.token_s)

    def _load(self, name: str) -> Load:
        return self.loads.get(name, _IDLE)

    def _ways_s(self, names: Iterable[str], request: Request, n: int) -> dict[str, float]:
        """The delay in seconds, by instance, of a request that enters step `n` of its plan there: at the instance, and
        at the least busy instances for the later stages that it does not run. The time that its cached prefix saves is
        subtracted."""
        prefills = bool(self._prefixes) and n <= request.plan().index(Stage.PREFILL)
        later: dict[frozenset[Stage], float] = {}  # by role
        ways: dict[str, float] = {}
        for name in names:
            role = self.roles[name]
            if role.stages not in later:
                later[role.stages] = self._later_s(role, request, n)
            found = prefills and role.runs(Stage.PREFILL)
            here_s = self._prefill_s(name, request) if found else self._busy_s(name, request.n_prompt)
            ways[name] = here_s + later[role.stages]
        return ways

    def _later_s(self, role: Role, request: Request, n: int) -> float:
        """The least delay at the first step after step `n` that this role does not run, over its instances."""
        for beyond, stage in enumerate(request.plan()):
            if beyond > n and not role.runs(stage):
                return min(self._ways_s(self._there[stage], request, beyond).values(), default=0.0)
        return 0.0

    def _with(self, name: str, request: Request, stage: Stage) -> Load:
        """The load of an instance once `request` has been placed there."""
        load = self._load(name)
        if stage is Stage.DECODE:
            return msgspec.structs.replace(load, n_decoding=load.n_decoding + 1)
        n_pictures = load.n_pictures + (len(request.media) if stage is Stage.ENCODE else 0)
        n_tokens = request.n_prompt - self.found(request, name) if self.roles[name].runs(Stage.PREFILL) else 0
        sizes = _with_prompt(load.sizes, n_tokens) if load.sizes else ()
        return msgspec.structs.replace(load, n_pictures=n_pictures, n_tokens=load.n_tokens + n_tokens, sizes=sizes)


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
