"""The metric of HTTP answers, with the name and labels of prometheus-fastapi-instrumentator, which vLLM also uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

_DOC = "Requests answered, by path, method and status; 499: the client had gone."


class HttpCounts(Collector):
    """The numbers of requests answered so far, by path, method and status. Used on one thread."""

    def __init__(self) -> None:
        self._n: Counter[tuple[str, str, int]] = Counter()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def add(self, handler: str, method: str, status: int) -> None:
        """Count an answer. `handler`: the path template of its route, or "none" if it has no route. `method`: empty
        if the head was cut off."""
        self._n[handler, method, status] += 1

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily("http_requests", _DOC, labels=["handler", "method", "status"])
        for (handler, method, status), n in self._n.items():
            family.add_metric([handler, method, str(status)], n)
        yield family

    def page(self) -> bytes:
        """The metric in Prometheus' text format."""
        return generate_latest(self._registry)
