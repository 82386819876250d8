"""The choice among far clusters, and what is shown beside it."""

import dataclasses
import time

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.prfaas.setting import prfaas
from hydrainfer.planner.clusters import (
    Arrangement,
    TtftLimit,
    all_far,
    break_even,
    choose,
    curves_of,
    deployment_of,
    deployments_of,
    solve,
    throughput,
    worth_of,
)
from tests.planner.clusters.systems import systems, with_link

pytestmark = pytest.mark.unit
FEW = settings(max_examples=15, deadline=None)
ROUNDING = 1e-9
CHEAP_LINK, DEAR_LINK = 0.004, 0.02  # per GB; the far cluster of the paper stops paying at 0.0053


def chosen(clusters, objective="rate", ttft=None, priced=True):
    return choose(clusters, objective, ttft, priced=priced)


def names(candidate):
    return [cluster.name for cluster in candidate.clusters.far]


def with_a_copy(clusters, name, **changes):
    """The system with a second far cluster that is like the first, but for changes."""
    far = msgspec.structs.replace(clusters.far[0], name=name, **changes)
    link = msgspec.structs.replace(clusters.links[0], source=name)
    return dataclasses.replace(clusters, far=(*clusters.far, far), links=(*clusters.links, link))


def test_a_far_cluster_that_pays_is_used_for_the_highest_rate_or_for_the_lowest_cost():
    clusters = prfaas(price_per_gb=CHEAP_LINK)
    fast, cheap = chosen(clusters), chosen(clusters, "cost")
    assert fast.pays and cheap.pays and fast.met
    assert (fast.chosen.answer.arrangement.n_prefill, cheap.chosen.answer.arrangement.n_prefill) == (3, 4)
    assert fast.chosen.throughput.rate > cheap.chosen.throughput.rate
    assert cheap.chosen.throughput.price < fast.chosen.throughput.price < fast.alone.throughput.price


@pytest.mark.parametrize("objective", ["rate", "cost"])
def test_a_link_that_is_too_dear_leaves_home_alone(objective):
    choice = chosen(prfaas(price_per_gb=DEAR_LINK), objective)
    assert choice.pays is False and choice.chosen is choice.alone and choice.met
    assert choice.fastest.throughput.rate > choice.alone.throughput.rate


def test_between_the_two_prices_an_arrangement_that_still_pays_is_chosen():
    """At 0.51 cent a GB, the highest rate costs more than home alone, and a higher threshold does not."""
    choice = chosen(prfaas(price_per_gb=0.0051))
    assert choice.fastest.throughput.price > choice.alone.throughput.price
    assert choice.alone.throughput.price >= choice.chosen.throughput.price
    assert choice.chosen.throughput.rate > choice.cheapest.throughput.rate * (1 - ROUNDING)


def test_a_limit_that_home_alone_does_not_meet_calls_for_a_far_cluster_that_does_not_pay():
    limit = TtftLimit(seconds=8.0)
    choice = chosen(prfaas(price_per_gb=DEAR_LINK), ttft=limit)
    assert not choice.alone.meets(limit) and choice.pays is False
    assert choice.met and choice.chosen is choice.fastest
    assert (
        chosen(prfaas(price_per_gb=DEAR_LINK), "cost", limit).chosen.throughput.price < choice.chosen.throughput.price
    )


def test_a_limit_that_home_alone_does_not_meet_is_no_reason_to_pay_more_than_there():
    clusters = with_a_copy(prfaas(price_per_gb=CHEAP_LINK), "more", price=4.0)
    choice = chosen(clusters, ttft=TtftLimit(seconds=8.0))
    assert choice.pays and not choice.alone.meets(TtftLimit(seconds=8.0))
    assert choice.fastest.throughput.price > choice.alone.throughput.price >= choice.chosen.throughput.price


def test_of_a_limit_that_nothing_meets_the_nearest_is_told():
    choice = chosen(prfaas(), ttft=TtftLimit(seconds=3.0))
    assert not choice.met and names(choice.chosen) == ["far"]
    assert 0.8 < choice.chosen.answer.within < 0.9


def test_without_prices_the_rate_alone_decides():
    assert names(chosen(prfaas(), priced=False).chosen) == ["far"]
    slow = with_link(prfaas(), bytes_per_s=1e5)
    choice = chosen(slow, priced=False)
    assert choice.pays is None and choice.chosen is choice.alone


def test_a_cluster_that_costs_more_than_it_brings_is_left_out():
    clusters = with_a_copy(prfaas(price_per_gb=CHEAP_LINK), "dear", price=25.0)
    assert names(chosen(clusters, "cost").chosen) == names(chosen(clusters).chosen) == ["far"]
    assert names(chosen(clusters).fastest) == ["far", "dear"]
    far, dear = worth_of(clusters, None)
    assert dear.price_per_gb is None
    assert far.price_per_gb == pytest.approx(worth_of(prfaas(), None)[0].price_per_gb)


