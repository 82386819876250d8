"""Which cluster prefills a prompt: home, or one that only prefills and sends the KV over a link.

The rules of Prefill-as-a-Service, section 3.4.3. A prompt goes to another cluster if it has more uncached tokens than a
threshold. The threshold rises while the link cannot carry what is sent, and returns when it can, or when prompts wait
longer at home than for the link. No clock, no sockets: calls take the time, and what is known of the links.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec

from hydrainfer.cluster.placing.least_load import Delays
from hydrainfer.cluster.roster import Roster
from hydrainfer.core import ConfigError, Request, Role, Stage

Rule = Literal["length", "seconds"]
"""`length`: by the threshold, as in the paper. `seconds`: where the prompt is predicted to be ready sooner."""

SHORT_LOOP_S = 1.0
"""The interval of `Offload.observe`."""
LONG_LOOP_S = 180.0
"""The interval of the advice of `Balance`."""
_SCARCE, _ABUNDANT = 0.8, 0.6  # share of the link from which its bandwidth is scarce, and below which it is not
_SCARCE_S = 1.0  # queued on the link
_FULL, _FULL_S = 0.9, 2.0  # share, and seconds queued, from which the threshold rises, unless home has more to do
_UP, _DOWN, _MOST = 1.25, 1.1, 4.0  # factors of the threshold
_SETTLED_S = 10.0  # after a rise, before the threshold falls
_DEAD_BAND = 0.2


class LinkState(NamedTuple):
    """A link to home, now. `bytes_per_s`: what it carries at most; `share`: of that, in the last seconds;
    `queued_bytes`: asked for and not yet copied; `latency_s`: of a copy."""

    bytes_per_s: float
    share: float
    queued_bytes: float
    latency_s: float = 0.0

    @property
    def queued_s(self) -> float:
        return self.queued_bytes / self.bytes_per_s


class OffloadSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`threshold`: tokens; longer prompts leave home, by the rule `length`. `adapts`: whether it follows the links.
    Raises `ConfigError`."""

    threshold: float
    rule: Rule = "length"
    adapts: bool = True

    def __post_init__(self) -> None:
        if not self.threshold >= 0.0:
            raise ConfigError(f"threshold must not be negative, but is {self.threshold:g}", param="threshold")


class Where(NamedTuple):
    """The cluster that prefills a prompt. `fetch_from`: the cluster that has more of it cached, from which the instance
    may copy that part; "" for none."""

    cluster: str
    fetch_from: str = ""


@dataclass(slots=True)
class _Far:
    """A cluster that only prefills, as seen from home: its link, and the factor of the threshold for it."""

    link: LinkState
    scarce: bool = False
    factor: float = 1.0
    rose_s: float = float("-inf")

    def observe(self, now: float, link: LinkState, home_s: float, adapts: bool) -> None:
        drains = link.queued_bytes < self.link.queued_bytes  # what was raised before has its effect
        self.link = link
        if link.share > _SCARCE or link.queued_s > _SCARCE_S:
            self.scarce = True
        elif link.share < _ABUNDANT:
            self.scarce = False
        if not adapts:
            return
        if home_s > link.queued_s + _FULL_S:
            self.factor = max(1.0, self.factor / _DOWN)
        elif link.share > _FULL or link.queued_s > _FULL_S:
            if link.queued_s >= home_s and not drains:
                self.factor = min(_MOST, self.factor * _UP)
                self.rose_s = now
        elif link.share < _ABUNDANT and now >= self.rose_s + _SETTLED_S:
            self.factor = max(1.0, self.factor / _DOWN)


class Offload:
    """Decides for each prompt. `kv_bytes(n)`: what `n` tokens leave in the caches, in bytes. `links`: from each of the
    other clusters to `home`; `returns`: the clusters that home has a link to, over which a cached prefix can follow."""

    def __init__(
        self,
        settings: OffloadSettings,
        home: str,
        links: Mapping[str, LinkState],
        kv_bytes: Callable[[int], float],
        returns: Collection[str] = (),
    ) -> None:
        self.home = home
        self.settings = settings
        self._kv_bytes = kv_bytes
        self._returns = returns
        self._far = {name: _Far(link) for name, link in links.items()}

    def threshold(self, cluster: str) -> float:
        """The tokens above which a prompt may go to this cluster now."""
        return self.settings.threshold * self._far[cluster].factor

    def is_scarce(self, cluster: str) -> bool:
        """Whether the bandwidth of the cluster's link is scarce now."""
        return self._far[cluster].scarce

    def observe(self, now: float, links: Mapping[str, LinkState], home_s: float) -> None:
        """Note the state of the links, every `SHORT_LOOP_S`. `home_s`: how long a prompt would wait for prefill at
        home, which is no relief for a link if it takes longer."""
        for name, link in links.items():
            self._far[name].observe(now, link, home_s, self.settings.adapts)

    def choose(
        self,
        n_tokens: int,
        cached: Mapping[str, int],
        live: Collection[str],
        prefilled_s: Callable[[str, int], float],
    ) -> Where:
        """The cluster for a prompt of `n_tokens`. `cached`: its tokens that each cluster has cached; `live`: the
        clusters with an instance that prefills (if home has none, no prompt is too short to leave it);
        `prefilled_s(cluster, n)`: the predicted seconds until the prompt is prefilled there, if `n` of its tokens are
        fetched from another cluster (0 for none)."""
        n_at_home = cached.get(self.home, 0)
        n_rest = n_tokens - n_at_home
        by_length = self.settings.rule == "length"
        names = [name for name in self._far if name in live]
        if by_length and self.home in live:
            names = [name for name in names if n_rest > self.threshold(name)]
        if not names:
            return Where(self.home)
        if by_length and len(names) == 1:
            name = names[0]
            return Where(name, self._fetched_by(name, cached))
        best = Where(self.home)
        best_s = float("inf") if by_length else prefilled_s(self.home, 0)
        for name in names:
            source = self._fetched_by(name, cached)
            n_fetched = n_at_home if source else 0
            far_s = prefilled_s(name, n_fetched) + self._sent_s(name, n_rest)
            if far_s < best_s:
                best, best_s = Where(name, source), far_s
        return best

    def _fetched_by(self, name: str, cached: Mapping[str, int]) -> str:
        """The cluster from which `name` fetches the beginning of a prompt. Where home has less of it than `name`, home
        needs no part before `name` has computed the rest, and then gets all at once."""
        more_at_home = cached.get(self.home, 0) > cached.get(name, 0)
        return self.home if more_at_home and name in self._returns and not self._far[name].scarce else ""

    def _sent_s(self, name: str, n_tokens: int) -> float:
        """The seconds until the KV of these tokens has crossed the link, behind what is queued."""
        link = self._far[name].link
        return link.queued_s + link.latency_s + self._kv_bytes(n_tokens) / link.bytes_per_s


