"""A layout that changes while it serves: instances come, leave, and take on other stages. No answer notices."""

import pytest

from hydrainfer.core import ConfigError, Role
from tests.cluster.virtual import Cluster
from tests.scheduler.fakes import expected_tokens, make_request

pytestmark = pytest.mark.unit


def ask(cluster, name, n=8, **kw):
    requests = [make_request(f"{name}{i}", n_text=9 + i, max_tokens=12, **kw) for i in range(n)]
    for request in requests:
        cluster.submit(request)
    return requests


def check(cluster, requests):
    cluster.run()
    for request in requests:
        assert cluster.end(request.id).finish_reason == "length"
        assert cluster.tokens(request.id) == expected_tokens(request)
    cluster.check_whole()


def wait(cluster, seconds):
    cluster.at(cluster.now + seconds, lambda: None, awaited=True)
    cluster.run()


def landed_at(cluster, name):
    return cluster.engines[name].moves.n_landed


def test_an_instance_is_added_to_a_running_cluster_and_gets_requests():
    cluster = Cluster("1EP1D", 64, 32)
    requests = ask(cluster, "before", pictures=[1])
    cluster.run(until=6.0)
    cluster.add("D2", Role.parse("D"))
    check(cluster, requests)
    check(cluster, ask(cluster, "after", pictures=[2]))
    assert landed_at(cluster, "D2") > 0 and not cluster.side.census.dark()


def test_an_instance_leaves_once_its_requests_are_done_and_no_request_is_lost():
    cluster = Cluster("1EP2D", 64, 32)
    requests = ask(cluster, "before")
    cluster.run(until=12.0)
    assert landed_at(cluster, "D1") > 0
    cluster.side.census.retire("D1")
    check(cluster, requests)
    wait(cluster, 30.0)
    assert set(cluster.engines) == {"EP0", "D2"} and set(cluster.side.census.roles) == {"EP0", "D2"}
    assert not cluster.side.lives.n_recovered, "it did not have to begin again"
    check(cluster, ask(cluster, "after"))
    assert cluster.side.census.restarts.due(1e9) == [], "nobody starts it again"


def test_an_instance_that_dies_while_it_leaves_is_not_started_again():
    cluster = Cluster("1EP2D", 64, 32)
    requests = ask(cluster, "before")
    cluster.run(until=12.0)
    cluster.side.census.retire("D1")
    cluster.crash("D1")
    check(cluster, requests)
    assert cluster.side.census.told_to_close == ["D1"], "the launcher is to let it end for good"
    assert set(cluster.side.census.roles) == {"EP0", "D2"}


def test_the_last_instance_of_a_stage_may_not_leave():
    cluster = Cluster("1EP1D", 64, 32)
    with pytest.raises(ConfigError, match="without D1, no instance could decode"):
        cluster.side.census.retire("D1")
    wait(cluster, 5.0)
    with pytest.raises(ConfigError, match="without EP0, no instance could prefill"):
        cluster.side.census.become("EP0", Role.parse("E"), cluster.now)


def test_an_instance_goes_from_prefill_to_decode_while_it_is_idle():
    """It has loaded both; its weights and caches stay."""
    cluster = Cluster("1EP2PD", 64, 32)
    census = cluster.side.census
    check(cluster, ask(cluster, "first"))
    wait(cluster, 10.0)
    census.become("PD1", Role.parse("P"), cluster.now)
    cluster.pump()
    check(cluster, ask(cluster, "prefill"))
    assert cluster.engines["PD1"].moves.n_landed == 0
    n_batches = cluster.engines["PD1"].scheduler.n_batches
    wait(cluster, 10.0)
    census.become("PD1", Role.parse("D"), cluster.now)
    cluster.pump()
    requests = ask(cluster, "decode")
    check(cluster, requests)
    assert landed_at(cluster, "PD1") > 0 and cluster.engines["PD1"].scheduler.n_batches > n_batches
    assert str(cluster.engines["PD1"].scheduler.duties) == "D" == census.members["PD1"].hello.peer.role


def test_an_instance_with_requests_or_without_the_weights_does_not_become_another():
    cluster = Cluster("1EP2D", 64, 32)
    check(cluster, ask(cluster, "first"))
    wait(cluster, 10.0)
    ask(cluster, "more")
    cluster.run(until=cluster.now + 12.0)
    with pytest.raises(ConfigError, match="D1 has requests"):
        cluster.side.census.become("D1", Role.parse("P"), cluster.now)
    with pytest.raises(ConfigError, match="has loaded D cannot become P"):
        cluster.engines["D1"].scheduler.duties.accept(Role.parse("P"))
    cluster.run()
