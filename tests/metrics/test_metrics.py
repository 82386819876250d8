import re
from pathlib import Path

import pytest
from msgspec import structs

from hydrainfer.core import EventKind, InstanceInfo, InstanceStats, LifecycleEvent, StepTokens, total
from hydrainfer.metrics import CacheFacts, HttpCounts, PrometheusRecorder, Timelines

pytestmark = pytest.mark.unit

STATS = InstanceStats("EPD", 2, 3, 1, 1, 1, {"kv": (10, 5, 1)}, 4, 8, 6, 99, 0.0)
DECODES = InstanceStats("D", 0, 7, 0, 0, 7, {"kv": (20, 5, 1)}, 0, 0, 1, 50, 0.0, blocks_pulled={"kv": 12}, n_landed=3)
INSTANCES = [
    InstanceInfo("EPD0", "EPD", "alive", stats=STATS),
    InstanceInfo("D0", "D", "suspect", stats=DECODES),
    InstanceInfo("D1", "D", "dead"),
    InstanceInfo("D2", "D", "dead", stats=DECODES),
]
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
        "encode_queue": 1.0,  # what precedes it belongs to it
        "encode": 1.0,
        "prefill_queue": 0.25,
        "prefill": 0.75,
        "decode_queue": 0.125,
        "decode": 2.875,
    }


DASHBOARD = (
    *(f"e2e_request_latency_seconds_{part}" for part in ("bucket", "sum", "count")),
    *(f"time_to_first_token_seconds_{part}" for part in ("bucket", "sum", "count")),
    *(f"inter_token_latency_seconds_{part}" for part in ("bucket", "sum", "count")),
    *("prompt_tokens_total", "generation_tokens_total", "request_success_total", "kv_cache_usage_perc"),
    *("num_requests_running", "num_requests_waiting", "request_prompt_tokens_bucket"),
    *("request_generation_tokens_bucket", "request_queue_time_seconds_sum", "request_prefill_time_seconds_sum"),
    *("request_decode_time_seconds_sum", "request_max_num_generation_tokens_sum"),
    *("request_inference_time_seconds_sum", "request_time_per_output_token_seconds_bucket"),
    *("num_preemptions_total", "prefix_cache_queries_total", "prefix_cache_hits_total"),
)
"""The series that the panels of vLLM's Grafana dashboards query, of a model_name."""


def test_dashboards_of_vllm_find_all_their_series():
    recorder = PrometheusRecorder("m", lambda: INSTANCES, prefix="vllm", engine="EPD0")
    for e in events():
        recorder.record(e)
    page = recorder.page().decode()
    for name in DASHBOARD:
        values = re.findall(rf'^vllm:{name}{{[^}}]*model_name="m"[^}}]*}} (\S+)$', page, re.MULTILINE)
        assert values, name
        assert any(float(value) > 0 for value in values) or name.startswith(("num_requests_waiting", "prefix")), name
    assert "hydrainfer:" not in page
    assert 'vllm:request_inference_time_seconds_sum{engine="EPD0",model_name="m"} 4.625' in page  # 1 + 0.75 + 2.875


def test_the_page_carries_the_names_dashboards_key_on():
    recorder = PrometheusRecorder("m", lambda: INSTANCES)
    for e in events():
        recorder.record(e)
    page = recorder.page().decode()
    for line in (
        'hydrainfer:time_to_first_token_seconds_sum{model_name="m"} 3.0',
        'hydrainfer:inter_token_latency_seconds_count{model_name="m"} 2.0',
        'hydrainfer:request_success_total{finished_reason="length",model_name="m"} 1.0',
        'hydrainfer:num_requests_running{engine="EPD0",model_name="m"} 3.0',
        'hydrainfer:num_requests_running{engine="D0",model_name="m"} 7.0',
        'hydrainfer:kv_cache_usage_perc{engine="EPD0",model_name="m"} 0.5',
        'hydrainfer:kv_cache_usage_perc{engine="D0",model_name="m"} 0.25',
        'hydrainfer:mm_cache_hits_total{engine="EPD0",model_name="m"} 4.0',
        'hydrainfer:num_preemptions_total{engine="EPD0",model_name="m"} 6.0',
        'hydrainfer:engine_steps_total{engine="D0",model_name="m"} 50.0',
        'hydrainfer:kv_blocks_pulled_total{engine="D0",model_name="m"} 12.0',
        'hydrainfer:instance_up{engine="EPD0",model_name="m",role="EPD"} 1.0',
        'hydrainfer:instance_up{engine="D0",model_name="m",role="D"} 1.0',
        'hydrainfer:instance_up{engine="D1",model_name="m",role="D"} 0.0',
        'hydrainfer:requests_recovered_total{model_name="m"} 0.0',
        'hydrainfer:prompt_tokens_total{model_name="m"} 20.0',
        'hydrainfer:generation_tokens_total{model_name="m"} 3.0',
    ):
        assert line in page, line
    assert page.count("# TYPE hydrainfer:num_requests_running gauge") == 1
    assert "# HELP hydrainfer:kv_cache_blocks Blocks of the cache." in page
    assert 'engine_steps_total{engine="D1"' not in page and 'engine_steps_total{engine="D2"' not in page


