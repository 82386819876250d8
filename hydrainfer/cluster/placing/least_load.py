"""The least predicted delay: the work that an instance does before the request, less what its caches save.

Where short prompts go first, most of a long prompt that waits does not count. A picture goes to the encoder that
consistent hashing names, which may have its embedding, unless that encoder is so much busier than another that encoding
the picture again there takes less time. A request skips the encoder if an instance has computed all of its pictures and
is ready sooner. A request begins at an instance that keeps more of its prompt than the prefilling ones do, if fetching
that part from there takes less time than computing it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hydrainfer.cluster.placing.rule import Choice
from hydrainfer.cluster.roster import Roster
from hydrainfer.core import Request, Role, Stage

_HOP_S = 5e-3  # the cost of one more move (benchmarks/b08_migration.py)


class LeastLoad:
    """Chooses the instance with the least predicted delay, among equals the one that was chosen longest ago."""

    def choose(
        self, request: Request, stage: Stage, exclude: Collection[str], facts: Roster, located: Mapping[str, int]
    ) -> Choice | None:
        names = facts.able(request, stage, exclude)
        if not names:
            return None
        delays = Delays(request, facts, located)
        name = delays.least(names, request.plan().index(stage)) if len(names) > 1 else names[0]
        if stage is Stage.ENCODE:
            name = self._encoder(name, names, delays)
            past = self._past_encode(name, exclude, delays)
            if past is not None:
                name, stage = past, Stage.PREFILL
        if stage is not Stage.DECODE:
            kept = self._where_kept(name, stage, exclude, delays)
            if kept is not None:
                return kept
        return Choice(name, stage, name)

    @staticmethod
    def _encoder(name: str, names: Collection[str], delays: Delays) -> str:
        """The encoder that is named for the picture, unless `name` can encode it again sooner."""
        owner = delays.facts.encoder_of(delays.request, names)
        if owner == name:
            return name
        again_s = delays.way_s(name, 0) + delays.facts.encode_s(owner, delays.request)
        return owner if delays.way_s(owner, 0) <= again_s else name

    @staticmethod
    def _past_encode(encoder: str, exclude: Collection[str], delays: Delays) -> str | None:
        """An instance that has computed all pictures of the request, if it is ready before the encoder would be."""
        request, facts = delays.request, delays.facts
        n_needed = request.media[-1].end
        if all(n_cached < n_needed for n_cached in delays.located.values()):
            return None
        able = facts.sound(Stage.PREFILL, exclude)
        able = [name for name in able if delays.located.get(name, 0) >= n_needed]
        name = min(able, key=delays.prefill_s, default=None)
        if name is None or name == encoder:
            return None
        by_encoder_s = facts.busy_s(encoder, request.n_prompt) + facts.encode_s(encoder, request)
        return name if delays.prefill_s(name) <= by_encoder_s else None

    @staticmethod
    def _where_kept(name: str, stage: Stage, exclude: Collection[str], delays: Delays) -> Choice | None:
        """The instance without prefill that keeps most of the prompt, and the prefilling one that is to fetch that
        part; None if entering `stage` at `name` takes less time. The former may have decoded a chat's last answer."""
        request, facts, located = delays.request, delays.facts, delays.located
        if all(facts.roles[n].runs(Stage.PREFILL) for n in located):
            return None
        sound = [n for n, peer in facts.peers.items() if n not in exclude and not peer.suspect]
        prefilling = [n for n in sound if facts.roles[n].runs(Stage.PREFILL)]
        if request.prefill_cluster:
            prefilling = facts.in_cluster(request.prefill_cluster, prefilling)
        keepers = [n for n in sound if n in located and not facts.roles[n].runs(Stage.PREFILL)]
        if not keepers:
            return None
        keeper = max(keepers, key=located.__getitem__)
        n_kept = located[keeper]
        takers = [n for n in prefilling if not facts.is_cut(keeper, n)]
        if n_kept < (request.media[-1].end if request.media else 1) or not takers:
            return None
        taker, fetched_s = delays.soonest(takers, n_kept)
        elsewhere_s = facts.encode_s(name, request) if stage is Stage.ENCODE else 0.0
        if facts.roles[name].runs(Stage.PREFILL):
            elsewhere_s += delays.rest_s(name)
        else:
            elsewhere_s += facts.busy_s(name, request.n_prompt) + delays.soonest(prefilling)[1]
        if fetched_s + _HOP_S >= elsewhere_s:
            return None
        return Choice(keeper, Stage.PREFILL, taker)


