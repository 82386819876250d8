"""The metrics of requests: latencies, tokens and how they end, of the whole server or of each instance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram

from hydrainfer.metrics.timeline import Timeline

_SECONDS = (
    *(0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.5, 0.75),
    *(1, 2.5, 5, 10, 30, 60, 120),
)
"""Bounds of buckets; among them are all limits that vLLM's dashboards offer as SLOs."""
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
_REASONS = ("stop", "length", "abort", "error")  # why a request ends

_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From arrival to the first token.", _SECONDS),
    "inter_token_latency_seconds": ("Between two tokens of a request.", _SECONDS),
    "request_time_per_output_token_seconds": ("Mean time per token after the first.", _SECONDS),
    "e2e_request_latency_seconds": ("From arrival to the last token.", _SECONDS),
    "request_queue_time_seconds": ("Waiting, over all stages.", _SECONDS),
    "request_encode_time_seconds": ("In encode.", _SECONDS),
    "request_prefill_time_seconds": ("In prefill.", _SECONDS),
    "request_decode_time_seconds": ("In decode.", _SECONDS),
    "request_inference_time_seconds": ("In encode, prefill and decode.", _SECONDS),
    "request_prompt_tokens": ("Prompt tokens of a request, placeholders included.", _TOKENS),
    "request_prefill_kv_computed_tokens": ("Prompt tokens of a request that were in no cache.", _TOKENS),
    "request_generation_tokens": ("Tokens produced for a request.", _TOKENS),
    "request_max_num_generation_tokens": ("Tokens of its longest choice; a choice is a request here.", _TOKENS),
}


class _Samples(NamedTuple):
    """The metrics with these labels, of one instance or of the server. `histograms`: those that have been observed; a
    mean of none would be NaN on a dashboard."""

    labels: tuple[str, ...]
    histograms: dict[str, Histogram]
    prompt_tokens: Counter
    generation_tokens: Counter
    success: Mapping[str, Counter]  # by the reason of the end


class RequestMetrics:
    """`by_engine`: one sample per instance, labelled `engine` as in vLLM; what has no instance is of `engine`. Used by
    one thread at a time, apart from `of`."""

    def __init__(
        self, model: str, prefix: str, registry: CollectorRegistry, *, by_engine: bool = False, engine: str = ""
    ) -> None:
        self._model, self._engine, self._by_engine = model, engine, by_engine
        labels = ["model_name", "engine"] if by_engine else ["model_name"]
        self._of: dict[str, _Samples] = {}

        def counter(name: str, doc: str, *by: str) -> Counter:
            return Counter(prefix + name, doc, [*labels, *by], registry=registry)

        self._histograms = {
            name: Histogram(prefix + name, doc, labels, buckets=buckets, registry=registry)
            for name, (doc, buckets) in _HISTOGRAMS.items()
        }
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens so far, of requests with a first token.")
        self._generation_tokens = counter("generation_tokens", "Generation tokens so far.")
        self._success = counter("request_success", "Requests ended, by reason.", "finished_reason")
        if not by_engine:
            self.of("")  # so that all are 0 before the first request

    def of(self, engine: str) -> _Samples:
        """The metrics to which an instance adds. From the first call on, its counters are on the page. Safe to call
        from any thread."""
        samples = self._of.get(engine)
        if samples is None:
            samples = self._of[engine] = self._samples_of(engine)
        return samples

    def _samples_of(self, engine: str) -> _Samples:
        labels = (self._model, engine or self._engine) if self._by_engine else (self._model,)
        return _Samples(
            labels,
            {} if self._by_engine else {name: whole.labels(*labels) for name, whole in self._histograms.items()},
            self._prompt_tokens.labels(*labels),
            self._generation_tokens.labels(*labels),
            {reason: self._success.labels(*labels, reason) for reason in _REASONS},
        )

    def _observe(self, samples: _Samples, name: str, value: float) -> None:
        histogram = samples.histograms.get(name)
        if histogram is None:
            histogram = samples.histograms[name] = self._histograms[name].labels(*samples.labels)
        histogram.observe(value)

    def first_token(self, engine: str, timeline: Timeline) -> None:
        """Count a request whose first token and arrival are known."""
        samples = self.of(engine)
        samples.prompt_tokens.inc(timeline.n_prompt)
        self._observe(samples, "request_prompt_tokens", timeline.n_prompt)
        if timeline.ttft_s is not None:
            self._observe(samples, "time_to_first_token_seconds", timeline.ttft_s)

    def next_token(self, engine: str, seconds: float) -> None:
        """Count the time between two tokens."""
        self._observe(self.of(engine), "inter_token_latency_seconds", seconds)

    def token(self, engine: str) -> None:
        self.of(engine).generation_tokens.inc()

    def ended(self, timeline: Timeline) -> None:
        """Count a request that is over, for the instance where it ended."""
        samples = self.of(timeline.instance)
        spent = [s for stage in ("encode", "prefill", "decode") if (s := timeline.intervals_s.get(stage)) is not None]
        observed = {
            "request_time_per_output_token_seconds": timeline.tpot_s,
            "e2e_request_latency_seconds": timeline.e2e_s,
            "request_queue_time_seconds": timeline.queue_s,
            "request_encode_time_seconds": timeline.intervals_s.get("encode"),
            "request_prefill_time_seconds": timeline.intervals_s.get("prefill"),
            "request_decode_time_seconds": timeline.intervals_s.get("decode"),
            "request_inference_time_seconds": sum(spent) if spent else None,
            "request_prefill_kv_computed_tokens": timeline.n_computed,
            "request_generation_tokens": len(timeline.token_s),
            "request_max_num_generation_tokens": len(timeline.token_s),
        }
        for name, value in observed.items():
            if value is not None:
                self._observe(samples, name, value)
        samples.success[timeline.finish_reason].inc()
