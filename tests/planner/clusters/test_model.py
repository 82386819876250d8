"""Equations 2 to 6, on systems small enough to do by hand."""

import dataclasses

import pytest

from hydrainfer.core import ConfigError
from hydrainfer.planner.clusters import (
    Arrangement,
    Cluster,
    ClusterLink,
    Clusters,
    Lengths,
    decodes_per_s,
    egress_bytes_per_s,
    prefill_seconds,
    throughput,
)
from tests.planner.clusters.systems import FAST, SLOW, hand, with_link

pytestmark = pytest.mark.unit

SPLIT = Arrangement(threshold=50000, n_prefill=1, n_decode=3)


def test_long_prompts_go_far_and_the_slowest_stage_limits_all():
    """Half of the requests take 5 s of two instances, half 0.5 s of one; three D decode 3 per second."""
    found = throughput(hand(), SPLIT)
    assert (found.far_share, found.far_tokens, found.home_tokens) == pytest.approx((0.5, 100000, 1000))
    assert (found.far_per_s, found.home_per_s, found.decode_per_s) == pytest.approx((2 / 5.0, 1 / 0.5, 3.0))
    assert found.rate == pytest.approx(0.8) and found.limit == "far prefill"


def test_a_slow_link_limits_the_far_cluster():
    found = throughput(with_link(hand(), bytes_per_s=1e9, max_share=0.5), SPLIT)
    assert found.limit == "link" and found.far_per_s == pytest.approx(0.5e9 / 2e9)
    assert found.rate == pytest.approx(0.5) and found.egress_bytes_per_s == pytest.approx(0.5e9)
    assert found.link_share == pytest.approx(0.5)


def test_a_request_costs_all_devices_and_what_it_sends():
    """8 + 4 x 3 an hour for 0.8 requests/s, and every second request sends 2 GB."""
    found = throughput(hand(), SPLIT)
    assert found.device_price == pytest.approx((4 * 2 * 1.0 + 2 * 2 * 3.0) / 3600 / 0.8)
    assert found.link_price == pytest.approx(1.0 * 0.5)
    assert found.price == found.device_price + found.link_price


def test_a_cluster_that_gets_no_requests_has_no_rate():
    all_far = throughput(hand(), Arrangement(threshold=0, n_prefill=0, n_decode=4))
    assert all_far.home_per_s is None and all_far.far_share == 1.0
    none_far = throughput(hand(), Arrangement(threshold=100000, n_prefill=2, n_decode=2))
    assert none_far.far_per_s is None and none_far.egress_bytes_per_s == 0.0 and none_far.limit == "home prefill"


def test_requests_for_which_nobody_prefills_are_not_served():
    found = throughput(hand(), Arrangement(threshold=50000, n_prefill=0, n_decode=4))
    assert found.rate == 0.0 and found.limit == "home prefill"


def test_home_alone_serves_all_whatever_the_threshold():
    alone = hand().alone
    found = throughput(alone, Arrangement(threshold=0, n_prefill=2, n_decode=2))
    assert found.rate == pytest.approx(2 / (0.5 * (0.5 + 20.0))) and found.link_price == 0.0


def test_the_paper_s_rate_is_that_of_a_prompt_of_mean_length():
    """T(5,500) = 0.5 x 5.5 ^ 0.602 on the slow cluster, E[T] = 1.25 s."""
    home = Cluster(name="home", times=SLOW, instances=2, decodes_per_s=9.0)
    alone = Clusters(home=home, lengths=Lengths.of([1000, 10000]))
    split = Arrangement(threshold=0, n_prefill=1, n_decode=1)
    assert throughput(alone, split).rate == pytest.approx(1 / 1.25)
    assert throughput(alone, split, "mean_length").rate == pytest.approx(1 / float(SLOW.prefill_s(5500)))


def test_a_throughput_says_for_how_many_requests_it_had_to_guess():
    """One is shorter than all points of home, one longer than all of the far cluster; a third is long, but measured."""
    system = dataclasses.replace(hand(), lengths=Lengths.of([999, 5000, 90000, 100001]))
    assert throughput(system, SPLIT).guessed_share == pytest.approx(0.5)
    assert throughput(hand(), SPLIT).guessed_share == 0.0


