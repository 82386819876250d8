"""Lifecycle events → timelines, latency breakdowns and the Prometheus page; latencies → SLO attainment and goodput.

Fed by engines, live or simulated; read by the server and the benchmarks. Never measures time itself.
"""

from hydrainfer.metrics.attainment import (
    FAILED,
    Proportion,
    Verdict,
    at_quantile,
    effective_n,
    judge,
    quantile_interval,
    wilson,
)
from hydrainfer.metrics.blame import blamed, per_token
from hydrainfer.metrics.http import HttpCounts
from hydrainfer.metrics.prometheus import Ended, PrometheusRecorder, QueueStats
from hydrainfer.metrics.search import Ask, Goodput, Search
from hydrainfer.metrics.steady import Series, delay_limit_s, steady_state
from hydrainfer.metrics.timeline import INTERVALS, Timeline, Timelines

__all__ = [
    "FAILED",
    "INTERVALS",
    "Ask",
    "Ended",
    "Goodput",
    "HttpCounts",
    "PrometheusRecorder",
    "Proportion",
    "QueueStats",
    "Search",
    "Series",
    "Timeline",
    "Timelines",
    "Verdict",
    "at_quantile",
    "blamed",
    "delay_limit_s",
    "effective_n",
    "judge",
    "per_token",
    "quantile_interval",
    "steady_state",
    "wilson",
]
