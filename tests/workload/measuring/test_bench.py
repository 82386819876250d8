"""`bench` and `bench compare` from request to report, against mock servers in virtual time."""

import asyncio
import json
import re

import msgspec
import pytest

from hydrainfer.config import Slo
from hydrainfer.core import ConfigError
from hydrainfer.reports.bench import answer, conclusions, page_of, tables_of, write_files
from hydrainfer.workload.client import Endpoint, Stop
from hydrainfer.workload.measuring import (
    Asked,
    Comparison,
    ComparisonPlan,
    Effort,
    LoadPlan,
    bench,
    command_line,
    read_plan,
)
from hydrainfer.workload.measuring.session import Traffic
from hydrainfer.workload.results import BenchResult
from hydrainfer.workload.sources import Dialogues, Recording, Replay, Workload, read_workload, write_recording
from tests.workload import virtual
from tests.workload.mock import MockServer, Script

pytestmark = pytest.mark.unit

TEXT = Workload(dataset="text", n_pictures=0, output_tokens={"default": "uniform:2:6"})
SMALL = Effort(requests=30, min_s=0.0, unloaded=3, warmup=1, timeout_s=60.0)
SLO = Slo(ttft_s=0.1, tpot_s=0.05)
FAST = Script(ttft_s=0.02, itl_s=0.01)


class Quiet:
    """Shows no progress."""

    def draws(self, n): ...
    def begins(self, server, what, n): ...
    def record(self, record): ...
    def ended(self, server, run): ...


def run(script, load=None, slo=SLO, effort=SMALL, target=None, stop_at=None, workload=TEXT, **server):
    """The result, and what the mock saw. `stop_at`: at that request somebody presses Ctrl-C."""

    async def main():
        clock, stop = asyncio.get_running_loop().time, Stop(5)

        def scripted(i):
            if stop_at == i:
                stop.now("interrupted (test)")
            return script(i) if callable(script) else script

        async with MockServer(scripted, clock=clock, **server) as mock:
            asked = Asked(workload=workload, slo=slo, load=load or LoadPlan(rates=(20.0,)), effort=effort, seed=2)
            at = msgspec.structs.replace(target or Endpoint(base_url=""), base_url=mock.url)
            return await bench(asked, at, Quiet(), stop, clock), mock

    return virtual.run(main())


def test_rates_and_concurrency_and_replay():
    load = LoadPlan(rates=(5.0, 20.0), concurrency=(2,), replay=Replay((0.0, 0.5, 0.7), source="t.csv"))
    result, mock = run(FAST, load)
    assert [r.arrivals for r in result.runs] == ["poisson 5/s", "poisson 20/s", "closed 2", "replay of t.csv × 1"]
    assert all(r.report.n_ok == 30 and r.attainment.met.share == 1.0 for r in result.runs)
    assert len(mock.served) == 1 + 4 + 4 * 30  # probe, warm-up and alone, runs
    texts = [s.body["messages"][0]["content"][-1]["text"] for s in mock.served[5:]]
    assert len({s.seed for s in result.runs}) == 4 and len(set(texts)) > 100
    assert result.servers[0].unloaded.n_warmup == 1 and result.servers[0].facts.model == "mock"
    assert all(r.report.n_count_differs == r.report.n_wrong_length == 0 for r in result.runs)


def test_turns_come_back_after_the_seconds_of_the_workload_at_a_rate():
    talks = Workload(dataset="talks", n_pictures=0, dialogues=Dialogues(turns=2, apart_s=1.0))
    _, mock = run(FAST, LoadPlan(kind="constant", rates=(5.0,)), workload=talks)
    sent = [s.body["messages"] for s in mock.served[5:]]
    assert [len(messages) for messages in sent[:15]] == [1] * 5 + [3] * 5 + [1] * 5
    assert all(later[: len(first)] == first for first, later in zip(sent, sent[5:10]))


