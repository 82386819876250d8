"""Properties of the best arrangement."""

import dataclasses
import time

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydrainfer.planner.clusters import (
    Arrangement,
    Lengths,
    TtftLimit,
    break_even,
    log_normal,
    prefill_seconds,
    solve,
    throughput,
)
from tests.planner.clusters.systems import hand, systems, with_far, with_home, with_link

pytestmark = pytest.mark.unit

SMALL = settings(max_examples=40, deadline=None)
ROUNDING = 1e-9
STEPS = 60


@SMALL
@given(systems(most_far=3), st.sampled_from(["mean_time", "mean_length"]))
def test_more_devices_bandwidth_or_looser_limits_never_carry_less(system, service):
    def rate(clusters):
        return solve(clusters, service=service, n_thresholds=STEPS).throughput.rate

    least = rate(system) * (1 - ROUNDING)
    assert rate(with_home(system, instances=system.home.instances + 1)) >= least
    for i, (far, link) in enumerate(zip(system.far, system.links, strict=True)):
        assert rate(with_far(system, i, instances=far.instances + 1)) >= least
        assert rate(with_link(system, i, bytes_per_s=link.bytes_per_s * 1.3)) >= least
        assert rate(with_link(system, i, max_share=1.0)) >= least
    assert rate(with_home(system, decodes_per_s=system.home.decodes_per_s * 1.3)) >= least


@SMALL
@given(systems(most_far=3), st.floats(0.0, 2e5), st.data())
def test_an_arrangement_carries_no_less_on_a_better_system(system, threshold, data):
    n_prefill = data.draw(st.integers(0, system.home.instances))
    split = Arrangement(threshold=threshold, n_prefill=n_prefill, n_decode=system.home.instances - n_prefill)
    least = throughput(system, split).rate * (1 - ROUNDING)
    for i, (far, link) in enumerate(zip(system.far, system.links, strict=True)):
        assert throughput(with_far(system, i, instances=far.instances + 1), split).rate >= least
        assert throughput(with_link(system, i, bytes_per_s=link.bytes_per_s * 2), split).rate >= least


@SMALL
@given(systems(most_far=3))
def test_a_far_cluster_never_lowers_the_rate_of_the_others(system):
    alone = solve(system.alone, n_thresholds=STEPS).throughput.rate
    first = solve(system.with_far(["far 0"]), n_thresholds=STEPS).throughput.rate
    assert first >= alone * (1 - ROUNDING)
    assert solve(system, n_thresholds=STEPS).throughput.rate >= first * (1 - ROUNDING)


@SMALL
@given(systems(most_far=3), st.floats(0.0, 2e5), st.sampled_from(["mean_time", "mean_length"]))
def test_far_clusters_are_equally_busy(system, threshold, service):
    """Each is as busy as all: its share of the long prompts is that of what it could prefill and send."""
    found = throughput(system, Arrangement(threshold=threshold, n_prefill=1, n_decode=1), service)
    assert sum(use.share for use in found.far) == pytest.approx(found.far_share)
    assert sum(use.egress_bytes_per_s for use in found.far) == pytest.approx(found.egress_bytes_per_s)
    for use in found.far:
        assert use.share * found.far_per_s == pytest.approx(use.per_s * found.far_share)


@SMALL
@given(systems())
def test_two_halves_of_a_far_cluster_carry_what_the_whole_does(system):
    far, link = system.far[0], system.links[0]
    half, halfs_link = msgspec.structs.replace(far, name="half"), msgspec.structs.replace(link, source="half")
    halves = dataclasses.replace(system, far=(far, half), links=(link, halfs_link))
    whole = with_link(with_far(system, instances=2 * far.instances), bytes_per_s=2 * link.bytes_per_s)
    two, one = solve(halves, n_thresholds=STEPS), solve(whole, n_thresholds=STEPS)
    assert two.throughput.rate == pytest.approx(one.throughput.rate)
    assert two.throughput.price == pytest.approx(one.throughput.price)


@SMALL
@given(systems(most_far=3), st.floats(0.05, 20.0), st.floats(0.5, 1.0))
def test_a_limit_of_the_ttft_is_met_if_it_can_be_and_a_looser_one_carries_no_less(system, seconds, share):
    limit = TtftLimit(seconds=seconds, share=share)
    best = solve(system, ttft=limit, n_thresholds=STEPS)
    least = solve(system, ttft=TtftLimit(seconds=seconds, share=1.0), n_thresholds=STEPS)
    assert best.within >= share or best.within == least.within
    looser = solve(system, ttft=TtftLimit(seconds=seconds * 1.5, share=share), n_thresholds=STEPS)
    if best.within >= share:
        assert looser.throughput.rate >= best.throughput.rate * (1 - ROUNDING)
    seconds = prefill_seconds(system, best.arrangement.threshold)
    if share >= 0.9 and best.within >= share + ROUNDING:
        assert seconds.p90 <= limit.seconds * (1 + ROUNDING)


