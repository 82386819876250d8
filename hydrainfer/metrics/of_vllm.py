"""Metrics that only vLLM's dashboards ask for: the same facts as ours, under vLLM's names and labels."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from hydrainfer.core import InstanceStats

VLLM_PREFIX = "vllm"
"""The prefix with which these metrics are on the page."""
_ASLEEP = ("weights_offloaded", "discard_all")


class VllmFamilies:
    """The metrics of instances that are here under other names. The instances of this server never sleep."""

    def __init__(self, model: str) -> None:
        self._model = model
        labels = ["model_name", "engine"]

        def counter(name: str, doc: str, *more: str) -> CounterMetricFamily:
            return CounterMetricFamily(f"{VLLM_PREFIX}:{name}", doc, labels=[*labels, *more])

        def gauge(name: str, doc: str, *more: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"{VLLM_PREFIX}:{name}", doc, labels=[*labels, *more])

        self._sleep = gauge("engine_sleep_state", "1 for the state that the engine is in.", "sleep_state")
        doc = "Requests that wait for room (capacity), or to be copied from another instance (deferred)."
        self._waiting = gauge("num_requests_waiting_by_reason", doc, "reason")
        self._cached = counter("prompt_tokens_cached", "Prompt tokens whose KV was in the cache.")
        self._by_source = counter("prompt_tokens_by_source", "Prompt tokens by where their KV came from.", "source")

    def add(self, engine: str, stats: InstanceStats) -> None:
        of = [self._model, engine]
        self._sleep.add_metric([*of, "awake"], 1)
        for state in _ASLEEP:
            self._sleep.add_metric([*of, state], 0)
        self._waiting.add_metric([*of, "capacity"], stats.n_waiting)
        self._waiting.add_metric([*of, "deferred"], stats.n_arriving)
        self._cached.add_metric(of, stats.tokens_found)
        self._by_source.add_metric([*of, "local_compute"], stats.tokens_wanted - stats.tokens_found)
        self._by_source.add_metric([*of, "local_cache_hit"], stats.tokens_found)
        self._by_source.add_metric([*of, "external_kv_transfer"], 0)

    def families(self) -> Iterator[Metric]:
        yield from (self._sleep, self._waiting, self._cached, self._by_source)
