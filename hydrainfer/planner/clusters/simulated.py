"""Clusters on the virtual clock: the production schedulers and rosters serve what the throughput model predicts.

Every P computes one prompt at a time, whole, as the model assumes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from hydrainfer.cluster.offload import LinkState, Offload, OffloadSettings, Rule
from hydrainfer.core import Role
from hydrainfer.planner.clusters.device import BLOCK_TOKENS, MeasuredCost, TableCaches
from hydrainfer.planner.clusters.lengths import Lengths
from hydrainfer.planner.clusters.model import Arrangement
from hydrainfer.planner.clusters.system import Cluster, Clusters
from hydrainfer.planner.nouns import Link, Route, TraceRequest
from hydrainfer.planner.simulation import InstanceModel, ServedRequest, Simulator, as_requests
from hydrainfer.scheduler import Budgets, Policy

_WHOLE = 1 << 20  # tokens of a batch: more than any prompt has
_INSIDE = Link(bytes_per_s=50e9)  # of an instance, as eight devices with 400 Gbps each have
_GOLDEN = 0.6180339887498949
Floats = NDArray[np.float64]


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What the throughput model leaves open. `batch`: sequences that a D decodes at a time; `n_output`: tokens of each
    answer; `prefill_bytes`, `decode_bytes`: caches of each P and D; `host_bytes`: host memory of each D, in which what
    crosses a link lands; `rule`, `adapts`: of `Offload`. `rates`: by far cluster, the times at which the rate of its
    link changes and the bytes per second from then on. `returns`: far clusters to which home has a link as fast as
    theirs, over which cached prefixes may follow."""

    batch: int
    n_output: int
    prefill_bytes: float = 64e9
    decode_bytes: float = 256e9
    host_bytes: float = 256e9
    policy: Policy = Policy()
    rule: Rule = "length"
    adapts: bool = True
    rates: dict[str, tuple[tuple[float, float], ...]] = {}
    returns: tuple[str, ...] = ()


@dataclass(slots=True)
class Run:
    """Requests that were served. `thresholds`: for each far cluster, and the time from which they held; `n_prefilled`:
    requests, by the cluster that prefilled them; `sent_bytes`: over links to home, `returned_bytes`: from there;
    `advice`: when home should have had more of which role."""

    served: list[ServedRequest]
    thresholds: list[tuple[float, dict[str, float]]]
    n_prefilled: Counter[str]
    sent_bytes: float
    returned_bytes: float
    advice: list[tuple[float, Role]]

    @property
    def arrivals_s(self) -> Floats:
        return np.array([one.arrival_s for one in self.served])

    @property
    def ttft_s(self) -> Floats:
        """The TTFT of each request, by arrival, in seconds."""
        return np.array([one.token_s[0] - one.arrival_s for one in self.served])

    @property
    def second_s(self) -> Floats:
        """Seconds from each request's arrival to its second token, which needs its KV where it is decoded."""
        return np.array([one.token_s[min(1, len(one.token_s) - 1)] - one.arrival_s for one in self.served])

    def rate(self, begin: float = 0.3, end: float = 0.95) -> float:
        """Requests per second that ended, between these parts of the time of arrivals."""
        from_s, to_s = begin * self.arrivals_s[-1], end * self.arrivals_s[-1]
        ends = np.array([one.token_s[-1] for one in self.served])
        return float(np.count_nonzero((ends >= from_s) & (ends < to_s)) / (to_s - from_s))