def offloaded(request: Request, roster: Roster, offload: Offload) -> tuple[Request, set[str]]:
    """The request with the cluster that prefills it, and the instances at which it must not begin."""
    located = roster.locator.locate(request)
    cached: dict[str, int] = {}
    for name, n in located.items():
        cluster = roster.peers[name].cluster
        cached[cluster] = max(n, cached.get(cluster, 0))
    sound = roster.sound(Stage.PREFILL, ())

    def prefilled_s(cluster: str, n_fetched: int) -> float:
        names = roster.in_cluster(cluster, sound)
        return Delays(request, roster, located).soonest(names, n_fetched)[1]

    live = {roster.peers[name].cluster for name in sound}
    where = offload.choose(request.n_prompt, cached, live, prefilled_s)
    begins = {where.cluster, where.fetch_from}
    others = {name for name, peer in roster.peers.items() if peer.cluster not in begins}
    if not request.media or any(roster.roles[name].runs(Stage.ENCODE) for name in roster.peers.keys() - others):
        return msgspec.structs.replace(request, prefill_cluster=where.cluster), others
    encoders = set(_of_cluster(roster, offload.home, Stage.ENCODE))  # the embeddings cross the link
    encoders = encoders or set(roster.running(Stage.ENCODE))
    return msgspec.structs.replace(request, prefill_cluster=where.cluster), others - encoders


class Balance:
    """Whether home should have more of P or of D, by what the stages served and how busy they were. `n_places`:
    sequences that a D decodes at a time."""

    def __init__(self, home: str, n_places: int) -> None:
        self._home = home
        self._n_places = n_places
        self._busy = defaultdict[str, float](float)
        self._n_seen = Counter[str]()
        self._counts_before = (0, 0, 0)
        self._began_s = math.inf

    def observe(self, now: float, roster: Roster, n_far: int, n_home: int, n_done: int) -> Role | None:
        """Note how busy the instances are, every `SHORT_LOOP_S`; the advice, every `LONG_LOOP_S`. The counts are of the
        requests that far clusters and home were to prefill, and that ended, since the start."""
        for name, role in roster.roles.items():
            load = roster.load(name)
            if role.runs(Stage.PREFILL):
                stage = "home" if roster.peers[name].cluster == self._home else "far"
                self._busy[stage] += min(1, load.n_tokens)
                self._n_seen[stage] += 1
            if role.runs(Stage.DECODE):
                self._busy["decode"] += load.n_decoding / self._n_places
                self._n_seen["decode"] += 1
        self._began_s = min(self._began_s, now)  # at the first call
        seconds = now - self._began_s
        if seconds < LONG_LOOP_S:
            return None
        counts = (n_far, n_home, n_done)
        served = [(after - before) / seconds for after, before in zip(counts, self._counts_before, strict=True)]
        per_s = [self._possible(stage, rate) for stage, rate in zip(("far", "home", "decode"), served, strict=True)]
        self._counts_before, self._began_s = counts, now
        self._busy.clear()
        self._n_seen.clear()
        return advise(*per_s)

    def _possible(self, stage: str, per_s: float) -> float:
        """The requests per second of a stage if it were always busy."""
        if not per_s:
            return 0.0
        return per_s * self._n_seen[stage] / max(self._busy[stage], 1)


def advise(far_per_s: float, home_per_s: float, decode_per_s: float) -> Role | None:
    """The role of which home should have one instance more, at the other's expense; None if prefill and decode are
    within a fifth of each other. From the requests per second that the stages can serve (Eq. 8 of the paper)."""
    prefill_per_s = far_per_s + home_per_s
    if prefill_per_s < decode_per_s * (1.0 - _DEAD_BAND):
        return Role.parse("P")
    if decode_per_s < prefill_per_s * (1.0 - _DEAD_BAND):
        return Role.parse("D")
    return None


def _of_cluster(roster: Roster, cluster: str, stage: Stage) -> Iterator[str]:
    return (name for name in roster.running(stage) if roster.peers[name].cluster == cluster)