def smooth(system):
    """The system with lengths in many small pieces, so that a step of the threshold moves few requests."""
    return dataclasses.replace(system, lengths=Lengths.of(list(np.geomspace(200, 200000, 800))))


@SMALL
@given(systems())
def test_at_the_optimum_both_prefill_stages_are_equally_busy_within_a_step(system):
    """Equation 7: with a lower threshold the far cluster (or its link) is the slower of the two, with a higher one home
    is, unless decoding limits, or one of the two takes all."""
    system = smooth(system)
    best = solve(system, n_thresholds=STEPS)
    step = (system.lengths.longest / system.lengths.shortest) ** (1 / (STEPS - 1))
    if best.throughput.limit == "decode":
        return

    def rates(threshold):
        found = throughput(
            system,
            Arrangement(threshold=threshold, n_prefill=best.arrangement.n_prefill, n_decode=best.arrangement.n_decode),
        )
        far = found.far_per_s / found.far_share if found.far_per_s is not None else float("inf")
        home = found.home_per_s / (1 - found.far_share) if found.home_per_s is not None else float("inf")
        return far, home

    t = max(best.arrangement.threshold, system.lengths.shortest)
    far, home = rates(t / step**1.01)
    assert far <= home * (1 + 1e-6)
    far, home = rates(t * step**1.01)
    assert home <= far * (1 + 1e-6)


@SMALL
@given(systems())
def test_at_the_optimum_one_instance_more_on_either_side_would_be_idle(system):
    """Equation 8: with one P more, home decodes no faster than all prefill; with one P less, it is the other way."""
    system = smooth(system)
    best = solve(system, n_thresholds=STEPS)
    n = best.arrangement.n_prefill

    def of_split(n_prefill):
        """The best rate of prefill alone, and of decoding alone, with so many P."""
        n_decode = system.home.instances - n_prefill
        decode = n_decode * system.home.decodes_per_s
        quick = with_home(system, decodes_per_s=1e9, instances=n_prefill + 1)
        return solve(quick, n_thresholds=STEPS).throughput.rate, decode

    if n < system.home.instances:
        prefill, decode = of_split(n + 1)
        assert decode <= prefill or prefill <= best.throughput.rate * (1 + ROUNDING)
    if n > 0:
        prefill, decode = of_split(n - 1)
        assert prefill <= decode or decode <= best.throughput.rate * (1 + ROUNDING)


@SMALL
@given(systems())
def test_no_other_arrangement_of_the_grid_costs_less(system):
    cheapest = solve(system, objective="cost", n_thresholds=STEPS).throughput.price
    fastest = solve(system, n_thresholds=STEPS).throughput.price
    assert cheapest <= fastest * (1 + ROUNDING)


@SMALL
@given(systems(most_far=3), st.floats(1e-5, 1e-2))
def test_a_far_cluster_stops_paying_at_the_break_even_price(system, other_price):
    even = break_even(system, other_price, n_thresholds=STEPS)
    if even is None:
        free = solve(with_link(system, price_per_gb=0.0), objective="cost", n_thresholds=STEPS).throughput
        assert free.far_share == 0.0 or free.price >= other_price * (1 - ROUNDING)
        return
    at_price = throughput(with_link(system, price_per_gb=even.price_per_gb), even.arrangement)
    assert at_price.far_share > 0.0 and at_price.price == pytest.approx(other_price)
    dearer = with_link(system, price_per_gb=even.price_per_gb * 1.01 + 1e-9)
    best = solve(dearer, objective="cost", n_thresholds=STEPS).throughput
    assert best.far_share == 0.0 or best.price >= other_price * (1 - ROUNDING)


def test_equally_good_arrangements_send_as_little_as_possible():
    """Three D limit, whatever the threshold within bounds: one that is a step higher would limit more."""
    system = with_far(with_home(hand(), decodes_per_s=0.3), instances=1)
    system = dataclasses.replace(system, lengths=log_normal(9.0, 1.0, 128, 131072))
    best = solve(system)
    assert best.throughput.limit == "decode" and best.arrangement.n_prefill == 1
    higher = msgspec.structs.replace(best.arrangement, threshold=best.arrangement.threshold * 1.01)
    lower = msgspec.structs.replace(best.arrangement, threshold=best.arrangement.threshold / 1.01)
    assert throughput(system, higher).rate < best.throughput.rate == throughput(system, lower).rate


def test_a_scarce_link_raises_the_threshold():
    system = dataclasses.replace(hand(), lengths=log_normal(9.0, 1.0, 128, 131072))
    thresholds = [solve(with_link(system, bytes_per_s=rate)).arrangement.threshold for rate in (1e10, 3e8, 3e7)]
    assert thresholds == sorted(thresholds) and thresholds[0] < thresholds[-1]


def test_a_search_takes_less_than_a_second():
    system = dataclasses.replace(hand(), lengths=log_normal(9.0, 1.0, 128, 131072))
    start_s = time.process_time()
    solve(system)
    assert time.process_time() - start_s < 1.0
