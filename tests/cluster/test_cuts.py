"""Pairs of instances that cannot reach each other, while both reach the hub."""

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from hydrainfer.core import Lane
from tests.cluster.test_virtual import traffic
from tests.cluster.virtual import PULSE, TIMING, Cluster
from tests.scheduler.fakes import expected_tokens, make_request

pytestmark = pytest.mark.unit
LAYOUTS = ["1E1P1D", "1E2P1D", "2E1P2D", "1E2P2D", "1ED1P", "1EP1D", "1E1PD+1EPD", "1EP2D+1EPD"]
_FREED_S = TIMING.lease_s + 2.0  # of a lease, after which all blocks are back


def ended_at(cluster):
    return max(at for at, event in cluster.lifecycle if event.kind == "finished")


def serve(cluster, requests):
    for r in requests:
        cluster.at(r.arrival_s, lambda r=r: cluster.submit(r), awaited=True)
    cluster.run()
    assert cluster.quiet, {n: e.stats(cluster.now) for n, e in cluster.engines.items()}
    cluster.check_whole()


def whole(cluster, requests):
    for r in requests:
        assert cluster.tokens(r.id) == expected_tokens(r) and cluster.end(r.id).finish_reason == "length"


def n_batches(cluster, name):
    return sum(b[0] is Lane.LANGUAGE for b in cluster.devices[name].batches)


@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize("pair", [("P1", "D3"), ("D3", "P1"), ("E0", "P1"), ("P1", "E0")])
def test_requests_go_around_a_cut_pair(pair, both):
    """One prefilling instance is cut off from the encoder or from the only one that decodes."""
    cluster = Cluster("1E2P1D", 64, 32, sockets=True)
    cluster.cut(*pair, at_s=0.0, both=both)
    requests = [make_request(f"r{i}", pictures=[i], max_tokens=5, arrival_s=3.0 * i) for i in range(12)]
    serve(cluster, requests)
    whole(cluster, requests)
    assert cluster.now <= ended_at(cluster) + _FREED_S, "blocks came back late"
    assert n_batches(cluster, "P2") > n_batches(cluster, "P1")


def test_without_a_way_around_a_request_waits_for_the_connection_and_goes_on():
    cluster = Cluster("1E1P1D", 64, 32, sockets=True)
    cluster.cut("P1", "D2", at_s=0.0, until_s=30.0)
    requests = [make_request(f"r{i}", pictures=[i], max_tokens=5, arrival_s=float(i)) for i in range(4)]
    serve(cluster, requests)
    whole(cluster, requests)
    assert cluster.side.lives.n_recovered == 0
    assert n_batches(cluster, "P1") <= 8, "prompts were computed again"


def test_without_a_way_around_a_request_ends_when_its_patience_does():
    """And the few messages of a cut pair do not grow with the time."""
    cluster, sent = Cluster("1P1D", 64, 32, sockets=True), []
    post = cluster.post
    cluster.post = lambda source, target, data: (sent.append((source, target)), post(source, target, data))
    cluster.cut("P0", "D1", at_s=0.0)
    requests = [make_request(f"r{i}", max_tokens=5, arrival_s=0.0) for i in range(4)]
    serve(cluster, requests)
    assert {cluster.end(r.id).error.status for r in requests} == {503}
    assert ended_at(cluster) <= TIMING.patience_s + 3 * TIMING.lease_s
    assert sum("hub" not in "".join(pair) for pair in sent) < 200
    assert cluster.now <= ended_at(cluster) + _FREED_S


@pytest.mark.parametrize("until_s", [9.0, 20.0, None])
def test_a_request_whose_handover_was_never_confirmed_is_begun_again(until_s):
    """The copy was complete and the source let go, but the target never heard that."""
    cluster = Cluster("1P1D+1PD", 64, 32, sockets=True)
    confirmed = cluster.nodes["P0"].post

    def post(peer, parcel):
        if any(type(message).__name__ == "Confirm" for message in parcel.messages) and not cluster.cuts["P0", "D1"]:
            cluster.cuts.update([("P0", "D1"), ("D1", "P0")])
            if until_s is not None:
                cluster.at(until_s, cluster.cuts.clear, awaited=True)
        confirmed(peer, parcel)

    cluster.nodes["P0"].post = post
    requests = [make_request(f"r{i}", max_tokens=30, arrival_s=0.0) for i in range(4)]
    serve(cluster, requests)
    whole(cluster, requests)


cuts = st.lists(
    st.tuples(
        st.floats(0.0, 40.0),  # from
        st.one_of(st.none(), st.floats(0.5, 60.0)),  # for so long, or for ever
        st.integers(0, 8),  # one
        st.integers(1, 8),  # the other
        st.booleans(),  # in both directions
    ),
    min_size=1,
    max_size=4,
)


def schedule(specs, layout, drawn, chaos, seed):
    """Every request ends once, with its tokens or, if there is no way, with a 503; nothing is told twice; blocks are
    back a lease and two seconds after the last end, though pairs are still cut."""
    cluster = Cluster(layout, 24, 8, seed, chaos, sockets=True)
    names, last_s = list(cluster.roles), 0.0
    for at_s, for_s, one, other, both in drawn:
        name, peer = names[one % len(names)], names[(one + other) % len(names)]
        if name != peer:
            until_s = None if for_s is None else at_s + for_s
            cluster.cut(name, peer, at_s, until_s, both)
            last_s = max(last_s, at_s, until_s or 0.0)
    requests = []
    for i, (n_text, pictures, max_tokens, arrives, *_) in enumerate(specs):
        requests.append(make_request(f"r{i}", n_text, pictures, max_tokens, arrival_s=arrives, salt=b""))
    serve(cluster, requests)
    for r in requests:
        end, tokens = cluster.end(r.id), cluster.tokens(r.id)
        assert tokens == expected_tokens(r)[: len(tokens)]
        assert end.finish_reason == "length" or end.error.status == 503, end
    if not chaos:
        assert cluster.now <= max(ended_at(cluster), last_s) + _FREED_S, "blocks came back late"


@settings(max_examples=250, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(
    specs=traffic,
    layout=st.sampled_from(LAYOUTS),
    drawn=cuts,
    chaos=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_schedules_of_cut_half_cut_and_healed_pairs(specs, layout, drawn, chaos, seed):
    schedule(specs, layout, drawn, chaos, seed)


@pytest.mark.slow
@pytest.mark.timeout(5400)
@settings(max_examples=10_000, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(
    specs=traffic,
    layout=st.sampled_from(LAYOUTS),
    drawn=cuts,
    chaos=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_ten_thousand_schedules_of_cut_pairs(specs, layout, drawn, chaos, seed):
    schedule(specs, layout, drawn, chaos, seed)


def test_pulse_and_timing_fit():
    assert PULSE.handover_s > TIMING.lease_s
