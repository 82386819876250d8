"""A span per request, its intervals beneath, and the client's trace above."""

import pytest

from hydrainfer.config import load
from hydrainfer.core import ConfigError
from hydrainfer.server import Traces, open_traces
from tests.waiting import wait_until

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="pip install 'hydrainfer[otel]'")
pytestmark = pytest.mark.cpu


@pytest.fixture
def spans(server):
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    traces = Traces(provider, "tiny")
    server.sessions.on_ended = traces.ended
    yield kept.get_finished_spans
    server.sessions.on_ended = lambda _: None
    traces.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_and_its_intervals(server, spans, stream):
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    body = {"messages": [{"role": "user", "content": "a secret"}], "n": 2, "stream": stream}
    made = server.http.post("/v1/chat/completions", json=body, headers={"traceparent": parent})
    assert made.status_code == 200
    wait_until(lambda: any(s.name == "request" for s in spans()))
    (whole,) = (s for s in spans() if s.name == "request")
    parts = [s for s in spans() if s is not whole]
    assert f"{whole.context.trace_id:032x}" in parent and f"{whole.parent.span_id:016x}" in parent
    assert whole.attributes["gen_ai.response.id"] in made.headers["x-request-id"]
    assert whole.attributes["gen_ai.usage.output_tokens"] > 2 and "secret" not in str([s.to_json() for s in spans()])
    assert {s.attributes["hydrainfer.choice"] for s in parts} == {0, 1}
    assert {"prefill_queue", "prefill", "decode"} <= {s.name for s in parts}
    for part in parts:
        assert part.parent.span_id == whole.context.span_id
        assert whole.start_time - 1000 <= part.start_time <= part.end_time <= whole.end_time + 1000


def test_without_the_packages_it_says_how_to_get_them(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"hydrainfer\[otel\]"):
        open_traces("http://127.0.0.1:4318", "tiny")
    assert load({}).config.otlp_endpoint is None