def test_the_report_is_whole_and_stands_alone(tmp_path):
    timings = {"e2e_s": 0.04, "ttft_s": 0.02, "encode_queue_s": 0.0, "prefill_s": 0.02, "decode_s": 0.02}
    result, _ = run(Script(ttft_s=0.02, itl_s=0.01, timings=timings), LoadPlan(rates=(5.0, 50.0)))
    paths = write_files(result, tmp_path / "out")
    assert [p.name for p in paths] == ["result.json", "runs.csv", "report.html"]
    assert msgspec.json.decode(paths[0].read_bytes(), type=BenchResult) == result
    assert len(paths[1].read_text().splitlines()) == 3 and "prefill_mean_ms" in paths[1].read_text()
    page = page_of(result)
    assert not re.search(r"""(src|href)\s*=|@import|url\(|<script""", page)
    assert page.count("<svg") >= 5 and "Which stage made requests miss" in page
    assert not re.search(r"\bnan\b", page)  # the page shows the command line, too, so only whole words count
    assert list(tables_of(result)) and result.runs[0].breakdown.mean_s["prefill"] == 0.02


def test_the_command_of_a_result_has_no_key():
    words = ["--api-key", "sk-1", "--rate", "5", "--api-key=sk-$2", "--start", "x=vllm serve m --api-key sk-3"]
    said = command_line(["/bin/hydrainfer", "bench", *words])
    assert said == "hydrainfer bench --api-key … --rate 5 '--api-key=…' --start 'x=vllm serve m --api-key …'"


def test_an_slo_that_no_request_can_meet():
    result, mock = run(Script(ttft_s=0.5), LoadPlan())
    assert not result.runs and not result.goodput and len(mock.served) == 5
    assert page_of(result) and not next(iter(tables_of(result))).row_count
    assert "one request alone misses the SLO: TTFT is 500 ms where the SLO is 100 ms" in conclusions(result)[-1]
    assert "milliseconds" not in conclusions(result)[-1]
    in_seconds, _ = run(Script(ttft_s=0.5), LoadPlan(), slo=Slo(ttft_s=0.002, tpot_s=0.00005))
    assert conclusions(in_seconds)[-1].endswith("(medians); limits of --goodput are in milliseconds")


def test_goodput_is_searched():
    result, _ = run(Script(service_s=0.05, itl_s=0.001), LoadPlan(first_rate=2.0, tolerance=0.2), slots=1)
    found = result.goodput["server"]
    assert 4 < found.rate_per_s < 20 and "goodput" in conclusions(result)[0]
    load = LoadPlan(first_rate=2.0, tolerance=0.2, limit_s=120.0)
    short, _ = run(Script(service_s=0.05, itl_s=0.001), load, slots=1)
    assert 1 < len(short.runs) < len(result.runs) and "would not end within 2 minutes" in short.goodput["server"].note
    assert 4 < short.goodput["server"].rate_per_s < 20


@pytest.fixture
def recorded(tmp_path):
    """A recording of 70 requests."""
    write_recording(tmp_path / "r.jsonl", Recording(dataset="text", chats=tuple(TEXT.chats(70, 1))))
    return read_workload(str(tmp_path / "r.jsonl"))


def test_a_recording_that_is_too_short_ends_no_search(recorded):
    """A second run at a rate needs 100 requests."""
    server = {"slots": 1, "effort": msgspec.structs.replace(SMALL, requests=50), "workload": recorded}
    result, _ = run(Script(service_s=0.05, itl_s=0.001), LoadPlan(first_rate=2.0, tolerance=0.2), **server)
    found = result.goodput["server"]
    assert 2 < found.rate_per_s < 20 and all(r.report.n_ok == 50 for r in result.runs)
    assert "r.jsonl has 70 requests, 100 are needed; record more with `hydrainfer trace --requests`" in found.note


def test_a_load_that_needs_more_requests_is_left_out(recorded):
    effort = msgspec.structs.replace(SMALL, min_s=4.0)
    result, _ = run(FAST, LoadPlan(rates=(10.0, 20.0, 15.0)), effort=effort, workload=recorded)
    assert [r.rate_per_s for r in result.runs] == [10.0, 15.0]
    assert "poisson 20/s was not run" in conclusions(result)[-1] and "80 are needed" in conclusions(result)[-1]
    with pytest.raises(ConfigError, match=r"poisson 20/s was not run: .* record more"):
        run(FAST, LoadPlan(rates=(20.0,)), effort=effort, workload=recorded)
    with pytest.raises(ConfigError, match=r"was not run: .* record more"):
        run(FAST, LoadPlan(), effort=msgspec.structs.replace(SMALL, requests=100), workload=recorded)


