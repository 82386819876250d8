"""OpenTelemetry traces: a span per request, with a child span for each interval in the life of each choice.

The intervals come from the lifecycle events of all instances, on one clock, so the instances need no tracing code.
Traces never contain prompts or answers.
"""

from __future__ import annotations

import time
from typing import Any

from hydrainfer.core import ConfigError
from hydrainfer.metrics import Timeline
from hydrainfer.server.live.stream import TokenStream

_INSTALL = "traces need OpenTelemetry: pip install 'hydrainfer[otel]'"


class Traces:
    """Makes spans of requests that have ended. `provider`: a `TracerProvider` of the SDK."""

    def __init__(self, provider: Any, model: str) -> None:
        self._provider, self._model = provider, model
        self._tracer = provider.get_tracer("hydrainfer")
        self._ahead_s = time.time() - time.monotonic()  # the wall clock, relative to the engine's clock

    def ended(self, stream: TokenStream) -> None:
        """Make the spans of a request whose choices the engine has all ended."""
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        known = [t for t in stream.timelines if t is not None and t.arrived_s is not None and t.finished_s is not None]
        if not known:
            return
        facts = {
            "gen_ai.response.id": stream.prepared.id,
            "gen_ai.request.model": self._model,
            "gen_ai.usage.input_tokens": stream.prepared.n_prompt_tokens,
            "gen_ai.usage.output_tokens": sum(stream.n_tokens),
        }
        parent = TraceContextTextMapPropagator().extract({"traceparent": stream.trace_parent})
        begin_s, end_s = min(t.arrived_s or 0.0 for t in known), max(t.finished_s or 0.0 for t in known)
        span = self._tracer.start_span("request", parent, attributes=facts, start_time=self._ns(begin_s))
        for number, timeline in enumerate(stream.timelines):
            if timeline in known and timeline is not None:
                self._choice(number, timeline, trace.set_span_in_context(span))
        span.end(self._ns(end_s))

    def _choice(self, number: int, timeline: Timeline, within: Any) -> None:
        for interval, begin_s, end_s in timeline.spans:
            facts, begin_ns = {"hydrainfer.choice": number}, self._ns(begin_s)
            span = self._tracer.start_span(interval, within, attributes=facts, start_time=begin_ns)
            span.end(self._ns(end_s))

    def _ns(self, at_s: float) -> int:
        return int((at_s + self._ahead_s) * 1e9)

    def close(self) -> None:
        """Send the spans that have not been sent."""
        self._provider.shutdown()


def open_traces(endpoint: str, model: str) -> Traces:
    """Traces that are sent to a collector in the background, by OTLP over HTTP. `endpoint`: as in
    http://127.0.0.1:4318. Raises `ConfigError` if OpenTelemetry is not installed."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise ConfigError(_INSTALL) from None
    provider = TracerProvider(resource=Resource.create({"service.name": "hydrainfer"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces")))
    return Traces(provider, model)