def simulate(clusters: Clusters, arrangement: Arrangement, setup: Setup, trace: Sequence[TraceRequest]) -> Run:
    """Serve a trace."""
    caches = TableCaches.of(clusters.home.times, clusters.lengths)
    home = clusters.home.name
    offload = None
    if clusters.far and arrangement.n_prefill:
        links = {link.source: LinkState(link.bytes_per_s, 0.0, 0.0, link.latency_s) for link in clusters.links}
        settings = OffloadSettings(threshold=arrangement.threshold, rule=setup.rule, adapts=setup.adapts)
        offload = Offload(settings, home, links, caches.kv_bytes, setup.returns)
    simulator = Simulator(
        list(_instances(clusters, arrangement, setup, caches)),
        _INSIDE,
        routes=list(_routes(clusters, setup)),
        home=home,
        offload=offload,
    )
    served = simulator.run(as_requests(trace, BLOCK_TOKENS))
    seen = simulator.clusters
    sent_bytes = sum(seen.sent_bytes(link.source, link.target) for link in clusters.links)
    returned_bytes = sum(seen.sent_bytes(home, name) for name in setup.returns)
    return Run(served, seen.thresholds, seen.n_placed, sent_bytes, returned_bytes, seen.advice)


def trace_at(
    lengths: Lengths, n_output: int, rate: float, n: int, seed: int = 0, *, even: bool = False
) -> list[TraceRequest]:
    """`n` requests that arrive as a Poisson process, with lengths drawn at random or, if `even`, so that any few
    requests in a row have nearly all lengths: for rates, which random lengths blur."""
    rng = np.random.default_rng(seed)
    draws: Floats = rng.random(n)
    if even:
        draws = np.asarray((rng.random() + _GOLDEN * np.arange(n)) % 1.0, dtype=np.float64)
    reached = np.cumsum(lengths.shares)
    places = np.minimum(np.searchsorted(reached, draws * reached[-1]), len(reached) - 1)
    arrivals_s = np.cumsum(rng.exponential(1.0 / rate, n))
    return [
        TraceRequest(arrival_s=float(at_s), n_text=max(1, round(float(lengths.tokens[place]))), n_output=n_output)
        for at_s, place in zip(arrivals_s, places, strict=True)
    ]


def _instances(
    clusters: Clusters, arrangement: Arrangement, setup: Setup, caches: TableCaches
) -> Iterator[InstanceModel]:
    prefill, decode = Role.parse("P"), Role.parse("D")
    one = Budgets(tokens=_WHOLE, running=1)
    step_s = setup.batch / (clusters.home.decodes_per_s * setup.n_output)

    def several(
        cluster: Cluster, role: Role, n: int, budgets: Budgets, n_bytes: float, host_bytes: float = 0.0
    ) -> Iterator[InstanceModel]:
        cost = MeasuredCost(
            encode_image_s=0.0, step_base_s=step_s, prefill_token_s=0.0, decode_token_s=0.0, times=cluster.times
        )
        longest = clusters.lengths.longest + setup.n_output
        blocks = caches.blocks(n_bytes, clusters.lengths.mean_tokens, longest)
        host = {}
        if host_bytes:
            host = caches.blocks(host_bytes, clusters.lengths.mean_tokens, longest)
        for i in range(n):
            name = f"{cluster.name}-{role}{i}"
            yield InstanceModel(
                name=name,
                role=role,
                cost=cost,
                blocks=blocks,
                budgets=budgets,
                policy=setup.policy,
                host=host,
                cluster=cluster.name,
            )

    for cluster in clusters.far:
        yield from several(cluster, prefill, cluster.instances, one, setup.prefill_bytes)
    yield from several(clusters.home, prefill, arrangement.n_prefill, one, setup.prefill_bytes)
    decodes = Budgets(tokens=_WHOLE, running=setup.batch)
    host_bytes = setup.host_bytes * bool(clusters.far)
    yield from several(clusters.home, decode, arrangement.n_decode, decodes, setup.decode_bytes, host_bytes)


def _routes(clusters: Clusters, setup: Setup) -> Iterator[Route]:
    for link in clusters.links:
        rates = setup.rates.get(link.source, ((0.0, link.bytes_per_s),))
        yield Route(source=link.source, target=link.target, rates=rates, latency_s=link.latency_s)
        if link.source in setup.returns:
            yield Route(source=link.target, target=link.source, rates=rates, latency_s=link.latency_s)