def test_counters_begin_at_zero_and_tokens_count_as_they_are_sent():
    recorder = PrometheusRecorder("m", list)
    page = recorder.page().decode()
    for kind in ("prompt", "generation"):
        assert f'hydrainfer:{kind}_tokens_total{{model_name="m"}} 0.0' in page
    for reason in ("stop", "length", "abort", "error"):
        assert f'hydrainfer:request_success_total{{finished_reason="{reason}",model_name="m"}} 0.0' in page
    *before, finished = events()
    for e in before:
        recorder.record(e)
    generated = 'hydrainfer:generation_tokens_total{model_name="m"} 3.0'
    assert generated in recorder.page().decode(), "before the request has ended"
    recorder.record(LifecycleEvent("r", EventKind.RECOVERED, 6.0))
    recorder.record(finished)
    assert generated in recorder.page().decode()


def test_latencies_of_events_that_overtake_each_other():
    """The first token is told before its arrival, and the second before the first."""
    recorder = PrometheusRecorder("m", list)
    arrived, *rest, finished = events()
    tokens = [e for e in rest if e.kind is EventKind.TOKEN]
    for e in (
        tokens[0],
        arrived,
        arrived,
        tokens[2],
        tokens[1],
        LifecycleEvent("r", EventKind.RECOVERED, 5.0),
        finished,
    ):
        recorder.record(e)
    page = recorder.page().decode()
    for line in (
        'hydrainfer:time_to_first_token_seconds_sum{model_name="m"} 3.0',
        'hydrainfer:time_to_first_token_seconds_count{model_name="m"} 1.0',
        'hydrainfer:inter_token_latency_seconds_sum{model_name="m"} 3.0',
        'hydrainfer:prompt_tokens_total{model_name="m"} 20.0',
        'hydrainfer:request_prompt_tokens_count{model_name="m"} 1.0',
        'hydrainfer:requests_recovered_total{model_name="m"} 1.0',
    ):
        assert line in page, line


def test_a_finished_timeline_is_kept_until_asked_for_or_too_old():
    recorder = PrometheusRecorder("m", list)
    for i in range(1025):
        for e in events(f"r{i}"):
            assert recorder.timings(f"r{i}") is None
            recorder.record(e)
    assert recorder.timings("r0") is None
    assert recorder.timings("r1").e2e_s == 6.0 and recorder.timings("r1") is None
    assert recorder.timings("r1024").finish_reason == "length"


def test_tokens_per_step_are_a_histogram_of_each_instance():
    steps = StepTokens()
    for n in (1, 2, 3, 4, 5, 40_000):
        steps.add(n)
    infos = [InstanceInfo("EPD0", "EPD", "alive", stats=structs.replace(STATS, step_tokens=steps))]
    page = PrometheusRecorder("m", lambda: infos).page().decode()
    for bound, n in (("1.0", 1), ("2.0", 2), ("4.0", 4), ("8.0", 5), ("16384.0", 5), ("+Inf", 6)):
        line = f'hydrainfer:iteration_tokens_total_bucket{{engine="EPD0",le="{bound}",model_name="m"}} {n}.0'
        assert line in page, line
    assert 'hydrainfer:iteration_tokens_total_sum{engine="EPD0",model_name="m"} 40015.0' in page
    both = total([infos[0].stats, structs.replace(STATS, step_tokens=StepTokens(3, [0, 0, 1]))]).step_tokens
    assert both.n_tokens == 40018 and both.by_size[:4] == [1, 1, 3, 1] and sum(both.by_size) == 7