def test_a_search_has_no_rounds():
    asked = Asked(workload=TEXT, slo=SLO, runs=3)
    with pytest.raises(ConfigError, match="--runs is for given loads"):
        virtual.run(bench(asked, Endpoint(base_url="http://127.0.0.1:1"), Quiet()))


def test_a_server_that_dies_midway():
    async def main():
        clock = asyncio.get_running_loop().time
        mock = MockServer(lambda i: mock.die() or FAST if i == 20 else FAST, clock=clock)
        async with mock:
            asked = Asked(workload=TEXT, slo=SLO, load=LoadPlan(rates=(20.0, 40.0)), effort=SMALL)
            return await bench(asked, Endpoint(base_url=mock.url), Quiet(), Stop(5), clock)

    result = virtual.run(main())
    assert "the server is gone: 5 requests in a row failed" in result.stopped
    (only,) = result.runs
    assert only.report.n_ok >= 10 and only.report.failures["connection"] >= 5 and only.report.n_unsent > 0
    assert only.attainment.n_failed == only.report.failures["connection"]


def test_interrupted():
    result, mock = run(FAST, LoadPlan(rates=(20.0, 40.0)), stop_at=20)
    (only,) = result.runs
    assert result.stopped == "interrupted (test)" and 0 < only.report.n_ok < 30
    assert only.report.n_requests + only.report.n_cut + only.report.n_unsent == 30 and only.report.n_cut >= 1
    assert only.report.failures == {} and len(mock.served) <= 22


def test_malformed_streams_are_misses_and_the_rest_is_kept():
    result, _ = run(lambda i: Script(garbage_after=1, itl_s=0.01) if i in (10, 11) else FAST)
    (only,) = result.runs
    assert only.report.failures == {"malformed": 2} and only.attainment.met.n_met == 28


@pytest.mark.parametrize(
    ("script", "target", "pages", "said"),
    [
        (FAST, Endpoint(base_url="", model="gpt"), {}, "has no model 'gpt'; it has mock"),
        (Script(status=401, error_body=b'{"error":{"message":"no key"}}'), None, {}, "wants a key"),
        (Script(status=500, error_body=b"oops"), None, {}, "does not answer as an OpenAI-style chat server: 500: oops"),
        (FAST, None, {"/v1/models": "<html>"}, "not a list of models"),
        (FAST, None, {"/v1/models": '{"data":[]}'}, "serves no model"),
        (Script(text=False, token_ids=False), None, {}, "without a single token"),
    ],
)
def test_servers_that_cannot_be_measured(script, target, pages, said):
    with pytest.raises(ConfigError, match=said):
        run(script, target=target, pages=pages)


def test_a_bench_of_a_server_that_does_not_listen_is_refused_with_its_url():
    asked = Asked(workload=TEXT, slo=SLO)
    with pytest.raises(ConfigError, match=r"no server at http://127\.0\.0\.1:1: no connection"):
        virtual.run(bench(asked, Endpoint(base_url="http://127.0.0.1:1"), Quiet()))


@pytest.mark.parametrize("refused", [("timings",), ("ignore_eos", "return_token_ids"), ("stream_options",)])
def test_fields_that_a_server_refuses_are_left_out(refused):
    result, mock = run(Script(ttft_s=0.01, refuses=refused))
    names = {"include_usage" if f == "stream_options" else f for f in refused}
    assert names == set(result.servers[0].facts.refused) and result.runs[0].report.n_ok == 30
    assert not set(refused) & set(mock.served[-1].body)


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (LoadPlan(rates=(0.0,)), "rate must be a positive number"),
        (LoadPlan(kind="weekly", rates=(1.0,)), "no arrivals 'weekly'"),
        (LoadPlan(concurrency=(0,)), "concurrency must be at least 1"),
    ],
)
def test_impossible_loads(load, said):
    with pytest.raises(ConfigError, match=said):
        run(FAST, load)


def test_nothing_asked():
    with pytest.raises(ConfigError, match="give one of --goodput"):
        run(FAST, LoadPlan(), slo=None)


