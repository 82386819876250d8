import pytest

from hydrainfer.core import EventKind, InstanceStats, LifecycleEvent
from hydrainfer.metrics import PrometheusRecorder, Timelines

pytestmark = pytest.mark.unit

STATS = InstanceStats("EPD", 2, 3, 1, 1, 1, {"kv": (10, 5, 1)}, 4, 8, 6, 99, 0.0)
E, P, D = "encode", "prefill", "decode"
LIFE = [
    (EventKind.ARRIVED, 0.0, ""),
    (EventKind.QUEUED, 0.5, E),
    (EventKind.STARTED, 1.0, E),
    (EventKind.ENDED, 2.0, E),
    (EventKind.QUEUED, 2.0, P),
    (EventKind.STARTED, 2.25, P),
    (EventKind.TOKEN, 3.0, ""),
    (EventKind.ENDED, 3.0, P),
    (EventKind.QUEUED, 3.0, D),
    (EventKind.STARTED, 3.125, D),
    (EventKind.TOKEN, 4.0, ""),
    (EventKind.TOKEN, 6.0, ""),
]


def events(request_id="r"):
    for kind, at, stage in LIFE:
        yield LifecycleEvent(request_id, kind, at, stage, n=20 if kind is EventKind.ARRIVED else 0)
    yield LifecycleEvent(request_id, EventKind.FINISHED, 6.0, "", "length")


def test_timeline_has_the_papers_latencies():
    done = {}
    timelines = Timelines(lambda request_id, t: done.update({request_id: t}))
    for e in events():
        timelines.record(e)
    t = done["r"]
    assert (t.ttft_s, t.tpot_s, t.e2e_s) == (3.0, 1.5, 6.0)
    assert t.intervals_s == {
        "encode_queue": 0.5,
        "encode": 1.0,
        "prefill_queue": 0.25,
        "prefill": 0.75,
        "decode_queue": 0.125,
        "decode": 2.875,
    }


def test_the_page_carries_the_names_dashboards_key_on():
    recorder = PrometheusRecorder("m", lambda: STATS)
    for e in events():
        recorder.record(e)
    page = recorder.page().decode()
    for line in (
        'hydrainfer:time_to_first_token_seconds_sum{model_name="m"} 3.0',
        'hydrainfer:inter_token_latency_seconds_count{model_name="m"} 2.0',
        'hydrainfer:request_success_total{finished_reason="length",model_name="m"} 1.0',
        'hydrainfer:num_requests_running{model_name="m"} 3.0',
        'hydrainfer:kv_cache_usage_perc{model_name="m"} 0.5',
        'hydrainfer:mm_cache_hits_total{model_name="m"} 4.0',
        'hydrainfer:num_preemptions_total{model_name="m"} 6.0',
        'hydrainfer:prompt_tokens_total{model_name="m"} 20.0',
        'hydrainfer:generation_tokens_total{model_name="m"} 3.0',
    ):
        assert line in page, line
