"""Lifecycle events → timelines, latency breakdowns and the Prometheus page; SLO attainment of anything with latencies.

Fed by engines, live or simulated; read by the server and the benchmarks. Never measures time itself.
"""

from hydrainfer.metrics.attainment import FAILED, Proportion, Verdict, effective_n, judge, quantile_interval, wilson
from hydrainfer.metrics.prometheus import Ended, PrometheusRecorder, Waiting
from hydrainfer.metrics.timeline import INTERVALS, Timeline, Timelines

__all__ = [
    "FAILED",
    "INTERVALS",
    "Ended",
    "PrometheusRecorder",
    "Proportion",
    "Timeline",
    "Timelines",
    "Verdict",
    "Waiting",
    "effective_n",
    "judge",
    "quantile_interval",
    "wilson",
]
