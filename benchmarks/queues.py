"""Queues on a virtual clock whose goodput is known: the truth that a search for goodput is judged by."""

from __future__ import annotations

import heapq
import math

import numpy as np
from numpy.typing import NDArray

from hydrainfer.judging import Goodput, Search, Series

Times = NDArray[np.float64]
CAPACITY = 50.0
"""Requests per second that every queue here can serve."""
QUEUES = ("M/M/1", "M/D/1", "M/M/4", "tandem")
_SERVERS = 4
_LONG = 4_000_000


def sojourns(queue: str, at_s: Times, rng: np.random.Generator) -> Times:
    """Seconds that each request spends in the queue. "tandem": two M/M/1 behind each other."""
    n = len(at_s)
    if queue == "M/D/1":
        return _through(at_s, np.full(n, 1 / CAPACITY)) - at_s
    if queue == "M/M/4":
        return _servers(at_s, rng.exponential(_SERVERS / CAPACITY, n))
    left = _through(at_s, rng.exponential(1 / CAPACITY, n))
    return (_through(left, rng.exponential(1 / CAPACITY, n)) if queue == "tandem" else left) - at_s


def limit_s(queue: str, rate: float) -> float:
    """The limit that 90 % of the requests keep at `rate` for ever: in closed form, but for M/D/1, by a run of four
    million requests."""
    if queue == "M/D/1":
        rng = np.random.default_rng(0)
        every = sojourns(queue, np.cumsum(rng.exponential(1 / rate, _LONG)), rng)
        return float(np.quantile(every[_LONG // 20 :], 0.9))
    low, high = 0.0, 1e3 / CAPACITY / (1 - rate / CAPACITY)
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if _beyond(queue, rate, middle) > 0.1 else (low, middle)
    return high


def searched(queue: str, limit: float, seed: int, n_first: int, max_runs: int) -> tuple[Goodput, int]:
    """The goodput found under this limit, and how many requests it took."""
    rng, search, n = np.random.default_rng(seed), Search(CAPACITY / 6, max_runs=max_runs), 0
    while (ask := search.next()) is not None:
        at_s = np.cumsum(rng.exponential(1 / ask.rate, n_first * ask.times))
        took_s = sojourns(queue, at_s, rng)
        search.tell(ask.rate, Series(at_s, took_s, took_s <= limit, limit))
        n += len(at_s)
    return search.result(), n


def _through(at_s: Times, work_s: Times) -> Times:
    """Departures of one server (Lindley 1952)."""
    done = np.cumsum(work_s)
    return np.asarray(done + np.maximum.accumulate(at_s - (done - work_s)))


def _servers(at_s: Times, work_s: Times) -> Times:
    free, took = [0.0] * _SERVERS, []
    for at, work in zip(at_s.tolist(), work_s.tolist()):
        end = max(at, free[0]) + work
        heapq.heapreplace(free, end)
        took.append(end - at)
    return np.array(took)


def _beyond(queue: str, rate: float, s: float) -> float:
    """The share of requests that take longer than `s` seconds."""
    spare = (CAPACITY - rate) * s
    if queue == "M/M/1":
        return math.exp(-spare)
    if queue == "tandem":
        return math.exp(-spare) * (1 + spare)
    c, each = _SERVERS, CAPACITY / _SERVERS
    load = rate / each
    full = load**c / math.factorial(c) / (1 - load / c)
    waits = full / (full + sum(load**k / math.factorial(k) for k in range(c)))  # Erlang C
    left = c - 1 - load or 1e-9
    alone = math.exp(-each * s)
    return alone + waits * (alone - math.exp(-each * s * (1 + left))) / left
