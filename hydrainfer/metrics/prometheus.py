"""The Prometheus page: vLLM's metric names with our prefix, or with any other, such as vLLM's for its dashboards."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from hydrainfer.core import PEER, EventKind, InstanceInfo, InstanceStats, LifecycleEvent, StepTokens, StoreStats
from hydrainfer.metrics.of_requests import RequestMetrics
from hydrainfer.metrics.of_vllm import VLLM_PREFIX, CacheFacts, VllmFamilies
from hydrainfer.metrics.timeline import INTERVALS, Timeline, Timelines

_PREFIX = "hydrainfer"
_USUAL = CacheFacts()
_KEPT = 1024  # timelines and ended requests that are kept
_STEP_SIZES = 14  # the last bucket of tokens per step ends at 2**14
_STEP_DOC = "Tokens of a language batch: those that decode, prefill and verify."

_OF_INSTANCES = {
    "num_requests_running": "Requests that hold cache.",
    "num_requests_waiting": "Requests that wait for room in the caches.",
    "num_requests_encoding": "Running requests that are in encode.",
    "num_requests_prefilling": "Running requests that are in prefill.",
    "num_requests_decoding": "Running requests that are in decode.",
    "num_requests_migrating": "Requests that wait for another instance to pull them.",
    "num_requests_arriving": "Requests that other instances offer, and that are not here yet.",
    "num_requests_parked": "Requests that came to decode and wait in host memory for room on the device.",
    "cache_usage_perc": "Share of the cache's blocks that requests hold; 1 is all.",
    "cache_blocks": "Blocks of the cache.",
    "cache_reusable_blocks": "Blocks that nobody holds and whose content can be found again.",
    "num_preemptions": "Times that a request lost its KV blocks to others.",
    "mm_cache_queries": "Pictures of requests that came to be encoded.",
    "mm_cache_hits": "Pictures of such requests whose embeddings were in the cache.",
    "prefix_cache_queries": "Prompt tokens of requests that came to be prefilled.",
    "prefix_cache_hits": "Prompt tokens of such requests whose KV was in the device's cache.",
    "prefix_cache_pulled": "Such tokens whose KV was not there and came from another instance.",
    "external_prefix_cache_queries": "Such tokens that were not there, and of which other tiers were asked.",
    "external_prefix_cache_hits": "Of these, the tokens whose KV host memory or the store had.",
    "prefix_cache_missed": "Prompt tokens whose KV is in the cache, computed again because a window or state is gone.",
    "engine_steps": "Batches executed.",
    "requests_landed": "Requests that came from other instances.",
    "blocks_pulled": "Blocks copied from other instances.",
    "store_queries": "Requests about which the shared store was asked.",
    "store_blocks_loaded": "Blocks loaded from the shared store.",
    "store_bytes_loaded": "Bytes loaded from the shared store.",
    "store_load_seconds": "Time of loads from the shared store.",
    "store_blocks_lost": "Blocks that the shared store seemed to have and that did not come.",
    "store_loads_late": "Loads from the shared store that took longer than computing, which was done instead.",
    "store_blocks_saved": "Blocks that are in the shared store because they were saved.",
    "store_bytes_saved": "Bytes of the blocks that were saved.",
    "store_blocks_skipped": "Blocks that were evicted before they were saved.",
    "store_blocks_corrupt": "Blocks that were found broken in the shared store, and removed.",
    "store_failures": "Times that the shared store could not be used and was left alone for a while.",
}
"""The help texts of the instances' metrics. The name of a metric is a key, or ends with one after a cache's name."""


class QueueStats(NamedTuple):
    """The state of the server's admission: seconds of work by kind, requests refused so far by reason, and requests
    that wait to be prepared by kind."""

    queue_s: Mapping[str, float] = {}
    refused: Mapping[str, int] = {}
    unprepared: Mapping[str, int] = {}


class Ended(NamedTuple):
    """A request that has ended with a whole answer. `number`: counts such requests from 1; `finished_s`: on the
    engine's clock; `intervals_s`: those of `INTERVALS` that happened."""

    number: int
    finished_s: float
    n_tokens: int
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float
    intervals_s: Mapping[str, float]


