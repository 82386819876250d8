"""The server in front of the engines: the processor time that it takes for a request, and its queues for that."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import msgspec

from hydrainfer.core import ConfigError
from hydrainfer.planner.simulation.trace import TraceRequest

_CROWDED = 0.95  # of the cores: with more, requests come faster than they are prepared


class CoreTime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of one core: `request_s` for a request, `megapixel_s` for a million pixels of its pictures, `token_s` for
    each token of its answer. Raises `ConfigError`."""

    request_s: float = 0.0
    megapixel_s: float = 0.0
    token_s: float = 0.0

    def __post_init__(self) -> None:
        for name, seconds in msgspec.structs.asdict(self).items():
            if not 0.0 <= seconds < math.inf:
                raise ConfigError(f"{name} must not be negative, but is {seconds:g}", param=name)

    def before_s(self, t: TraceRequest) -> float:
        """Seconds for a request before it has a token."""
        return self.request_s + self.megapixel_s * t.megapixels

    def mean_s(self, trace: Sequence[TraceRequest]) -> float:
        """Seconds for a request with its answer, as a mean."""
        return sum(self.before_s(t) + self.token_s * t.n_output for t in trace) / len(trace)


_NOTHING = CoreTime()


class ServerCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The processor time of all but the models, and the cores for it.

    `process`: of the server's process, an interpreter that has one core at most, if there are `workers`. These are
    processes that prepare pictures, one each at a time (decoding, resizing), for which they take `preparing`. 0: the
    server's process does that, too, on any of its cores. `passing`: of the server and the instances together, where
    there are several, as these are processes. `client`: of a client on the same cores. `cores`: for all this; infinite:
    more than it wants; `each`: so many before every instance that encodes or, without pictures, prefills. `threads`: of
    each instance, if these compute on the same cores; 0: they do not.
    """

    process: CoreTime = _NOTHING
    preparing: CoreTime = _NOTHING
    passing: CoreTime = _NOTHING
    client: CoreTime = _NOTHING
    workers: int = 0
    cores: float = math.inf
    each: bool = False
    threads: int = 0

    def work_s(self, trace: Sequence[TraceRequest], n_instances: int) -> float:
        """Seconds of a core for a request, as a mean."""
        parts = (self.process, self.preparing, self.client) + (self.passing,) * (n_instances > 1)
        return sum(part.mean_s(trace) for part in parts)

    def most(self, trace: Sequence[TraceRequest], n_instances: int, rate: float) -> float:
        """The highest rate that leaves time for all, where the instances alone carry `rate`."""
        work_s = self.work_s(trace, n_instances)
        if not work_s or self.cores == math.inf:
            return rate
        most = min(rate, self.cores * _CROWDED / work_s)
        if self.threads:  # who has cores left over gives them to the others
            most = min(rate, self.cores / (work_s + self.threads * n_instances / rate))
        queues = ((self.process, 1), (self.preparing, self.workers)) if self.workers else ()
        return min([most, *(n * _CROWDED / s for part, n in queues if (s := part.mean_s(trace)))])

    def slowdown(self, trace: Sequence[TraceRequest], n_instances: int, rate: float) -> float:
        """How many times longer batches take beside the server, at `rate` requests per second."""
        if not self.threads or not (work_s := self.work_s(trace, n_instances)):
            return 1.0
        left = max(self.cores - rate * work_s, self.cores * (1.0 - _CROWDED))
        return max(1.0, self.threads * n_instances / left)

    def ready_s(self, trace: Sequence[TraceRequest], n_instances: int) -> list[float]:
        """When each request, in order of arrival, reaches the instances: first come, first served, by the server's
        process, which streams answers besides, and by the workers, on cores that instances have threads on."""
        arrivals, first = [t.arrival_s for t in trace], [self.process.before_s(t) for t in trace]
        second = [self.preparing.before_s(t) for t in trace]
        if self.cores == math.inf:
            return [sum(times) for times in zip(arrivals, first, second)]
        rate = len(trace) / max(arrivals[-1] - arrivals[0], 1e-9)
        answers_s = self.process.token_s * sum(t.n_output for t in trace) / len(trace)
        turns = max(1.0, (self.threads * n_instances + 1) / self.cores)  # threads that want a core take turns
        if not self.workers:
            both = [a + b for a, b in zip(first, second)]
            return _served(arrivals, both, max(1, int(self.cores)), turns, rate, answers_s)
        return _served(_served(arrivals, first, 1, turns, rate, answers_s), second, self.workers, turns)


def _served(
    arrivals: Sequence[float], work_s: Sequence[float], n: int, turns: float, rate: float = 0.0, besides_s: float = 0.0
) -> list[float]:
    """When a queue with `n` servers is done with each; who wants nothing of it passes by. All take `turns` times as
    long. `besides_s` of work comes with each of `rate` requests per second, and shares the servers at worst."""
    mean_s = sum(work_s) / len(work_s)
    left = max(n - rate * besides_s, n * mean_s / ((mean_s + besides_s) or 1.0))
    slower, free, found = turns * n / (left or n), [0.0] * n, []
    for at_s, own_s in zip(arrivals, work_s):
        if own_s:
            at_s = max(at_s, free[0]) + own_s * slower
            heapq.heapreplace(free, at_s)
        found.append(at_s)
    return found