def test_the_price_from_which_a_far_cluster_stops_paying_is_the_break_even():
    clusters = prfaas()
    alone = solve(clusters.alone).throughput.price
    worth = worth_of(clusters, None)[0]
    assert worth.price_per_gb == pytest.approx(break_even(clusters, alone).price_per_gb)
    assert chosen(with_link(clusters, price_per_gb=worth.price_per_gb * 0.99)).pays
    assert not chosen(with_link(clusters, price_per_gb=worth.price_per_gb * 1.01)).pays


@FEW
@given(systems(most_far=3), st.sampled_from(["rate", "cost"]), st.floats(0.1, 20.0))
def test_a_choice_costs_no_more_than_home_alone_unless_the_limit_calls_for_it(system, objective, seconds):
    limit = TtftLimit(seconds=seconds)
    choice = chosen(system, objective, limit)
    if choice.alone.meets(limit):
        assert choice.met
        assert choice.chosen.throughput.price <= choice.alone.throughput.price * (1 + ROUNDING)
        assert choice.chosen.throughput.rate >= choice.alone.throughput.rate * (1 - ROUNDING)
    if choice.met:
        assert choice.chosen.meets(limit)
    else:
        assert choice.chosen.answer.within >= choice.alone.answer.within


def test_all_far_is_the_paper_s_naive_deployment():
    naive = all_far(prfaas(), TtftLimit(seconds=8.0))
    assert naive.answer.arrangement == Arrangement(threshold=0.0, n_prefill=0, n_decode=8)
    assert naive.throughput.rate == pytest.approx(2.334, abs=0.001) and naive.answer.within == pytest.approx(1.0)


def test_a_deployment_is_told_in_units_of_people():
    clusters = prfaas(price_per_gb=CHEAP_LINK)
    candidate = chosen(clusters).chosen
    row = deployment_of("far prefill", candidate, None, priced=True)
    assert row.cost == pytest.approx(candidate.throughput.price * 1e3)
    assert row.egress_gbps == pytest.approx(row.request_gb * 8 * row.rate)
    assert row.link_share == pytest.approx(row.egress_gbps / 100)
    assert b"queued" not in msgspec.json.encode(row)
    alone = deployment_of("home alone", chosen(clusters).alone, None, priced=False)
    assert (alone.far, alone.threshold, alone.cost) == ((), None, None)


def test_curves_pass_through_the_plan():
    clusters = prfaas(price_per_gb=CHEAP_LINK)
    choice = chosen(clusters)
    best, rate = choice.chosen.answer.arrangement, choice.chosen.throughput.rate
    curves = curves_of(choice, None, worth_of(clusters, None))
    peak = max(curves.thresholds, key=lambda point: point.rate)
    assert peak.threshold == pytest.approx(best.threshold, rel=0.15) and peak.rate <= rate * (1 + ROUNDING)
    for point in curves.thresholds:
        stages = [point.far_prefill, point.link, point.home_prefill, point.decode]
        assert point.rate == min(stage for stage in stages if stage is not None)
    assert curves.splits[best.n_prefill].rate == pytest.approx(rate)
    assert all(point.best_rate >= point.rate * (1 - ROUNDING) for point in (*curves.splits, *curves.links))
    assert max(point.best_rate for point in curves.links) == pytest.approx(rate)
    cheapest = solve(clusters, objective="cost").throughput
    at_price = min(point.device_cost + point.thousand_gb * CHEAP_LINK for point in curves.prices)
    assert at_price == pytest.approx(cheapest.price * 1e3, rel=1e-3)


@FEW
@given(systems(most_far=2), st.sampled_from(["rate", "cost"]), st.floats(0.1, 20.0), st.booleans())
def test_the_deployments_have_what_their_plan_refers_to(system, objective, seconds, priced):
    limit = TtftLimit(seconds=seconds)
    choice = choose(system, objective, limit, priced=priced)
    rows = {row.name: row for row in deployments_of(system, choice, limit, priced=priced)}
    assert {"home alone", "all prefill far"} <= rows.keys()
    assert next(iter(rows)) == ("home alone" if choice.chosen is choice.alone else "far prefill")
    curves = curves_of(choice, limit, ())
    if curves is not None:
        assert curves.of in rows
    else:
        assert choice.chosen is choice.alone and choice.fastest is None


def test_a_whole_choice_among_four_far_clusters_takes_seconds():
    clusters = prfaas(price_per_gb=CHEAP_LINK)
    for i in range(3):
        clusters = with_a_copy(clusters, f"copy {i}", price=2.5 + i)
    start_s = time.process_time()
    choice = chosen(clusters)
    worth_of(clusters, None)
    assert time.process_time() - start_s < 20.0
    assert choice.chosen.throughput.rate == pytest.approx(
        throughput(choice.chosen.clusters, choice.chosen.answer.arrangement).rate
    )
    assert np.isfinite(choice.chosen.throughput.price)
