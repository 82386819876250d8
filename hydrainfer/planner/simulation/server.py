"""The server in front of the engines: what it computes for a request before an instance can begin, and its cores."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import msgspec

from hydrainfer.planner.simulation.trace import TraceRequest

_CROWDED = 0.95  # of the cores: with more, requests come faster than they are prepared


class ServerCost(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one core: `request_s` for a request, `megapixel_s` for a million pixels of its pictures
    (decoding, resizing), `token_s` for each token of its answer (detokenising, streaming). `cores`: for this, all over;
    infinite: more than it wants; `each`: so many before every instance that encodes or, without pictures, prefills.
    `threads`: of each instance, if these compute on the same cores; 0: they do not."""

    request_s: float = 0.0
    megapixel_s: float = 0.0
    token_s: float = 0.0
    cores: float = math.inf
    each: bool = False
    threads: int = 0

    def before_s(self, t: TraceRequest) -> float:
        """Seconds of a core for a request before an instance begins."""
        return self.request_s + self.megapixel_s * t.megapixels

    def work_s(self, trace: Sequence[TraceRequest]) -> float:
        """Seconds of a core for a request, as a mean."""
        return sum(self.before_s(t) + self.token_s * t.n_output for t in trace) / len(trace)

    def most(self, trace: Sequence[TraceRequest], n_instances: int, rate: float) -> float:
        """The highest rate that leaves time for all, where the instances alone carry `rate`."""
        work_s = self.work_s(trace)
        if not work_s or self.cores == math.inf:
            return rate
        if self.threads:  # who has cores left over gives them to the others
            return min(rate, self.cores / (work_s + self.threads * n_instances / rate))
        return min(rate, self.cores * _CROWDED / work_s)

    def slowdown(self, trace: Sequence[TraceRequest], n_instances: int, rate: float) -> float:
        """How many times longer batches take beside the server, at `rate` requests per second."""
        if not self.threads or not (work_s := self.work_s(trace)):
            return 1.0
        left = max(self.cores - rate * work_s, self.cores * (1.0 - _CROWDED))
        return max(1.0, self.threads * n_instances / left)

    def ready_s(self, trace: Sequence[TraceRequest], n_instances: int) -> list[float]:
        """When each request, in order of arrival, reaches the instances: first come, first served, by cores that
        answers and, if shared, instances leave."""
        if self.cores == math.inf:
            return [t.arrival_s + self.before_s(t) for t in trace]
        rate = len(trace) / max(trace[-1].arrival_s - trace[0].arrival_s, 1e-9)
        streaming = rate * self.token_s * sum(t.n_output for t in trace) / len(trace)
        free, before_s = [0.0] * max(1, int(self.cores)), sum(map(self.before_s, trace)) / len(trace)
        left = max(self.cores - streaming, self.cores * before_s / (self.work_s(trace) or 1.0))  # they share at worst
        slower = len(free) / (left or self.cores)
        slower *= max(1.0, (self.threads * n_instances + 1) / self.cores)  # threads that want a core take turns
        found = []
        for t in trace:
            end_s = max(t.arrival_s, free[0]) + self.before_s(t) * slower
            heapq.heapreplace(free, end_s)
            found.append(end_s)
        return found