def test_prefix_cache_metrics_of_other_engines_are_read():
    vllm = 'vllm:cache_config_info{block_size="16",enable_prefix_caching="True"} 1.0'
    assert run(FAST, pages={"/metrics": vllm})[0].servers[0].facts.prefix_cache == "on"
    sglang = '{"disable_radix_cache":true}'
    assert run(FAST, pages={"/get_server_info": sglang})[0].servers[0].facts.prefix_cache == "off"
    ours = {
        "/metrics": 'hydrainfer:x{enable_prefix_caching="False"} 1',
        "/v1/instances": '{"data":[{"role":"E"},{"role":"PD"}]}',
    }
    facts = run(FAST, pages=ours)[0].servers[0].facts
    assert facts.instances == ("E", "PD") and facts.prefix_cache == "off" and facts.version == "mock"


def test_compare_gives_all_the_same_traffic():
    async def main():
        clock = asyncio.get_running_loop().time
        slow = Script(service_s=0.06, itl_s=0.01)
        async with MockServer(FAST, clock=clock) as a, MockServer(slow, slots=1, clock=clock) as b:
            servers = [{"name": n, "url": m.url} for n, m in (("a", a), ("b", b))]
            plan = {"servers": servers, "rates": (3.0, 20.0, 40.0), "rounds": 2, "notes": ("said by hand",)}
            comparison = Comparison(
                msgspec.convert(plan, ComparisonPlan), TEXT, SLO, SMALL, Quiet(), lines.append, clock
            )
            return await comparison.run(), a, b

    lines = []
    result, a, b = virtual.run(main())
    assert "".join(r.server for r in result.runs) == "aaabbbbaaa"
    assert len(lines) == 4 and [line.split(": ")[1] for line in lines] == ["a", "b", "b", "a"]
    text = lambda mock: {s.body["messages"][0]["content"][-1]["text"] for s in mock.served}  # noqa: E731
    assert text(b) < text(a)  # the rate above one that was far too much was left out
    assert result.goodput["a"].rate_per_s == 40 and 3 <= result.goodput["b"].rate_per_s < 20
    assert "a carries most: 40 requests/s with 90 % of the requests within TTFT" in answer(result)[0]
    assert "said by hand" in conclusions(result) and json.loads(result.to_json())["servers"][1]["name"] == "b"
    assert page_of(result).count("<svg") >= 5


def compared(plan, script, effort=SMALL, workload=TEXT):
    async def main():
        clock = asyncio.get_running_loop().time
        async with MockServer(lambda i: script(i, mock), clock=clock) as mock:
            given = msgspec.convert({"servers": [{"name": "a", "url": mock.url}], **plan}, ComparisonPlan)
            return await Comparison(given, workload, SLO, effort, Quiet(), lambda _: None, clock).run()

    return virtual.run(main())


def test_a_comparison_has_a_target():
    """Every fourth answer is late."""
    slow = lambda i, _: Script(ttft_s=0.2 if i % 4 == 0 else 0.02, itl_s=0.01)  # noqa: E731
    found = {
        target: compared({"rates": (5.0,), "rounds": 1, "target": target}, slow, SMALL).goodput["a"]
        for target in (0.9, 0.5)
    }
    assert found[0.9].rate_per_s == 0.0 and found[0.5].rate_per_s == 5.0 and found[0.5].target == 0.5
    with pytest.raises(ConfigError, match="0 < target <= 1"):
        compared({"rates": (5.0,), "target": 1.5}, slow)


def test_a_rate_that_needs_more_requests_is_left_out_of_a_comparison(recorded):
    plan = {"rates": (10.0, 20.0), "rounds": 2}
    result = compared(plan, lambda *_: FAST, msgspec.structs.replace(SMALL, min_s=4.0), recorded)
    assert [r.rate_per_s for r in result.runs] == [10.0, 10.0] and not result.servers[0].failed
    (note,) = result.notes
    assert note.startswith("poisson 20/s was not run")


