"""Client, records, percentiles, attainment and goodput together against a mock server whose answers are known in closed
form. Time is virtual, so that a seed decides everything and nothing depends on how busy the machine is."""

import asyncio
import math
import random

import pytest

from hydrainfer.config import Slo
from hydrainfer.judging import Search
from hydrainfer.workload.client import Endpoint, run_load
from hydrainfer.workload.results import report_of, series_of
from hydrainfer.workload.results.judged import attainment_of
from hydrainfer.workload.sources import ChatRequest, Closed, Constant, Gamma, Poisson, Replay, Spread
from tests.workload import virtual
from tests.workload.mock import MockServer, Script, drawn

pytestmark = pytest.mark.unit


async def load(script, n, arrivals, max_tokens=6, seed=1, **options):
    clock = asyncio.get_running_loop().time
    async with MockServer(script, clock=clock, **options) as server:
        chats = [ChatRequest(text="x", max_tokens=max_tokens)] * n
        return await run_load(Endpoint(base_url=server.url, model="m"), chats, arrivals, seed=seed, clock=clock)


def inside(value, interval):
    low, high = interval
    return (low is None or low <= value) and (high is None or value <= high)


@pytest.mark.parametrize("kind", ["exponential:0.2", "lognormal:0.2:0.6", "uniform:0.1:0.5"])
def test_percentiles_are_those_of_the_distribution(kind):
    spread = Spread.parse(kind)
    result = virtual.run(load(drawn(Spread(), spread, Spread.parse("uniform:0.01:0.05"), seed=3), 1200, Poisson(50.0)))
    report = report_of(result)
    assert report.n_ok == 1200 and report.n_wrong_length == report.n_count_differs == 0
    for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        assert inside(spread.quantile(q), report.ttft_s.intervals[name]), name
        assert inside(0.01 + q * 0.04, report.itl_s.intervals[name]), name
    assert report.late_s.max < 1e-6 and report.tpot_s.mean == pytest.approx(0.03, rel=0.02)


def test_attainment_is_that_of_the_distribution():
    """Five intervals of which 90 % must be short: all five. TTFT and intervals are independent."""
    ttft, gap = Spread.parse("exponential:0.1"), Spread.parse("uniform:0:0.1")
    slo = Slo(ttft_s=0.3, tpot_s=0.098)
    result = virtual.run(load(drawn(Spread(), ttft, gap, seed=5), 1500, Poisson(100.0)))
    found = attainment_of(result.records, slo)
    by_ttft, by_tpot = ttft.below(0.3), gap.below(0.098) ** 5
    assert inside(by_ttft, found.ttft[3:]) and inside(by_tpot, found.tpot[3:])
    assert inside(by_ttft * by_tpot, found.met[3:]) and found.met.n == 1500


@pytest.mark.parametrize("slo", [Slo(e2e_s=0.5), Slo(ttft_s=3.0, e2e_s=0.5)])
def test_the_first_token_has_what_answers_leave_of_an_e2e_limit(slo):
    result = virtual.run(load(Script(ttft_s=0.1, itl_s=0.02), 20, Poisson(5.0)))
    assert series_of(result.records, slo).limit_s == pytest.approx(0.4)


def test_nine_of_ten_intervals_are_enough():
    slo = Slo(tpot_s=0.05)
    gaps = lambda i: Script(itl_s=(*(0.2,) * (1 + (i >= 5)), *(0.01,) * 30))  # noqa: E731
    result = virtual.run(load(gaps, 10, Closed(1), max_tokens=11))
    assert attainment_of(result.records, slo).met.n_met == 5


def queue(seed):
    """One slot, exponential service of 20 ms on average: M/M/1 with Poisson arrivals."""
    rng = random.Random(1000 + seed)  # not the stream that draws the arrivals
    return lambda _: Script(service_s=rng.expovariate(50.0))


def test_goodput_of_a_queue():
    """M/M/1: the time in the system is exponential with rate mu - lambda, so that goodput under a TTFT of s is
    mu - ln(10) / s: 26.97 per second here."""
    slo = Slo(ttft_s=0.1)
    search, n = Search(10.0, tolerance=0.1, max_runs=2), 0
    while (ask := search.next()) is not None:
        n += 1
        result = virtual.run(load(queue(n), 250 * ask.times, Poisson(ask.rate), max_tokens=1, seed=n, slots=1))
        search.tell(ask.rate, series_of(result.records, slo))
    goodput, analytic = search.result(), 50 - math.log(10) / 0.1
    assert goodput.low <= analytic <= goodput.high
    assert goodput.rate_per_s == pytest.approx(analytic, rel=0.2)


@pytest.mark.parametrize("arrivals", [Constant(10.0), Gamma(10.0, 0.25), Replay((5.0, 5.1, 7.0), speed=2.0)])
def test_requests_leave_when_they_are_due(arrivals):
    result = virtual.run(load(Script(ttft_s=9.0), 30, arrivals))
    assert max(abs(r.late_s) for r in result.records) < 1e-6


def test_failures_are_misses():
    slow_or_failed = {1: Script(status=503), 2: Script(cut_after=1), 3: Script(garbage_after=2), 4: Script(ttft_s=1.0)}
    result = virtual.run(load(lambda i: slow_or_failed.get(i, Script()), 10, Closed(1)))
    found = attainment_of(result.records, Slo(ttft_s=0.5))
    assert (found.met.n_met, found.met.n, found.n_failed) == (6, 10, 3)
