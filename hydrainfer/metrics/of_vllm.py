"""Metrics that only vLLM's dashboards ask for: the same facts as ours, under vLLM's names and labels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from hydrainfer.core import PEER, InstanceStats

VLLM_PREFIX = "vllm"
"""The prefix with which these metrics are on the page."""
_ASLEEP = ("weights_offloaded", "discard_all")
_HOST = "host"


class CacheFacts(NamedTuple):
    """How the caches are set up: whether requests share KV, and the tokens of a block."""

    prefix_cache: bool = True
    block_tokens: int = 16


class VllmFamilies:
    """The metrics of instances that are here under other names. The instances of this server never sleep."""

    def __init__(self, model: str, caches: CacheFacts) -> None:
        self._model, self._caches = model, caches
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
        doc = "Prompt tokens whose KV was cached, by the memory that had it; external_unspecified: the shared store."
        self._by_tier = counter("prompt_tokens_cached_by_source", doc, "source")
        facts = ["engine", "enable_prefix_caching", "block_size", "num_gpu_blocks", "num_cpu_blocks"]
        doc = "How the KV cache is set up, in host memory (num_cpu_blocks), too."
        self._info = GaugeMetricFamily(f"{VLLM_PREFIX}:cache_config_info", doc, labels=facts)

    def add(self, engine: str, stats: InstanceStats) -> None:
        of = [self._model, engine]
        self._sleep.add_metric([*of, "awake"], 1)
        for state in _ASLEEP:
            self._sleep.add_metric([*of, state], 0)
        self._waiting.add_metric([*of, "capacity"], stats.n_waiting)
        self._waiting.add_metric([*of, "deferred"], stats.n_arriving)
        self._add_tokens(of, stats)
        if "kv" in stats.cache_blocks:
            n_blocks, n_on_host = (stats.cache_blocks.get(name, (0, 0, 0))[0] for name in ("kv", f"{_HOST}_kv"))
            facts = str(self._caches.prefix_cache), str(self._caches.block_tokens), str(n_blocks), str(n_on_host)
            self._info.add_metric([engine, *facts], 1)

    def _add_tokens(self, of: list[str], stats: InstanceStats) -> None:
        n_from, n_external = stats.tokens_from, sum(stats.tokens_from.values())
        n_here = stats.tokens_found - n_external
        self._cached.add_metric(of, stats.tokens_found)
        by_source = {
            "local_compute": stats.tokens_wanted - stats.tokens_found,
            "local_cache_hit": n_here,
            "external_kv_transfer": n_external,
        }
        n_on_host, n_at_peers = n_from.get(_HOST, 0), n_from.get(PEER, 0)
        by_tier = {
            "device": n_here,
            "host": n_on_host,
            "p2p": n_at_peers,
            "external_unspecified": n_external - n_on_host - n_at_peers,
        }
        for source, n in by_source.items():
            self._by_source.add_metric([*of, source], n)
        for source, n in by_tier.items():
            self._by_tier.add_metric([*of, source], n)

    def families(self) -> Iterator[Metric]:
        yield from (self._sleep, self._waiting, self._cached, self._by_source, self._by_tier, self._info)
