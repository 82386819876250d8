"""The throughput model beside the production schedulers on a virtual clock."""

import msgspec
import numpy as np
import pytest

from hydrainfer.core import ConfigError
from hydrainfer.planner.clusters import Arrangement, Lengths, Setup, Times, TimesPoint, simulate, throughput, trace_at
from hydrainfer.planner.clusters.device import MeasuredCost, TableCaches
from hydrainfer.scheduler import Policy
from tests.planner.clusters.systems import hand, with_home, with_link

pytestmark = pytest.mark.unit
SATURATED = Setup(batch=8, n_output=8, policy=Policy(order="fcfs"), adapts=False)
LINE = Times(points=tuple(TimesPoint(n, 5e6 + 2e3 * n, 0.1 + n / 1e4) for n in (1000.0, 10_000.0, 200_000.0)))


def served(clusters, arrangement, setup=SATURATED, n=300, load=1.02):
    """At slightly more than the rate that the model allows: what is not the limit serves no more than that."""
    rate = load * throughput(clusters, arrangement).rate
    return simulate(clusters, arrangement, setup, trace_at(clusters.lengths, setup.n_output, rate, n, even=True))


@pytest.mark.parametrize(
    ("arrangement", "gbps"),
    [
        (Arrangement(threshold=5000, n_prefill=1, n_decode=3), 80),  # far prefill limits
        (Arrangement(threshold=5000, n_prefill=1, n_decode=3), 2),  # the link
        (Arrangement(threshold=200_000, n_prefill=3, n_decode=1), 80),  # home prefill
        (Arrangement(threshold=0, n_prefill=0, n_decode=4), 80),  # all far
    ],
)
def test_what_is_served_at_most_is_what_the_model_says(arrangement, gbps):
    clusters = with_link(hand(), bytes_per_s=gbps * 1e9 / 8)
    run = served(clusters, arrangement)
    fluid = throughput(clusters, arrangement)
    assert run.rate() == pytest.approx(fluid.rate, rel=0.05)
    if arrangement.n_prefill:
        assert run.n_prefilled["far"] / len(run.served) == pytest.approx(fluid.far_share, abs=0.02)
    assert run.sent_bytes / len(run.served) == pytest.approx(fluid.bytes_per_request, rel=0.1)


def test_what_crosses_a_slow_link_holds_no_place_where_it_is_decoded():
    clusters = with_link(with_home(hand(), decodes_per_s=0.08), bytes_per_s=2e8)
    arrangement = Arrangement(threshold=5000, n_prefill=1, n_decode=3)
    setup = msgspec.structs.replace(SATURATED, batch=2)
    with_host, without = (
        served(clusters, arrangement, msgspec.structs.replace(setup, host_bytes=n_bytes), n=150, load=1.3).rate()
        for n_bytes in (256e9, 0.0)
    )
    assert without < 0.9 * with_host


def test_a_chunk_takes_its_part_of_a_prompt_but_no_less_than_a_prompt_of_its_length():
    cost = MeasuredCost(encode_image_s=0.0, step_base_s=0.01, prefill_token_s=0.0, decode_token_s=0.0, times=LINE)
    whole = cost._chunk_s(0, 10_000)
    assert whole == pytest.approx(float(LINE.prefill_s(10_000)))
    assert cost._chunk_s(10_000, 10_000) == pytest.approx(float(LINE.prefill_s(10_000)))
    assert cost._chunk_s(100_000, 50_000) == pytest.approx(
        max(float(LINE.prefill_s(50_000)), float(LINE.prefill_s(150_000) - LINE.prefill_s(100_000)))
    )


def test_caches_have_the_bytes_of_the_table():
    caches = TableCaches.of(LINE, Lengths.of([1000.0, 200_000.0]))
    assert caches == pytest.approx((2e3, 5e6))
    blocks = caches.blocks(10e9, usual=30_000, longest=200_000)
    assert [spec.name for spec in blocks] == ["kv", "state"]
    assert sum(n * spec.block_bytes for spec, n in blocks.items()) <= 10e9
    with pytest.raises(ConfigError, match="but the longest request has 200000"):
        caches.blocks(1e8, usual=30_000, longest=200_000)


def test_lengths_and_arrivals_of_a_trace():
    lengths = hand().lengths
    trace = trace_at(lengths, 8, 10.0, 2000, seed=3)
    assert {t.n_text for t in trace} == {1000, 100_000}
    assert trace[-1].arrival_s == pytest.approx(200.0, rel=0.1)
    even = [t.n_text for t in trace_at(lengths, 8, 10.0, 100, even=True)]
    assert all(abs(even[i : i + 10].count(1000) - 5) <= 1 for i in range(90))
    assert trace_at(lengths, 8, 10.0, 50, seed=3) == trace_at(lengths, 8, 10.0, 50, seed=3)


def test_the_threshold_rises_while_the_link_is_slow_and_comes_back():
    clusters = hand()
    arrangement = Arrangement(threshold=5000, n_prefill=2, n_decode=2)
    rates = {"far": ((0.0, 1e10), (60.0, 1e8), (120.0, 1e10))}
    setup = Setup(batch=8, n_output=8, rates=rates)
    run = simulate(clusters, arrangement, setup, trace_at(clusters.lengths, 8, 0.3, 70))
    times_s = np.array([at_s for at_s, _ in run.thresholds])
    assert run.thresholds[0] == (0.0, {"far": 5000.0}) and np.all(times_s[1:] > 60.0)
    assert max(threshold["far"] for _, threshold in run.thresholds) > 6000.0
    assert run.thresholds[-1][1] == {"far": 5000.0}