def test_statuses_are_classes_where_vllms_dashboards_ask():
    for classes, status in ((False, "429"), (True, "4xx")):
        counts = HttpCounts(classes)
        counts.add("/v1/x", "POST", 429, 0.5)
        page = counts.page().decode()
        assert f'http_requests_total{{handler="/v1/x",method="POST",status="{status}"}} 1.0' in page
        assert 'http_request_duration_seconds_sum{handler="/v1/x",method="POST"} 0.5' in page


def test_tokens_that_were_found_are_told_apart_by_where_they_were():
    """Tokens count where they were found: of 100, 30 here, 20 in host memory, 15 in a store, 5 at a peer."""
    where = {"host": 20, "store": 15, "peer": 5}
    stats = structs.replace(STATS, tokens_wanted=100, tokens_found=70, tokens_asked=65, tokens_from=where)
    sizes = stats.cache_blocks | {"host_kv": (7, 0, 0)}
    infos = [InstanceInfo("EPD0", "EPD", "alive", stats=structs.replace(stats, cache_blocks=sizes))]
    page = PrometheusRecorder("m", lambda: infos, caches=CacheFacts(True, 32), prefix="vllm").page().decode()
    of = 'engine="EPD0",model_name="m"'
    facts = 'block_size="32",enable_prefix_caching="True",engine="EPD0",num_cpu_blocks="7",num_gpu_blocks="10"'
    for line in (
        f"prefix_cache_queries_total{{{of}}} 100.0",
        f"prefix_cache_hits_total{{{of}}} 30.0",
        f"prefix_cache_pulled_total{{{of}}} 5.0",
        f"external_prefix_cache_queries_total{{{of}}} 65.0",
        f"external_prefix_cache_hits_total{{{of}}} 35.0",
        f"prompt_tokens_cached_total{{{of}}} 70.0",
        f'prompt_tokens_by_source_total{{{of},source="local_compute"}} 30.0',
        f'prompt_tokens_by_source_total{{{of},source="local_cache_hit"}} 30.0',
        f'prompt_tokens_by_source_total{{{of},source="external_kv_transfer"}} 40.0',
        f'prompt_tokens_cached_by_source_total{{{of},source="device"}} 30.0',
        f'prompt_tokens_cached_by_source_total{{{of},source="host"}} 20.0',
        f'prompt_tokens_cached_by_source_total{{{of},source="p2p"}} 5.0',
        f'prompt_tokens_cached_by_source_total{{{of},source="external_unspecified"}} 15.0',
        f"cache_config_info{{{facts}}} 1.0",
    ):
        assert f"\nvllm:{line}\n" in page, line
    both = total([infos[0].stats, structs.replace(STATS, tokens_asked=1, tokens_from={"host": 1})])
    assert (both.tokens_asked, both.tokens_from) == (66, where | {"host": 21})


def test_what_the_document_says_is_not_here_is_not_here():
    document = (Path(__file__).parent.parent.parent / "docs" / "vllm.md").read_text()
    table = document.partition("## Metrics that are not here")[2].partition("## Options")[0]
    names = re.findall(r"`(vllm:\w+)", table)
    page = PrometheusRecorder("m", lambda: INSTANCES, prefix="vllm").page().decode()
    assert len(names) > 8 and not [name for name in names if name in page]


def test_a_server_without_other_tiers_does_not_speak_of_external_caches():
    page = PrometheusRecorder("m", lambda: INSTANCES, prefix="vllm").page().decode()
    assert "external_prefix_cache" not in page and "vllm:prefix_cache_hits_total" in page


def test_the_process_of_the_server_has_the_metrics_of_prometheus_clients():
    page = PrometheusRecorder("m", list).page().decode()
    for name in ("cpu_seconds_total", "resident_memory_bytes", "start_time_seconds", "open_fds", "max_fds"):
        (value,) = re.findall(rf"^process_{name} (\S+)$", page, re.MULTILINE)
        assert float(value) > 0, name


def test_only_vllms_dashboards_get_names_that_say_the_same_again():
    for prefix, there in (("vllm", True), ("hydrainfer", False), ("mine", False)):
        page = PrometheusRecorder("m", lambda: INSTANCES, prefix=prefix).page().decode()
        assert ("engine_sleep_state" in page) == there == ("prompt_tokens_by_source" in page)
