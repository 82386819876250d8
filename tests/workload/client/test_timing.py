"""Against a mock with set latencies, the reported numbers are what the mock did."""

import asyncio
import statistics
import time

import pytest

from hydrainfer.core import ConfigError
from hydrainfer.workload.client import Endpoint, run_load
from hydrainfer.workload.results import report_of
from hydrainfer.workload.sources import ChatRequest, Closed, Constant, Poisson, due_times_s
from tests.workload import virtual
from tests.workload.mock import MockServer, Script

pytestmark = pytest.mark.unit

SLACK_S = 0.02  # of a median: one turn of a loop that client and mock share, on a busy machine


def chats(n, max_tokens=4):
    return [ChatRequest(text=f"{i}", max_tokens=max_tokens) for i in range(n)]


async def load(script, n, arrivals, max_tokens=4, clock=time.perf_counter, **options):
    async with MockServer(script, clock=clock) as server:
        target = Endpoint(base_url=server.url, model="m")
        result = await run_load(target, chats(n, max_tokens), arrivals, clock=clock, **options)
    return server, result


def load_in_virtual_time(*args, **options):
    async def main():
        return await load(*args, clock=asyncio.get_running_loop().time, **options)

    return virtual.run(main())


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"fragment": True},
        {"crlf": True},
        {"role_first": False},
        {"token_ids": False},
        {"text": False},
        {"usage": False},
        {"tokens_per_chunk": 2},
    ],
    ids=str,
)
async def test_times_are_those_of_the_mock(shape):
    server, result = await load(Script(ttft_s=0.03, itl_s=0.01, **shape), 4, Closed(1))
    delays = []
    for served, record in zip(server.served, result.records, strict=True):
        assert record.ok, record.failure
        assert len(record.chunk_s) == len(served.token_s)
        assert record.ttft_s >= served.token_s[0] - served.received_s >= 0.03  # the role-only chunk was not a token
        did = [b - a for a, b in zip(served.token_s, served.token_s[1:], strict=False)]
        delays += [abs(got - was) for got, was in zip(record.itl_s, did, strict=True)]
        delays.append(record.ttft_s - (served.token_s[0] - served.received_s))
        delays.append(abs(record.e2e_s - (served.end_s - served.received_s)))
    assert statistics.median(delays) < SLACK_S
    report = report_of(result)
    assert report.n_ok == 4 and report.n_wrong_length == report.n_count_differs == 0
    if shape.get("token_ids", True):
        assert [list(r.token_ids) for r in result.records] == [s.token_ids for s in server.served]
    else:
        assert all(r.token_ids is None for r in result.records)


def test_percentiles_of_set_latencies():
    """Ten requests with TTFTs of 10, 20, ..., 100 ms at once: p50 is 55 ms, p90 91 ms."""
    _server, result = load_in_virtual_time(lambda i: Script(ttft_s=0.01 * (i + 1)), 10, Closed(10), max_tokens=1)
    report = report_of(result)
    assert report.ttft_s.p50 == pytest.approx(0.055)
    assert report.ttft_s.p90 == pytest.approx(0.091)
    assert report.tpot_s is None and report.itl_s is None
    assert report.n_output_tokens == 10


def test_unequal_gaps():
    _, result = load_in_virtual_time(Script(itl_s=(0.0, 0.09, 0.0)), 1, Closed(1))
    (record,) = result.records
    assert record.itl_s == pytest.approx([0.0, 0.09, 0.0])
    assert record.tpot_s == pytest.approx(0.03)


@pytest.mark.parametrize("arrivals", [Constant(50.0), Poisson(50.0)])
def test_open_loop_does_not_wait_for_answers(arrivals):
    server, result = load_in_virtual_time(Script(ttft_s=0.3), 10, arrivals, max_tokens=1, seed=5)
    due = due_times_s(arrivals, 10, seed=5)
    assert [r.scheduled_s for r in result.records] == pytest.approx(due)
    came = [s.received_s - server.served[0].received_s for s in server.served]
    assert came == pytest.approx([due_s - due[0] for due_s in due])
    assert server.n_connections == 10  # none had ended when the last was sent
    late = report_of(result).late_s
    assert late.n == 10 and late.max == pytest.approx(0.0)


async def test_lateness_is_reported():
    """Something blocks the client for 200 ms: all that was due meanwhile is late, and says so."""
    blocked = False

    def block(_):
        nonlocal blocked
        if not blocked:
            blocked = True
            time.sleep(0.2)

    _, result = await load(Script(), 20, Constant(100.0), max_tokens=1, on_record=block)
    late = report_of(result).late_s
    assert late.max >= 0.15 and late.p50 > 0.05


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_closed_loop_keeps_its_concurrency(concurrency):
    server, result = await load(Script(ttft_s=0.01), 9, Closed(concurrency), max_tokens=2)
    events = sorted([(r.sent_s, 1) for r in result.records] + [(r.end_s, -1) for r in result.records])
    level = peak = 0
    for _, step in events:
        level += step
        peak = max(peak, level)
    assert peak == concurrency
    assert server.n_connections == concurrency  # kept alive
    assert [r.index for r in result.records] == list(range(9))


def test_warm_up_is_excluded_and_reported():
    script = lambda i: Script(ttft_s=0.1 if i < 2 else 0.01)  # noqa: E731
    server, result = load_in_virtual_time(script, 6, Closed(2), n_warmup=2)
    report = report_of(result)
    assert (report.n_requests, report.n_warmup) == (4, 2)
    assert (report.ttft_s.max, report.warmup_ttft_s.p50) == pytest.approx((0.01, 0.1))
    assert max(s.end_s for s in server.served[:2]) <= min(s.received_s for s in server.served[2:])
    assert [s.body["messages"][0]["content"][-1]["text"] for s in server.served[2:]] == list("2345")


async def test_warm_up_must_leave_something():
    with pytest.raises(ConfigError):
        await run_load(Endpoint(base_url="http://127.0.0.1:1"), chats(2), Closed(1), n_warmup=2)


async def test_records_come_as_they_end():
    seen = []
    await load(lambda i: Script(ttft_s=0.1 if i == 0 else 0.0), 3, Closed(3), on_record=lambda r: seen.append(r.index))
    assert sorted(seen) == [0, 1, 2] and seen[-1] == 0


async def test_cancelling_a_load_leaves_no_task():
    async with MockServer(Script(ttft_s=30.0)) as server:
        task = asyncio.create_task(run_load(Endpoint(base_url=server.url), chats(3), Closed(3)))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(asyncio.all_tasks()) <= 1 + 3  # this one, and the mock's three
