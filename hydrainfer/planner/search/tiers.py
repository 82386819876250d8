"""The gain from host memory and from a store: the same requests at the same rate, with and without them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from hydrainfer.core import Layout
from hydrainfer.judging import at_quantile
from hydrainfer.planner.search.study import Study, simulated


class TierGain(msgspec.Struct, frozen=True, kw_only=True):
    """A layout at `rate` with some of the tiers. `found`: the share of the prompts' tokens that need not be computed,
    because one of these tiers has them. The TTFTs are in seconds."""

    host_memory: bool
    store: bool
    rate: float
    found: float
    ttft_p50: float
    ttft_p90: float


def tier_gains(study: Study, layout: Layout, rate: float) -> tuple[TierGain, ...]:
    """The layout without other tiers than its devices, then with each of the study's tiers added; () if it has none."""
    return tuple(_gain(one, layout, rate) for one in _studies(study))


def _studies(study: Study) -> Iterator[Study]:
    with_host = any(station.host for station in study.stations.values())
    if not with_host and study.store is None:
        return
    bare = {role: msgspec.structs.replace(station, host={}) for role, station in study.stations.items()}
    yield msgspec.structs.replace(study, stations=bare, store=None)
    if with_host and study.store is not None:
        yield msgspec.structs.replace(study, store=None)
    yield study


def _gain(study: Study, layout: Layout, rate: float) -> TierGain:
    simulator = simulated(study, layout, rate)
    rooms = [node.engine.scheduler.room for node in simulator.nodes.values()]
    n_wanted = sum(room.n_tokens_wanted for room in rooms)
    ttft_s = sorted(s.token_s[0] - s.arrival_s for s in simulator.served.values() if s.token_s)
    return TierGain(
        host_memory=any(station.host for station in study.stations.values()),
        store=study.store is not None,
        rate=rate,
        found=sum(room.n_tokens_found for room in rooms) / max(1, n_wanted),
        ttft_p50=at_quantile(ttft_s, 0.5),
        ttft_p90=at_quantile(ttft_s, 0.9),
    )
