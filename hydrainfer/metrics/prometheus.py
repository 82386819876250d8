"""The Prometheus page: vLLM's metric names with our prefix, so that existing dashboards need one change."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hydrainfer.core import EventKind, InstanceStats, LifecycleEvent
from hydrainfer.metrics.timeline import INTERVALS, Timeline, Timelines

PREFIX = "hydrainfer:"
_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)

_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From arrival to the first token.", _SECONDS),
    "inter_token_latency_seconds": ("Between two tokens of a request.", _SECONDS),
    "request_time_per_output_token_seconds": ("Mean time per token after the first.", _SECONDS),
    "e2e_request_latency_seconds": ("From arrival to the last token.", _SECONDS),
    "request_queue_time_seconds": ("Waiting, over all stages.", _SECONDS),
    "request_encode_time_seconds": ("In encode.", _SECONDS),
    "request_prefill_time_seconds": ("In prefill.", _SECONDS),
    "request_decode_time_seconds": ("In decode.", _SECONDS),
    "request_prompt_tokens": ("Prompt tokens of a request, placeholders included.", _TOKENS),
    "request_generation_tokens": ("Tokens produced for a request.", _TOKENS),
}


class PrometheusRecorder:
    """Takes lifecycle events on the engine's thread; `page` may be called from any thread."""

    def __init__(self, model: str, stats: Callable[[], InstanceStats]) -> None:
        self._registry = CollectorRegistry()
        self._timelines = Timelines(self._request_done)
        labels = ("model_name",)
        self._histograms = {
            name: Histogram(PREFIX + name, doc, labels, buckets=buckets, registry=self._registry).labels(model)
            for name, (doc, buckets) in _HISTOGRAMS.items()
        }
        self._interval_s = Counter(
            PREFIX + "request_interval_seconds",
            "Time spent in each of the eight intervals of a request's life.",
            (*labels, "interval"),
            registry=self._registry,
        )
        self._tokens = {
            kind: Counter(PREFIX + f"{kind}_tokens", f"{kind.title()} tokens so far.", labels, registry=self._registry)
            for kind in ("prompt", "generation")
        }
        self._success = Counter(
            PREFIX + "request_success",
            "Requests ended, by reason.",
            (*labels, "finished_reason"),
            registry=self._registry,
        )
        self._model = model
        self._registry.register(_StatsCollector(model, stats))

    def record(self, event: LifecycleEvent) -> None:
        timeline = self._timelines.record(event)
        if event.kind is EventKind.ARRIVED:
            self._tokens["prompt"].labels(self._model).inc(event.n)
            self._histograms["request_prompt_tokens"].observe(event.n)
        if event.kind is EventKind.TOKEN and timeline is not None:
            at = timeline.token_s
            if len(at) == 1:
                self._histograms["time_to_first_token_seconds"].observe(at[0] - timeline.arrived_s)
            else:
                self._histograms["inter_token_latency_seconds"].observe(at[-1] - at[-2])

    def _request_done(self, request_id: str, timeline: Timeline) -> None:
        del request_id
        observe = {
            "request_time_per_output_token_seconds": timeline.tpot_s,
            "e2e_request_latency_seconds": timeline.e2e_s,
            "request_queue_time_seconds": timeline.queue_s,
            "request_encode_time_seconds": timeline.intervals_s.get("encode"),
            "request_prefill_time_seconds": timeline.intervals_s.get("prefill"),
            "request_decode_time_seconds": timeline.intervals_s.get("decode"),
            "request_generation_tokens": len(timeline.token_s),
        }
        for name, value in observe.items():
            if value is not None:
                self._histograms[name].observe(value)
        for interval in INTERVALS:
            self._interval_s.labels(self._model, interval).inc(timeline.intervals_s.get(interval, 0.0))
        self._tokens["generation"].labels(self._model).inc(len(timeline.token_s))
        self._success.labels(self._model, timeline.finish_reason).inc()

    def page(self) -> bytes:
        """The text exposition of everything."""
        return generate_latest(self._registry)


class _StatsCollector(Collector):
    """Gauges read from the instance at scrape time."""

    def __init__(self, model: str, stats: Callable[[], InstanceStats]) -> None:
        self._model = model
        self._stats = stats

    def describe(self) -> list[Metric]:
        return []  # names are known only with the instance's caches; `collect` is not called at registration

    def collect(self) -> Iterator[Metric]:
        s = self._stats()
        gauges: dict[str, float] = {
            "num_requests_running": s.n_running,
            "num_requests_waiting": s.n_waiting,
            "num_requests_encoding": s.n_encoding,
            "num_requests_prefilling": s.n_prefilling,
            "num_requests_decoding": s.n_decoding,
            "num_requests_migrating": s.n_migrating,
        }
        for spec, (total, leased, cached) in s.cache_blocks.items():
            gauges[f"{spec}_cache_usage_perc"] = leased / total if total else 0.0
            gauges[f"{spec}_cache_blocks"] = total
            gauges[f"{spec}_cache_reusable_blocks"] = cached
        counters = {
            "num_preemptions": s.n_preemptions,
            "mm_cache_queries": s.embed_queries,
            "mm_cache_hits": s.embed_hits,
            "engine_steps": s.n_steps,
            "requests_landed": s.n_landed,
            **{f"{spec}_blocks_pulled": n for spec, n in s.blocks_pulled.items()},
        }
        for name, value in gauges.items():
            gauge = GaugeMetricFamily(PREFIX + name, name.replace("_", " "), labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        for name, value in counters.items():
            counter = CounterMetricFamily(PREFIX + name, name.replace("_", " "), labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter
