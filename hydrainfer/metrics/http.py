"""The metrics of HTTP answers, with the names and labels of prometheus-fastapi-instrumentator, which vLLM also uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

_DOC = "Requests answered, by path, method and status; 499: the client had gone."
_TIME_DOC = "Time until the last byte of the answers, by path and method."


class HttpCounts(Collector):
    """The numbers of requests answered so far, by path, method and status, and how long they took. Used on one thread.
    `classes`: statuses are counted as 2xx, 4xx and so on, as vLLM's dashboards expect."""

    def __init__(self, classes: bool = False) -> None:
        self._classes = classes
        self._n: Counter[tuple[str, str, str]] = Counter()
        self._took_s: dict[tuple[str, str], tuple[int, float]] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def add(self, handler: str, method: str, status: int, took_s: float = 0.0) -> None:
        """Count an answer. `handler`: the path template of its route, or "none" if it has no route. `method`: empty
        if the head was cut off. `took_s`: the time until its last byte."""
        self._n[handler, method, f"{status // 100}xx" if self._classes else str(status)] += 1
        n, sum_s = self._took_s.get((handler, method), (0, 0.0))
        self._took_s[handler, method] = (n + 1, sum_s + took_s)

    def collect(self) -> Iterator[Metric]:
        counts = CounterMetricFamily("http_requests", _DOC, labels=["handler", "method", "status"])
        for labels, n in self._n.items():
            counts.add_metric(labels, n)
        times = SummaryMetricFamily("http_request_duration_seconds", _TIME_DOC, labels=["handler", "method"])
        for path, (n, sum_s) in self._took_s.items():
            times.add_metric(path, n, sum_s)
        yield from (counts, times)

    def page(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self._registry)
