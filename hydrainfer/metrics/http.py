"""The metric of HTTP answers, by the name and the labels of prometheus-fastapi-instrumentator, which vLLM has too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

_DOC = "Requests answered, by path, method and status; 499: the client had gone."


class HttpCounts(Collector):
    """The numbers of requests answered so far, by path, method and status. One thread adds to it and reads it."""

    def __init__(self) -> None:
        self._n: Counter[tuple[str, str, int]] = Counter()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def add(self, handler: str, method: str, status: int) -> None:
        """Count an answer. `handler`: the path of its route, of which there are few; "none" if it has none."""
        self._n[handler, method, status] += 1

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily("http_requests", _DOC, labels=["handler", "method", "status"])
        for (handler, method, status), n in self._n.items():
            family.add_metric([handler, method, str(status)], n)
        yield family

    def page(self) -> bytes:
        """The text exposition."""
        return generate_latest(self._registry)