def test_a_run_that_was_cut_is_kept_but_not_judged():
    """The server dies in the run at the second rate, after answers that were all in time."""

    def script(i, mock):
        if i == 60:
            mock.die()
        return FAST

    result = compared({"rates": (10.0, 20.0, 30.0), "rounds": 1}, script, msgspec.structs.replace(SMALL, requests=50))
    assert [run.rate_per_s for run in result.runs] == [10.0, 20.0] and result.runs[1].report.n_unsent > 0
    assert [rate for rate, _ in result.goodput["a"].curve] == [10.0]


def test_traffic_is_kept_as_long_as_there_is_room():
    small = Workload(dataset="small", picture_sizes=((40, 30, 1.0),))
    traffic = Traffic(small, None, max_bytes=20_000)
    first = traffic.of(4, 1)
    assert traffic.of(4, 1) is first and all(
        p.data_url().startswith("data:image/jpeg") for c in first for p in c.pictures
    )
    for seed in range(2, 9):
        traffic.of(4, seed)
    assert traffic.of(4, 1) is not first and traffic.of(4, 1) == first


@pytest.mark.multi
def test_the_loop_goes_on_while_pictures_are_drawn():
    """So Ctrl-C is noticed then, and ends the drawing."""
    traffic = Traffic(Workload(dataset="small", picture_sizes=((40, 30, 1.0),)), None)
    stop, said = [], []

    async def main(seed):
        drawing = asyncio.ensure_future(traffic.ready(64, seed, lambda: bool(stop), said.append))
        n_turns = 0
        while not drawing.done():
            n_turns += 1
            await asyncio.sleep(0.001)
        return n_turns, drawing.result()

    n_turns, chats = asyncio.run(main(1))
    assert n_turns > 10 and said == [64] and chats == traffic.of(64, 1)
    stop.append("Ctrl-C")
    assert asyncio.run(main(2))[1] == [] and asyncio.run(main(1))[1] is chats and said == [64, 64]


def test_a_session_that_is_stopped_before_a_load_has_no_run():
    result, mock = run(FAST, LoadPlan(rates=(5.0, 20.0)), stop_at=0)
    assert result.stopped and not result.runs and len(mock.served) <= 2


def test_a_deployment_that_fails_does_not_end_a_comparison():
    async def main():
        clock = asyncio.get_running_loop().time
        async with MockServer(FAST, clock=clock) as a:
            servers = [{"name": "gone", "url": "http://127.0.0.1:1"}, {"name": "a", "url": a.url}]
            plan = msgspec.convert({"servers": servers, "rates": (20.0,), "rounds": 2}, ComparisonPlan)
            return await Comparison(plan, TEXT, SLO, SMALL, Quiet(), lambda _: None, clock).run()

    result = virtual.run(main())
    assert [r.server for r in result.runs] == ["a", "a"] and result.servers[0].failed.startswith("no server")
    assert "gone could not be measured" in conclusions(result)[0] and page_of(result)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"rates": [1.0]}, "needs --layouts or --server"),
        ({"layouts": ["1EPD"]}, "needs the rates"),
        ({"layouts": ["1EPD", "1EPD"], "rates": [1.0]}, "a name of its own"),
        ({"layouts": ["1E"], "rates": [1.0]}, "no instance that runs prefill or decode"),
        ({"layouts": ["1EPD"], "rates": [0.0]}, "rate must be a positive"),
        ({"layouts": ["1EPD"], "rates": [1.0], "place": {"cores": "9000"}}, "cores 9000 are not there"),
        ({"layouts": ["1EPD"], "rates": [1.0], "place": {"cores": "all"}}, "cores are written"),
        ({"servers": [{"name": "x"}], "rates": [1.0]}, "give one of layout, start and url"),
    ],
)
def test_impossible_comparisons(plan, said):
    with pytest.raises(ConfigError, match=said):
        Comparison(msgspec.convert(plan, ComparisonPlan), TEXT, SLO, SMALL, Quiet(), print)


@pytest.mark.parametrize(
    "text, said",
    [
        ("place: 4", "expected `object`, got `int` - at `$.place`"),
        ("place:", "got `null`"),
        ("rats: [1]", "mean rates"),
    ],
)
def test_a_plan_that_cannot_be_read(tmp_path, text, said):
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(said)):
        read_plan(path, {"place": {"cores": "0"}})