def test_a_cluster_sends_what_it_fills_its_caches_with():
    far = Cluster(name="far", times=FAST, instances=64)
    assert egress_bytes_per_s(far, Lengths.of([100000])) == pytest.approx(64 * 2e9 / 5.0)
    assert egress_bytes_per_s(far, Lengths.of([1000, 100000])) == pytest.approx(64 * 2.1e9 / 5.5)


def test_prefill_seconds_are_those_of_the_cluster_where_a_prompt_goes():
    seconds = prefill_seconds(hand(), 50000)
    assert (seconds.mean, seconds.p90) == pytest.approx((2.75, 5.0))
    seconds = prefill_seconds(hand().alone, 50000)
    assert (seconds.mean, seconds.p90) == pytest.approx((10.25, 20.0))


def test_an_instance_decodes_its_batch_over_the_time_of_an_answer():
    assert decodes_per_s(batch=20, step_s=0.025, n_output=1024) == pytest.approx(20 * 40 / 1024)


def two_far() -> Clusters:
    """The system by hand, with a second far cluster that is as slow as home and has a slow, dear link."""
    near = Cluster(name="near", times=SLOW, instances=4, price=0.5)
    link = ClusterLink(source="near", target="home", bytes_per_s=2e8, latency_s=0.5, price_per_gb=2.0)
    return dataclasses.replace(hand(), far=(near, *hand().far), links=(*hand().links, link))


def test_far_clusters_get_what_they_can_prefill_and_send():
    """The fast one prefills 2 / 5 per second; the other could prefill 4 / 20, but sends no more than 1 / 10."""
    found = throughput(two_far(), SPLIT)
    near, far = found.far
    assert (near.per_s, near.limit) == (pytest.approx(0.1), "link")
    assert (far.per_s, far.limit) == (pytest.approx(0.4), "far prefill")
    assert found.rate == pytest.approx(1.0) and found.far_per_s == pytest.approx(0.5)
    assert (near.share, far.share) == pytest.approx((0.1, 0.4))
    assert (near.egress_bytes_per_s, far.egress_bytes_per_s) == pytest.approx((2e8, 8e8))
    assert (near.link_share, far.link_share, found.link_share) == pytest.approx((1.0, 0.08, 1.0))
    assert found.link_price == pytest.approx(0.1 * 2.0 * 2.0 + 0.4 * 2.0 * 0.5)
    assert found.device_price == pytest.approx((8 * 1.0 + 4 * 3.0 + 4 * 0.5) / 3600 / 1.0)


def test_a_first_token_crosses_the_link_and_so_does_its_request():
    seconds = prefill_seconds(two_far(), 50000)
    assert seconds.p90 == pytest.approx(5.0)
    assert seconds.mean == pytest.approx(0.5 * 0.5 + 0.4 * 5.0 + 0.1 * (20.0 + 2 * 0.5))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: dataclasses.replace(hand(), links=(*hand().links, *hand().links)),
        lambda: with_link(hand(), source="nowhere"),
        lambda: with_link(hand(), target="nowhere"),
        lambda: dataclasses.replace(two_far(), far=(*hand().far, *hand().far)),
        lambda: throughput(hand(), Arrangement(threshold=0, n_prefill=3, n_decode=2)),
        lambda: throughput(hand(), Arrangement(threshold=0, n_prefill=-1, n_decode=2)),
        lambda: dataclasses.replace(hand(), links=()),
        lambda: dataclasses.replace(hand(), home=Cluster(name="home", times=SLOW, instances=4)),
        lambda: Cluster(name="home", times=SLOW, instances=0),
        lambda: Cluster(name="home", times=SLOW, instances=1, price=-1.0),
        lambda: ClusterLink(source="far", target="home", bytes_per_s=0.0),
        lambda: ClusterLink(source="far", target="home", bytes_per_s=1.0, max_share=1.5),
        lambda: ClusterLink(source="far", target="home", bytes_per_s=1.0, price_per_gb=float("nan")),
    ],
)
def test_a_system_that_cannot_be_is_refused(wrong):
    with pytest.raises(ConfigError):
        wrong()
