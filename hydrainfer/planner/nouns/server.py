"""The server in front of the engines: the processor time that a request takes there, and the queues for it."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import msgspec

from hydrainfer.core import ConfigError
from hydrainfer.planner.nouns.trace import TraceRequest


class CoreTime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of one core: `request_s` per request, `megapixel_s` per million pixels of its pictures, `token_s` per
    token of its answer. Raises `ConfigError`."""

    request_s: float = 0.0
    megapixel_s: float = 0.0
    token_s: float = 0.0

    def __post_init__(self) -> None:
        for name, seconds in msgspec.structs.asdict(self).items():
            if not 0.0 <= seconds < math.inf:
                raise ConfigError(f"{name} must not be negative, but is {seconds:g}", param=name)

    def before_s(self, t: TraceRequest) -> float:
        """Seconds spent on a request before its first token."""
        return self.request_s + self.megapixel_s * t.megapixels

    def mean_s(self, trace: Sequence[TraceRequest]) -> float:
        """Mean seconds spent on a request and its answer."""
        return sum(self.before_s(t) + self.token_s * t.n_output for t in trace) / len(trace)


_NOTHING = CoreTime()


class ServerCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The processor time of everything but the models, and the cores for it.

    `process`: time of the server's process, an interpreter that uses at most one core if there are `workers`.
    `workers`: processes that prepare pictures (decoding, resizing), one at a time each, which takes `preparing`; 0 if
    the server's process does that too, on any of its cores. Where there are several instances, these are processes: the
    server's process then takes `passing` more, and the instances take `handling` for its messages. `step_s`: what each
    step of an instance takes beside its batch, where instances compute on the same cores. `client`: time of a client on
    the same machine.

    `cores`: number of cores for all this; infinite if there are always enough. `each`: this many cores, and a server,
    in front of every instance that encodes (without pictures: that prefills). `threads`: compute threads of each
    instance on the same cores; 0 if instances compute elsewhere. `processes`: number of server processes.
    """

    process: CoreTime = _NOTHING
    preparing: CoreTime = _NOTHING
    passing: CoreTime = _NOTHING
    handling: CoreTime = _NOTHING
    step_s: float = 0.0
    client: CoreTime = _NOTHING
    workers: int = 0
    cores: float = math.inf
    each: bool = False
    threads: int = 0
    processes: int = 1

    def times(self, n: int) -> ServerCost:
        """`n` such servers side by side."""
        return msgspec.structs.replace(
            self, cores=self.cores * n, workers=self.workers * n, processes=self.processes * n
        )

    def work_s(self, trace: Sequence[TraceRequest], n_instances: int) -> float:
        """Mean core seconds per request."""
        apart = (self.passing, self.handling) if n_instances > 1 else ()
        return sum(part.mean_s(trace) for part in (self.process, self.preparing, self.client, *apart))

    def rate_limit(self, trace: Sequence[TraceRequest], n_instances: int, rate: float) -> float:
        """A rate that cannot be exceeded for long, where the instances alone carry at most `rate`."""
        work_s = self.work_s(trace, n_instances)
        if not work_s or not rate:
            return rate
        limits = [rate, self.cores / (work_s + self.threads * n_instances / rate)]  # unused cores are available to all
        if self.workers:
            wanted = ((self._process_s(trace, n_instances), self.processes), (self._preparing_s(trace), self.workers))
            limits += [n / seconds for seconds, n in wanted if seconds]
        return min(limits)

    def slowdown(self, trace: Sequence[TraceRequest], n_instances: int, rate: float) -> float:
        """The factor by which batches take longer beside the server, at `rate` requests per second."""
        if not self.threads or not self.work_s(trace, n_instances):
            return 1.0
        others = [*self._processes(trace, n_instances, rate), *self._workers(trace, rate), *self._client(trace, rate)]
        n = self.threads * n_instances
        share = _share(self.cores, n, others)
        handling = rate * self.handling.mean_s(trace) / n if n_instances > 1 else 0.0
        return 1.0 / max(share - handling, 0.1 * share)

    def ready_s(self, trace: Sequence[TraceRequest], n_instances: int) -> list[float]:
        """The time at which each request, in order of arrival, reaches the instances. The server's process, which also
        streams answers, and then the workers serve requests first come, first served. Where instances compute on the
        same cores, a process that is behind with its work gets as much core time as each of their threads."""
        arrivals = [t.arrival_s for t in trace]
        first = [self.process.before_s(t) for t in trace]
        if n_instances > 1:
            first = [a + self.passing.before_s(t) for a, t in zip(first, trace)]
        second = [self.preparing.before_s(t) for t in trace]
        rate = len(trace) / max(arrivals[-1] - arrivals[0], 1e-9)
        before_s = sum(first) / len(first)
        answers_s = self._process_s(trace, n_instances) - before_s
        n_greedy = self.threads * n_instances
        client = self._client(trace, rate)
        if not self.workers:
            n = max(1, int(min(self.cores, len(trace))))
            both = [a + b for a, b in zip(first, second)]
            share = _share(self.cores, n_greedy + n, client)
            return _served(arrivals, both, n, share, rate, answers_s)
        workers = self._workers(trace, rate)
        processes = self._processes(trace, n_instances, rate)
        share = _share(self.cores, n_greedy + self.processes, [*workers, *client])
        at_s = _served(arrivals, first, self.processes, share, rate, answers_s)
        share = _share(self.cores, n_greedy + self.workers, [*processes, *client])
        return _served(at_s, second, self.workers, share)

    # ---- seconds of a request, and cores wanted by each thread at a rate

    def _process_s(self, trace: Sequence[TraceRequest], n_instances: int) -> float:
        return self.process.mean_s(trace) + (self.passing.mean_s(trace) if n_instances > 1 else 0.0)

    def _preparing_s(self, trace: Sequence[TraceRequest]) -> float:
        return self.preparing.mean_s(trace)

    def _processes(self, trace: Sequence[TraceRequest], n_instances: int, rate: float) -> list[float]:
        n = self.processes if self.workers else max(1, int(min(self.cores, len(trace))))
        preparing_s = 0.0 if self.workers else self._preparing_s(trace)
        return [rate * (self._process_s(trace, n_instances) + preparing_s) / n] * n

    def _workers(self, trace: Sequence[TraceRequest], rate: float) -> list[float]:
        if self.workers:
            return [rate * self._preparing_s(trace) / self.workers] * self.workers
        return []

    def _client(self, trace: Sequence[TraceRequest], rate: float) -> list[float]:
        return [rate * self.client.mean_s(trace)]


def _share(cores: float, n: int, others: Sequence[float]) -> float:
    """The share of a core that each of `n` threads that can use a whole core gets. Each of the `others` gets what it
    wants, but no more than such a thread."""
    left = cores
    for k, wanted in enumerate(sorted(others)):
        if wanted >= (share := left / (n + len(others) - k)):
            return min(1.0, share)
        left -= wanted
    return min(1.0, left / n)


def _served(
    arrivals: Sequence[float], work_s: Sequence[float], n: int, share: float, rate: float = 0.0, besides_s: float = 0.0
) -> list[float]:
    """The times at which a queue with `n` servers is done with each request; a request without work passes at once.
    Each server has this `share` of a core. `besides_s` of other work comes with each of `rate` requests per second; at
    worst it shares the servers in proportion."""
    mean_s = sum(work_s) / len(work_s)
    has = n * share
    left = max(has - rate * besides_s, has * mean_s / ((mean_s + besides_s) or 1.0))
    slower = n / (left or has)
    free = [0.0] * n
    done_s = []
    for at_s, own_s in zip(arrivals, work_s):
        if own_s:
            at_s = max(at_s, free[0]) + own_s * slower
            heapq.heapreplace(free, at_s)
        done_s.append(at_s)
    return done_s
