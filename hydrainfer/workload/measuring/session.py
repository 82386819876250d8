"""A session with one server: requests one at a time first, then loads at given rates or in a search for goodput."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from hydrainfer.config import Slo
from hydrainfer.core import ConfigError
from hydrainfer.judging import Goodput, Search, Series
from hydrainfer.workload.client import Endpoint, RequestRecord, ServerFacts, Stop, probe, run_load
from hydrainfer.workload.results import LoadReport, Reference, Run, report_of, run_of, series_of
from hydrainfer.workload.sources import (
    Arrivals,
    BodyOptions,
    ChatRequest,
    Closed,
    DrawingStopped,
    Poisson,
    Replay,
    TooFewRequests,
    Workload,
    encoded,
    encoded_aside,
    in_turn,
    label,
)

DEAD_AFTER = 20
"""A server counts as gone after this many requests in a row without a connection."""
_FAR_OFF = 10
"""A limit that a request without load misses by this factor was likely written in another unit."""
OpenLoopAt = Callable[[float], Arrivals]


class Effort(msgspec.Struct, frozen=True, kw_only=True):
    """The amount to measure: at least `requests` per run, and as many as arrive in `min_s` seconds, so that a queue has
    time to build up before its length is judged. `unloaded`: the number of requests that are first sent one at a
    time."""

    requests: int = 100
    min_s: float = 10.0
    unloaded: int = 6
    warmup: int = 2
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        least = {"requests": 1, "unloaded": 1, "warmup": 0, "min_s": 0}
        for name, number in least.items():
            if not (value := getattr(self, name)) >= number:  # a NaN is refused, too
                option = name
                if name == "min_s":
                    option = "min-seconds"
                raise ConfigError(f"{option} must be at least {number}, not {value}", param=name)

    def n_at(self, rate_per_s: float) -> int:
        return max(self.requests, round(rate_per_s * self.min_s))


class Watcher(Protocol):
    """An observer of the progress of a load."""

    def draws(self, n: int) -> None:
        """`n` pictures are drawn before the load begins."""

    def begins(self, server: str, what: str, n: int) -> None: ...
    def record(self, record: RequestRecord) -> None: ...
    def ended(self, server: str, run: Run | None) -> None:
        """`run`: None after the unloaded requests."""


class Traffic:
    """The requests of a workload by seed, encoded once for all servers that get the same requests. At most `max_bytes`
    of pictures are kept; the oldest are dropped first."""

    def __init__(self, workload: Workload, like: str | None, max_bytes: int = 1 << 29) -> None:
        self.workload = workload
        self.like = like
        self._max_bytes = max_bytes
        self._kept: dict[tuple[int, int], tuple[int, list[ChatRequest]]] = {}

    def of(self, n: int, seed: int) -> list[ChatRequest]:
        """`n` requests for a seed. Raises `ConfigError`."""
        if (n, seed) not in self._kept:
            self._keep(n, seed, encoded(self.workload.chats(n, seed, self.like)))
        return self._kept[n, seed][1]

    async def ready(
        self, n: int, seed: int, given_up: Callable[[], bool], say: Callable[[int], None]
    ) -> list[ChatRequest]:
        """The same as `of`, made without blocking the event loop; none if `given_up` returns True before they are
        drawn. `say` gets the number of pictures to draw, if there are many."""
        if (n, seed) not in self._kept:
            try:
                chats = await encoded_aside(self.workload.chats(n, seed, self.like), given_up, say)
            except DrawingStopped:
                return []
            self._keep(n, seed, chats)
        return self._kept[n, seed][1]

    def _keep(self, n: int, seed: int, chats: list[ChatRequest]) -> None:
        n_bytes = sum(len(url) for url in {p.data_url() for chat in chats for p in chat.shown})
        while self._kept and n_bytes + sum(size for size, _ in self._kept.values()) > self._max_bytes:
            del self._kept[next(iter(self._kept))]
        self._kept[n, seed] = n_bytes, chats


class Session:
    """One server under test. Call `open` first."""

    def __init__(
        self,
        name: str,
        target: Endpoint,
        traffic: Traffic,
        slo: Slo | None,
        effort: Effort,
        stop: Stop,
        watch: Watcher,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.name = name
        self._target = target
        self._traffic = traffic
        self._slo = slo
        self._effort = effort
        self.stop = stop
        self._watch = watch
        self._clock = clock
        self._options = BodyOptions()
        self._reference = Reference()
        self.series: Series | None = None
        self.lacking = ""  # why the latest load was not run: the workload has too few requests
        self.facts: ServerFacts
        self.unloaded: LoadReport

    async def open(self, seed: int) -> None:
        """Find out what the server runs and how long a request takes alone. Raises `ConfigError`."""
        target = msgspec.structs.replace(self._target, timeout_s=self._effort.timeout_s)
        self._target, self._options, self.facts = await probe(target, clock=self._clock)
        n = self._effort.unloaded + self._effort.warmup
        chats = await self._traffic.ready(n, seed, lambda: self.stop.came, self._watch.draws)
        self._watch.begins(self.name, "one at a time", self._effort.unloaded)
        result = await run_load(
            self._target,
            chats,
            Closed(1),
            n_warmup=self._effort.warmup,
            options=self._options,
            on_record=self._watch.record,
            stop=self.stop,
            clock=self._clock,
        )
        self._watch.ended(self.name, None)
        self._reference = Reference.of(result.records)
        self.unloaded = report_of(result)
        if not self.unloaded.n_ok and not self.stop.came:
            why = "no answer"
            if self.unloaded.failure_examples:
                why = self.unloaded.failure_examples[0].message
            raise ConfigError(f"{self.name} failed every request of the workload, one at a time: {why}")

    async def at(
        self, arrivals: Arrivals, seed: int, round_: int = 0, times: int = 1, last_s: float = math.inf
    ) -> Run | None:
        """Run one load, `times` as long as usual. If there is an SLO, `series` is that of the latest load. Returns None
        if the workload has too few requests, which `lacking` then says, or if its pictures are not drawn when the
        session is stopped, or at the time `last_s`."""
        rate = getattr(arrivals, "rate_per_s", None)
        fixed = rate is None or isinstance(arrivals, Replay)
        n = times * (self._effort.requests if fixed else self._effort.n_at(rate or 0.0))

        def given_up() -> bool:
            return self.stop.came or self._clock() > last_s

        self.lacking = ""
        try:
            chats = await self._traffic.ready(n, seed, given_up, self._watch.draws)
        except TooFewRequests as e:
            self.lacking = f"{label(arrivals)} was not run: {e.message}"
            return None
        if not chats:
            return None
        if rate is not None and not fixed:
            chats = in_turn(chats, rate)
        self._watch.begins(self.name, label(arrivals), n)
        result = await run_load(
            self._target,
            chats,
            arrivals,
            seed=seed,
            options=self._options,
            on_record=self._watch.record,
            stop=self.stop,
            clock=self._clock,
        )
        run = run_of(self.name, result, self._slo, self._reference, round_)
        self.series = series_of(result.records, self._slo) if self._slo and result.records else None
        self._watch.ended(self.name, run)
        return run

    @property
    def first_rate(self) -> float:
        """Half of the rate that requests one at a time make, at which the server has hardly any load."""
        e2e = self.unloaded.e2e_s
        return 0.5 / e2e.p50 if e2e and e2e.p50 > 0 else 1.0

    async def search(
        self,
        search: Search,
        seed: int,
        at: OpenLoopAt = Poisson,
        runs: list[Run] | None = None,
        limit_s: float = math.inf,
    ) -> tuple[Goodput, list[Run]]:
        """Run loads until goodput is known or the search is stopped, or until the next load would end later than
        `limit_s` after the start. `runs` gets each run as it ends."""
        runs = [] if runs is None else runs
        assert self._slo is not None
        end_s = self._clock() + limit_s
        cut_short = ""
        while not self.stop.came and (ask := search.next()) is not None:
            rate = ask.rate
            last_s = end_s - ask.times * self._effort.n_at(rate) / rate if runs else math.inf
            run = None
            if self._clock() <= last_s:
                run = await self.at(at(rate), seed + len(runs), times=ask.times, last_s=last_s)
                if self.lacking:
                    search.leave(rate, self.lacking)
                    continue
            if run is None:
                late = not self.stop.came
                why = f"the next run would not end within {limit_s / 60:g} minutes (--search-minutes)"
                cut_short = ""
                if late:
                    cut_short = f"the search ended, because {why}"
                break
            runs.append(run)
            if self.stop.came:  # a partial run would be judged as a whole one
                break
            ttft_s = self._slo.ttft_s
            late_s = run.report.late_s.p99 if run.report.late_s else 0.0
            if run.client_late and (ttft_s is None or late_s > 0.1 * ttft_s):
                search.give_up_above(
                    rate, f"above, this client itself was late: by {late_s * 1e3:.0f} ms (p99) at {rate:.4g}/s"
                )
            elif self.series is not None:
                search.tell(rate, self.series)
        goodput = search.result()
        return msgspec.structs.replace(goodput, note="; ".join(filter(None, (goodput.note, cut_short)))), runs


def hopeless(unloaded: LoadReport, slo: Slo) -> str:
    """The reason why no request can meet the SLO, if even requests without load do not; else empty."""
    reasons = []
    far_off = False
    for name, limit, found in (
        ("TTFT", slo.ttft_s, unloaded.ttft_s),
        ("time per token", slo.tpot_s, unloaded.tpot_s),
        ("E2E", slo.e2e_s, unloaded.e2e_s),
    ):
        if limit is not None and found is not None and found.p50 > limit:
            reasons.append(f"{name} is {found.p50 * 1e3:.4g} ms where the SLO is {limit * 1e3:.4g} ms")
            far_off = far_off or found.p50 > _FAR_OFF * limit
    hint = ""
    if far_off:
        hint = "; limits of --goodput are in milliseconds"
    if reasons:
        return f"one request alone misses the SLO: {', '.join(reasons)} (medians){hint}"
    return ""