class Delays:
    """Predicted delays of one request, in seconds, by what the roster knows and where its prompt is `located`. Of many
    instances, most are passed over by `Busy.least_s`, which no delay is below."""

    def __init__(self, request: Request, facts: Roster, located: Mapping[str, int]) -> None:
        self.request = request
        self.facts = facts
        self.located = located
        self._plan = request.plan()
        self._n_prompt = request.n_prompt
        self._later: dict[tuple[str, int], float] = {}  # by role and step

    def least(self, names: Collection[str], step: int) -> str:
        """The instance at which the way that begins there with this step takes the least time."""
        best, best_s = (float("inf"), 0, ""), float("inf")
        turns, busy, located = self.facts.turns, self.facts.busy, self.located
        for name in names:
            state = busy[name]
            bound_s = state.least_s
            if name in located:
                bound_s -= located[name] * state.token_s
            if bound_s <= best_s:
                best = min(best, (self.way_s(name, step), turns[name], name))
                best_s = best[0]
        return best[2]

    def way_s(self, name: str, step: int) -> float:
        """The delay of a request that enters this step of its plan at an instance: there, and at the least busy
        instances of the later stages that it does not run."""
        kind = self.facts.peers[name].role, step
        later_s = self._later.get(kind)
        if later_s is None:
            later_s = self._later[kind] = self._later_s(self.facts.roles[name], step)
        if name in self.located and self._prefills(name, step):
            return self.prefill_s(name) + later_s
        return self.facts.busy[name].before_s(self._n_prompt) + later_s

    def prefill_s(self, name: str) -> float:
        """The seconds of work that an instance has, less those that its cached prefix saves."""
        n_cached = self.located.get(name, 0)
        busy_s = self.facts.busy[name].before_s(self._n_prompt - n_cached)
        return busy_s - n_cached * self.facts.busy[name].token_s

    def rest_s(self, name: str, n_kept: int = 0) -> float:
        """The seconds until an instance has prefilled the request, if it can fetch `n_kept` tokens of the prompt from
        another."""
        n_cached = self.located.get(name, 0)
        n_tokens = self._n_prompt - max(n_kept, n_cached)
        busy_s = self.facts.busy[name].before_s(n_tokens)
        fetch_s = (n_kept - n_cached) * self.facts.pull_s(name) if n_kept > n_cached else 0.0
        return busy_s + fetch_s + n_tokens * self.facts.busy[name].token_s

    def soonest(self, names: Collection[str], n_kept: int = 0) -> tuple[str, float]:
        """The one of these instances with the least `rest_s`, and that time."""
        best, best_s = "", float("inf")
        busy = self.facts.busy
        n_least = self._n_prompt - max(n_kept, *self.located.values(), 0)
        for name in names:
            state = busy[name]
            if state.least_s + n_least * state.token_s < best_s:
                rest_s = self.rest_s(name, n_kept)
                if rest_s < best_s:
                    best, best_s = name, rest_s
        return best, best_s

    def _prefills(self, name: str, step: int) -> bool:
        return self.facts.roles[name].runs(Stage.PREFILL) and step <= self._plan.index(Stage.PREFILL)

    def _later_s(self, role: Role, step: int) -> float:
        """The least delay at the first step after `step` that this role does not run."""
        for beyond, stage in enumerate(self._plan):
            if beyond > step and not role.runs(stage):
                names = self.facts.running(stage)
                return self.way_s(self.least(names, beyond), beyond) if names else 0.0
        return 0.0
