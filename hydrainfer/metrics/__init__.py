"""Lifecycle events → timelines, latency breakdowns and the Prometheus page.

Fed by engines, live or simulated; read by the server and the planner. Never measures time itself.
"""

from hydrainfer.metrics.http import HttpCounts
from hydrainfer.metrics.of_vllm import VLLM_PREFIX, CacheFacts
from hydrainfer.metrics.prometheus import Ended, PrometheusRecorder, QueueStats
from hydrainfer.metrics.timeline import INTERVALS, Timeline, Timelines

__all__ = [
    "INTERVALS",
    "VLLM_PREFIX",
    "CacheFacts",
    "Ended",
    "HttpCounts",
    "PrometheusRecorder",
    "QueueStats",
    "Timeline",
    "Timelines",
]
