"""The timeline of a request that several instances tell of is there when its end is told."""

import re

import pytest

from hydrainfer.cluster import ServerSide
from hydrainfer.cluster.messages import Hello, Moved, Peer, Report
from hydrainfer.core import EventKind, LifecycleEvent, Output, Role
from hydrainfer.metrics import PrometheusRecorder
from tests.scheduler.fakes import make_request

pytestmark = pytest.mark.unit
P, D = ("P0", 1), ("D0", 2)


def event(kind, at_s, stage=""):
    return LifecycleEvent("r", kind, at_s, stage, n=5 if kind is EventKind.ARRIVED else 0)


@pytest.mark.parametrize("first", ["giver", "taker"])
def test_a_request_that_moved(first):
    recorder, told = PrometheusRecorder("m", list), []

    def sink(outputs):
        told.extend(recorder.timings(o.request_id) for o in outputs if o.finish_reason)

    side = ServerSide({"P0": Role.parse("EP"), "D0": Role.parse("D")}, sink, recorder.record)
    for name, incarnation in (P, D):
        side.hear(Hello(Peer(name, name[:-1], incarnation, "-"), "host", 1, {}), 0.0)
    side.lives.submit(make_request("r", max_tokens=2), 0.0)
    giver = Report(
        *P, 3.0, (Output("r", (7,)),),
        (
            event(EventKind.ARRIVED, 0.0), event(EventKind.QUEUED, 0.0, "prefill"),
            event(EventKind.STARTED, 1.0, "prefill"), event(EventKind.MIGRATING, 3.0, "decode"),
        ),
        (Moved("r", *D, 1),),
    )  # fmt: skip
    taker = Report(
        *D, 4.5, (),
        (event(EventKind.QUEUED, 4.0, "decode"), event(EventKind.STARTED, 4.5, "decode")), (Moved("r", *D, 1),),
    )  # fmt: skip
    for report in (giver, taker) if first == "giver" else (taker, giver):
        side.hear(report, 5.0)
    assert not told
    side.hear(Report(*D, 6.0, (Output("r", (8,), finish_reason="length", start=1),)), 6.0)
    (timeline,) = told
    assert timeline.intervals_s == {
        "prefill_queue": 1.0, "prefill": 2.0, "pd_migration": 1.0, "decode_queue": 0.5, "decode": 1.5,
    }  # fmt: skip
    assert (timeline.ttft_s, timeline.e2e_s, timeline.n_migrations) == (3.0, 6.0, 1)


def samples(recorder, name):
    """The samples above 0 of a metric of vLLM's, by engine."""
    found = re.findall(rf'^vllm:{name}{{engine="(\w*)".*}} (\S+)$', recorder.page().decode(), re.MULTILINE)
    return {engine: float(value) for engine, value in found if float(value)}


@pytest.mark.parametrize("first", ["giver", "taker"])
def test_metrics_of_vllms_dashboards_are_of_the_instance_where_it_happened(first):
    """The prompt and the first token of who prefills, though another one's token may be heard before; the rest of who
    decodes."""
    recorder = PrometheusRecorder("m", list, prefix="vllm")
    side = ServerSide({"P0": Role.parse("EP"), "D0": Role.parse("D")}, lambda _: None, recorder.record)
    for name, incarnation in (P, D):
        side.hear(Hello(Peer(name, name[:-1], incarnation, "-"), "host", 1, {}), 0.0)
    side.lives.submit(make_request("r", n_text=5, max_tokens=3), 0.0)
    started = event(EventKind.STARTED, 1.0, "prefill")._replace(n=2)
    giver = Report(*P, 3.0, (Output("r", (7,)),), (started,), (Moved("r", *D, 1),))
    taker = Report(*D, 4.0, (Output("r", (8,), start=1),), (), (Moved("r", *D, 1),))
    for report in (giver, taker) if first == "giver" else (taker, giver):
        side.hear(report, 5.0)
    side.hear(Report(*D, 6.0, (Output("r", (9,), finish_reason="length", start=2),)), 6.0)
    assert samples(recorder, "prompt_tokens_total") == {"P0": 5.0}
    assert samples(recorder, "time_to_first_token_seconds_count") == {"P0": 1.0}
    assert samples(recorder, "generation_tokens_total") == {"P0": 1.0, "D0": 2.0}
    assert samples(recorder, "inter_token_latency_seconds_count") == {"D0": 2.0}
    assert samples(recorder, "request_success_total") == {"D0": 1.0}
    assert samples(recorder, "request_prefill_kv_computed_tokens_sum") == {"D0": 3.0}
