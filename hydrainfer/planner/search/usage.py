"""The utilization of each role: how busy its instances are, and how full their caches."""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import partial
from statistics import fmean

import msgspec

from hydrainfer.core import Lane, Layout, Stage
from hydrainfer.planner.search.bound import Bounds
from hydrainfer.planner.search.layouts import role_of
from hydrainfer.planner.search.study import Study, watched
from hydrainfer.planner.simulation import Simulator

_WARM = 0.2  # share of the time until queues have settled
_SAMPLES = 400


class CacheUse(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of a cache's blocks that requests hold: the mean, and the largest at any instance. `n_bytes`: the cache's
    size."""

    mean: float
    most: float
    n_bytes: float


class RoleUse(msgspec.Struct, frozen=True, kw_only=True):
    """The `n` instances of a role: the shares of time in which their lanes are busy (None: no such lane), their caches
    by name, and the bytes of the weights that each instance holds. `vision_least`, `language_least`: the shares of time
    that the least possible work takes (`Bounds`): a lane that decodes looks busy long before it is full. `running`:
    requests that an instance encodes, prefills or decodes at once, on average; `decoding`: those that it decodes;
    `places`: the most that its budget allows. `gated`: the share of time in which the vision lane is idle while
    pictures wait until nothing is in prefill (`Policy.encode_gate`)."""

    role: str
    n: int
    vision: float | None
    language: float | None
    caches: dict[str, CacheUse]
    weight_bytes: float = 0.0
    running: float = 0.0
    decoding: float = 0.0
    places: int = 0
    vision_least: float = 0.0
    language_least: float = 0.0
    gated: float = 0.0

    def least(self, lane: Lane) -> float:
        """The share of time that the least possible work of this lane takes."""
        return self.vision_least if lane is Lane.VISION else self.language_least

    def lane(self, lane: Lane) -> float | None:
        """The share of time in which this lane is busy."""
        return self.vision if lane is Lane.VISION else self.language


class UseSamples:
    """Samples of a simulation of the layout at `rate`, evenly spaced between the first fifth of the arrivals and the
    last one. `look` is for `watched`."""

    def __init__(self, study: Study, layout: Layout, rate: float) -> None:
        self._study = study
        self._layout = layout
        self._rate = rate
        self._bounds = Bounds(study)
        self._last_s = len(study.trace) / rate
        self._roles = {m.name: str(role) for m, role in zip(study.instances(layout), layout.instances)}
        self._lanes = defaultdict[tuple[str, Lane], list[bool]](list)
        self._leased = defaultdict[tuple[str, str], list[float]](list)
        self._gated = defaultdict[str, list[bool]](list)
        self._running = defaultdict[str, list[int]](list)
        self._decoding = defaultdict[str, list[int]](list)

    def look(self, simulator: Simulator, now: float) -> None:
        """Arrange for all samples, at the first call."""
        if now > 0.0:
            return
        begin_s = _WARM * self._last_s
        for k in range(_SAMPLES):
            simulator.at(begin_s + (self._last_s - begin_s) * k / _SAMPLES, partial(self._sample, simulator))

    def _sample(self, simulator: Simulator) -> None:
        for node in simulator.nodes.values():
            role = self._roles[node.name]
            scheduler = node.engine.scheduler
            for lane in scheduler.duties.loaded.lanes:
                self._lanes[role, lane].append(node.engine.lanes.busy(lane))
            for name, (n, held, _) in node.caches.usage().items():
                self._leased[role, name].append(held / n if n else 0.0)
            idle = not node.engine.lanes.busy(Lane.VISION)
            self._gated[role].append(idle and scheduler.gate.holds_back(simulator.now))
            self._running[role].append(scheduler.n_running)
            self._decoding[role].append(len(scheduler.decoding))

    def roles(self) -> tuple[RoleUse, ...]:
        """The utilization of each role, from the samples so far."""
        budgets = self._study.budgets(self._layout)
        roles = Counter(map(str, self._layout.instances))
        least = {role: self._least(role) for role in roles}
        return tuple(
            RoleUse(
                role=role,
                n=n,
                vision=self._busy(role, Lane.VISION),
                language=self._busy(role, Lane.LANGUAGE),
                caches=self._caches(role),
                running=fmean(self._running[role] or [0]),
                decoding=fmean(self._decoding[role] or [0]),
                places=budgets[role].running,
                gated=fmean(self._gated[role] or [False]),
                vision_least=least[role][0],
                language_least=least[role][1],
            )
            for role, n in roles.items()
        )

    def _least(self, name: str) -> tuple[float, float]:
        """The shares of time that the least possible work of a role's vision and language lanes takes, if each stage is
        spread evenly over the instances that run it."""
        work = self._bounds.work(name)
        role = role_of(name)

        def share(stage: Stage, seconds: float) -> float:
            n = sum(one.runs(stage) for one in self._layout.instances)
            return self._rate * seconds / n if role.runs(stage) else 0.0

        prefill = share(Stage.PREFILL, work.prefill_s)
        beside = prefill + share(Stage.DECODE, work.arithmetic_s)
        return share(Stage.ENCODE, work.encode_s), max(beside, share(Stage.DECODE, work.decode_s))

    def _busy(self, role: str, lane: Lane) -> float | None:
        seen = self._lanes.get((role, lane))
        return fmean(seen) if seen else None

    def _caches(self, role: str) -> dict[str, CacheUse]:
        uses = {}
        for spec, blocks in self._study.stations[role].blocks.items():
            shares = self._leased.get((role, spec.name))
            if shares:
                n_bytes = float(spec.block_bytes * blocks)
                uses[spec.name] = CacheUse(mean=fmean(shares), most=max(shares), n_bytes=n_bytes)
        return uses


def use_of(study: Study, layout: Layout, rate: float) -> tuple[RoleUse, ...]:
    """The utilization of each role of the layout at `rate`."""
    samples = UseSamples(study, layout, rate)
    watched(study, layout, rate, samples.look)
    return samples.roles()