class PrometheusRecorder:
    """Builds metrics from lifecycle events. `record` is called by one thread at a time; all else may be used by any
    thread. `instances` and `waiting` are called at each scrape. `prefix`: what all names begin with, before a colon;
    with vLLM's, the metrics of requests are by instance, too. `engine`: the instance of events that name none."""

    def __init__(
        self,
        model: str,
        instances: Callable[[], list[InstanceInfo]],
        waiting: Callable[[], QueueStats] = QueueStats,
        caches: CacheFacts = _USUAL,
        prefix: str = _PREFIX,
        engine: str = "",
    ) -> None:
        of_vllm = prefix == VLLM_PREFIX
        prefix += ":"
        self._registry = CollectorRegistry()
        self._done: dict[str, Timeline] = {}  # the latest timelines that `timings` has not returned yet
        self._lock = threading.Lock()  # around `_done`, `_ended` and `_stopped`
        self.n_tokens = (0, 0)  # prompt tokens and answer tokens so far
        self._ended: deque[Ended] = deque(maxlen=_KEPT)
        self._stopped: set[str] = set()  # requests that a stop string has ended
        self._timelines = Timelines(self._request_done)
        self._registry.register(_InstancesCollector(model, instances, prefix, self._known, caches if of_vllm else None))
        self._requests = RequestMetrics(model, prefix, self._registry, by_engine=of_vllm, engine=engine)
        labels = ("model_name",)
        doc = "Time spent in each of the eight intervals of a request's life."
        self._interval_s = Counter(
            prefix + "request_interval_seconds", doc, (*labels, "interval"), registry=self._registry
        )
        doc = "Times that a request went on elsewhere because its instance had died."
        self._recovered = Counter(prefix + "requests_recovered", doc, labels, registry=self._registry).labels(model)
        if not of_vllm:
            facts = (*labels, "enable_prefix_caching")
            info = Gauge(prefix + "cache_config_info", "How the caches are set up.", facts, registry=self._registry)
            info.labels(model, str(caches.prefix_cache)).set(1)
        self._model = model
        self._registry.register(_WaitingCollector(model, waiting, prefix))
        ProcessCollector(registry=self._registry)

    def _known(self, engine: str) -> None:
        """Let the metrics of an instance be on the page before its first request."""
        self._requests.of(engine)

    def record(self, event: LifecycleEvent) -> None:
        timeline = self._timelines.record(event)
        if timeline is None:
            return
        if event.kind is EventKind.ARRIVED:
            self.n_tokens = (self.n_tokens[0] + event.n, self.n_tokens[1])
        elif event.kind is EventKind.TOKEN:
            self._requests.token(event.instance)
            self.n_tokens = (self.n_tokens[0], self.n_tokens[1] + 1)
        elif event.kind is EventKind.RECOVERED:
            self._recovered.inc()
        if event.kind is EventKind.TOKEN and len(timeline.token_s) > 1:
            at = timeline.token_s
            self._requests.next_token(event.instance, max(at[-1] - at[-2], 0.0))
        elif event.kind in (EventKind.ARRIVED, EventKind.TOKEN) and timeline.ttft_s is not None:
            self._requests.first_token(event.instance, timeline)

    def timings(self, request_id: str) -> Timeline | None:
        """The timeline of a finished request. It is returned only once, and only while it is among the latest."""
        with self._lock:
            self._stopped.discard(request_id)
            return self._done.pop(request_id, None)

    def doing(self, request_id: str) -> str:
        """The one of `INTERVALS` that a live request is in, "" if that is not known."""
        return self._timelines.doing(request_id)

    def stopped(self, request_id: str) -> None:
        """Note that a stop string has ended a request. For the engine, such a request is cancelled."""
        with self._lock:
            self._stopped.add(request_id)

    def ended_after(self, number: int) -> list[Ended]:
        """The latest ended requests after `number`, the oldest first. All of them if `number` is not reached yet: it
        then comes from an earlier server."""
        with self._lock:
            if not self._ended or number > self._ended[-1].number:
                number = 0
            return [one for one in self._ended if one.number > number]

    def _request_done(self, request_id: str, timeline: Timeline) -> None:
        with self._lock:
            if timeline.finish_reason == "abort" and request_id in self._stopped:
                timeline.finish_reason = "stop"
            self._done[request_id] = timeline
            if len(self._done) > _KEPT:
                del self._done[next(iter(self._done))]
            if timeline.finish_reason in ("stop", "length") and timeline.e2e_s is not None:
                number = self._ended[-1].number + 1 if self._ended else 1
                assert timeline.finished_s is not None
                figures = len(timeline.token_s), timeline.ttft_s, timeline.tpot_s, timeline.e2e_s, timeline.intervals_s
                self._ended.append(Ended(number, timeline.finished_s, *figures))
        self._requests.ended(timeline)
        for interval in INTERVALS:
            self._interval_s.labels(self._model, interval).inc(timeline.intervals_s.get(interval, 0.0))

    def page(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _WaitingCollector(Collector):
    def __init__(self, model: str, waiting: Callable[[], QueueStats], prefix: str) -> None:
        self._model, self._prefix = model, prefix
        self._waiting = waiting

    def collect(self) -> Iterator[Metric]:
        waiting = self._waiting()
        doc = "Seconds of work that waits for its first token, or (decoding) for its pictures to be decoded."
        queue_s = GaugeMetricFamily(self._prefix + "admission_queue_seconds", doc, labels=["model_name", "kind"])
        doc = "Requests refused with 429 by admission, by what had no room."
        refused = CounterMetricFamily(self._prefix + "requests_refused", doc, labels=["model_name", "reason"])
        doc = "Requests that wait to be prepared; no instance has them yet."
        unprepared = GaugeMetricFamily(self._prefix + "num_requests_unprepared", doc, labels=["model_name", "kind"])
        for kind, n in waiting.unprepared.items():
            unprepared.add_metric([self._model, kind], n)
        for kind, seconds in waiting.queue_s.items():
            queue_s.add_metric([self._model, kind], seconds)
        for reason, n in waiting.refused.items():
            refused.add_metric([self._model, reason], n)
        yield from (queue_s, refused, unprepared)


class _InstancesCollector(Collector):
    """The metrics read from the instances at each scrape: a sample per live instance, labelled `engine` as in vLLM.
    `known` is called with the name of each instance. `caches`: those of vLLM's dashboards, or None."""

    def __init__(
        self,
        model: str,
        instances: Callable[[], list[InstanceInfo]],
        prefix: str,
        known: Callable[[str], None],
        caches: CacheFacts | None,
    ) -> None:
        self._model, self._prefix = model, prefix
        self._instances, self._known, self._caches = instances, known, caches

    def describe(self) -> list[Metric]:
        return []  # the names depend on the instances' caches; without this, registration would call `collect`

    def collect(self) -> Iterator[Metric]:
        labels = ["model_name", "engine"]
        up = GaugeMetricFamily(self._prefix + "instance_up", "1 unless the instance is dead.", labels=[*labels, "role"])
        gauges: dict[str, GaugeMetricFamily] = {}
        counters: dict[str, CounterMetricFamily] = {}
        drafts = _DraftFamilies(self._model, self._prefix)
        steps = HistogramMetricFamily(self._prefix + "iteration_tokens_total", _STEP_DOC, labels=labels)
        of_vllm = VllmFamilies(self._model, self._caches or _USUAL)
        for info in self._instances():
            up.add_metric([self._model, info.name, info.role], float(info.state != "dead"))
            if info.stats is None or info.state == "dead":
                continue
            self._known(info.name)
            for name, value in _gauges(info.stats).items():
                gauge = gauges.get(name)
                if gauge is None:
                    gauge = gauges[name] = GaugeMetricFamily(self._prefix + name, _doc(name), labels=labels)
                gauge.add_metric([self._model, info.name], value)
            for name, value in _counters(info.stats).items():
                counter = counters.get(name)
                if counter is None:
                    counter = counters[name] = CounterMetricFamily(self._prefix + name, _doc(name), labels=labels)
                counter.add_metric([self._model, info.name], value)
            drafts.add(info.name, info.stats)
            of_vllm.add(info.name, info.stats)
            buckets, n_tokens = _step_buckets(info.stats.step_tokens)
            steps.add_metric([self._model, info.name], buckets, n_tokens)
        yield from (up, *gauges.values(), *counters.values(), steps, *drafts.families)
        if self._caches is not None:
            yield from of_vllm.families()


class _DraftFamilies:
    """The counters of drafts, by drafter (`method`), with vLLM's names."""

    def __init__(self, model: str, prefix: str) -> None:
        self._model = model
        labels = ["model_name", "engine", "method"]

        def family(name: str, doc: str, *more: str) -> CounterMetricFamily:
            return CounterMetricFamily(f"{prefix}spec_decode_{name}", doc, labels=[*labels, *more])

        self._steps = family("num_drafts", "Decode steps of a sequence that verified drafts.")
        self._drafted = family("num_draft_tokens", "Drafts that were verified.")
        self._accepted = family("num_accepted_tokens", "Drafts that were right.")
        by_position = "Drafts that were right, by their place behind the last token."
        self._by_position = family("num_accepted_tokens_per_pos", by_position, "position")
        self._failures = family("num_drafter_failures", "Errors of a drafter, without which the instance goes on.")
        left_out = "Guesses that were not verified, by the reason: their cost, the step's token budget, or no room."
        self._left_out = family("num_drafts_left_out", left_out, "reason")
        of_tokens = self._drafted, self._accepted, self._by_position, self._left_out
        self.families = (self._steps, *of_tokens, self._failures)

    def add(self, engine: str, stats: InstanceStats) -> None:
        for method, counts in stats.drafts.items():
            of = [self._model, engine, method]
            self._steps.add_metric(of, counts.n_drafts)
            self._drafted.add_metric(of, counts.n_tokens)
            self._accepted.add_metric(of, counts.n_accepted)
            self._failures.add_metric(of, counts.n_failures)
            for i, n in enumerate(counts.by_position):
                self._by_position.add_metric([*of, str(i)], n)
            for reason, n in counts.left_out.items():
                self._left_out.add_metric([*of, reason], n)


def _step_buckets(steps: StepTokens) -> tuple[list[tuple[str, float]], int]:
    """The buckets of a histogram, each with those of smaller sizes, and the sum of all."""
    n_steps = sum(steps.by_size)
    sums = list(accumulate(steps.by_size[: _STEP_SIZES + 1]))
    sums += [n_steps] * (_STEP_SIZES + 1 - len(sums))
    buckets = [(str(float(1 << i)), float(n)) for i, n in enumerate(sums)]
    return [*buckets, ("+Inf", float(n_steps))], steps.n_tokens


def _doc(name: str) -> str:
    return _OF_INSTANCES[max((end for end in _OF_INSTANCES if name.endswith(end)), key=len)]


def _gauges(s: InstanceStats) -> dict[str, float]:
    gauges: dict[str, float] = {
        "num_requests_running": s.n_running,
        "num_requests_waiting": s.n_waiting,
        "num_requests_encoding": s.n_encoding,
        "num_requests_prefilling": s.n_prefilling,
        "num_requests_decoding": s.n_decoding,
        "num_requests_migrating": s.n_migrating,
        "num_requests_arriving": s.n_arriving,
        "num_requests_parked": s.n_parked,
    }
    for spec, (total, leased, cached) in s.cache_blocks.items():
        gauges[f"{spec}_cache_usage_perc"] = leased / total if total else 0.0
        gauges[f"{spec}_cache_blocks"] = total
        gauges[f"{spec}_cache_reusable_blocks"] = cached
    return gauges


def _counters(s: InstanceStats) -> dict[str, float]:
    return {
        "num_preemptions": s.n_preemptions,
        "mm_cache_queries": s.pictures_wanted,
        "mm_cache_hits": s.pictures_found,
        "prefix_cache_queries": s.tokens_wanted,
        "prefix_cache_hits": s.tokens_found - sum(s.tokens_from.values()),
        "prefix_cache_pulled": s.tokens_from.get(PEER, 0),
        "prefix_cache_missed": s.tokens_missed,
        **_external_counters(s),
        "engine_steps": s.n_steps,
        "requests_landed": s.n_landed,
        **{f"{spec}_blocks_pulled": n for spec, n in s.blocks_pulled.items()},
        **_store_counters(s.store),
    }


def _external_counters(s: InstanceStats) -> dict[str, float]:
    """What host memory and the shared store had, if there is one of them."""
    tiers = s.tokens_from.keys() - {PEER}
    if not tiers:
        return {}
    return {
        "external_prefix_cache_queries": s.tokens_asked,
        "external_prefix_cache_hits": sum(s.tokens_from[tier] for tier in tiers),
    }


def _store_counters(s: StoreStats | None) -> dict[str, float]:
    if s is None:
        return {}
    return {
        "store_queries": s.n_asks,
        "store_blocks_loaded": s.n_loaded,
        "store_bytes_loaded": s.n_bytes_loaded,
        "store_load_seconds": s.load_s,
        "store_blocks_lost": s.n_lost,
        "store_loads_late": s.n_late,
        "store_blocks_saved": s.n_saved,
        "store_bytes_saved": s.n_bytes_saved,
        "store_blocks_skipped": s.n_skipped,
        "store_blocks_corrupt": s.n_corrupt,
        "store_failures": s.n_failures,
    }
