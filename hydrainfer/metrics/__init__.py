"""Lifecycle events → timelines, latency breakdowns and the Prometheus page.

Fed by engines, live or simulated; read by the server and the benchmarks. Never measures time itself.
"""

from hydrainfer.metrics.prometheus import PrometheusRecorder
from hydrainfer.metrics.timeline import INTERVALS, Timeline, Timelines

__all__ = ["INTERVALS", "PrometheusRecorder", "Timeline", "Timelines"]
