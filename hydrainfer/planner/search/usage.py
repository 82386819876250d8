"""The utilization of each role: how busy its instances are, and how full their caches."""

from __future__ import annotations

from collections import Counter
from statistics import fmean

import msgspec

from hydrainfer.core import Lane, Layout
from hydrainfer.planner.search.study import Study, watched
from hydrainfer.planner.simulation import Simulator

_WARM = 0.2  # share of the time until queues have settled


class CacheUse(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of a cache's blocks that requests hold: the mean, and the largest at any instance. `n_bytes`: the cache's
    size."""

    mean: float
    most: float
    n_bytes: float


class RoleUse(msgspec.Struct, frozen=True, kw_only=True):
    """The `n` instances of a role: the shares of time in which their lanes are busy (None: no such lane), their caches
    by name, and the bytes of the weights that each instance holds."""

    role: str
    n: int
    vision: float | None
    language: float | None
    caches: dict[str, CacheUse]
    weight_bytes: float = 0.0


def use_of(study: Study, layout: Layout, rate: float) -> tuple[RoleUse, ...]:
    """The utilization of each role of the layout at `rate`, sampled at every heartbeat between the first fifth of the
    arrivals and the last one."""
    lanes: dict[tuple[str, Lane], list[bool]] = {}
    leased: dict[tuple[str, str], list[float]] = {}
    last_s = len(study.trace) / rate
    names = {model.name: str(role) for model, role in zip(study.instances(layout), layout.instances)}

    def look(simulator: Simulator, now: float) -> None:
        if not _WARM * last_s <= now <= last_s:
            return
        for node in simulator.nodes.values():
            role = names[node.name]
            for lane in node.engine.scheduler.duties.loaded.lanes:
                lanes.setdefault((role, lane), []).append(node.engine.lanes.busy(lane))
            for name, (n, held, _) in node.caches.usage().items():
                leased.setdefault((role, name), []).append(held / n if n else 0.0)

    watched(study, layout, rate, look)

    def busy(role: str, lane: Lane) -> float | None:
        seen = lanes.get((role, lane))
        return fmean(seen) if seen else None

    def caches(role: str) -> dict[str, CacheUse]:
        uses = {}
        for spec, blocks in study.stations[role].blocks.items():
            shares = leased.get((role, spec.name))
            if shares:
                n_bytes = float(spec.block_bytes * blocks)
                uses[spec.name] = CacheUse(mean=fmean(shares), most=max(shares), n_bytes=n_bytes)
        return uses

    roles = Counter(map(str, layout.instances))
    return tuple(
        RoleUse(
            role=role,
            n=n,
            vision=busy(role, Lane.VISION),
            language=busy(role, Lane.LANGUAGE),
            caches=caches(role),
        )
        for role, n in roles.items()
    )
