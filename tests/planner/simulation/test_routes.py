"""Routes between clusters: copies share the rate fairly, and it changes over time."""

import heapq

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydrainfer.core import ConfigError
from hydrainfer.planner.nouns import Link, Route, TraceRequest
from hydrainfer.planner.simulation.routes import SharedRoute, Timer
from hydrainfer.planner.simulation.simulator import Simulator
from hydrainfer.planner.simulation.trace import as_requests
from tests.planner.simulation.test_leaps import KV, TRACES, deployment

pytestmark = pytest.mark.unit
WIDE = Link(bytes_per_s=1e12)


class Clock:
    def __init__(self):
        self.now, self.events, self.n = 0.0, [], 0

    def at(self, time_s, call):
        self.n += 1
        heapq.heappush(self.events, (time_s, self.n, call))

    def run(self):
        while self.events:
            self.now, _, call = heapq.heappop(self.events)
            call()
            assert self.n < 1000, "events without end"


def ends_of(copies, rates=((0.0, 100.0),), latency_s=0.0, link=WIDE):
    """When copies are done that begin at given times with given bytes, and the route."""
    clock, ends = Clock(), {}
    route = SharedRoute(
        Route(source="a", target="b", rates=rates, latency_s=latency_s), link, Timer(lambda: clock.now, clock.at)
    )
    for i, (begin_s, n_bytes) in enumerate(copies):
        landed = lambda i=i: ends.__setitem__(i, clock.now)  # noqa: E731
        clock.at(begin_s, lambda n=n_bytes, landed=landed: route.begin(n, landed))
    clock.run()
    return [ends[i] for i in range(len(copies))], route


def test_copies_share_the_rate():
    assert ends_of([(0.0, 100.0)])[0] == [1.0]
    assert ends_of([(0.0, 100.0), (0.0, 100.0)])[0] == [2.0, 2.0]
    ends, route = ends_of([(0.0, 100.0), (0.5, 200.0)])
    assert ends == pytest.approx([1.5, 3.0])
    assert route.sent_bytes == pytest.approx(300.0)


def test_the_rate_changes_while_they_are_on_their_way():
    assert ends_of([(0.0, 100.0)], rates=((0.0, 100.0), (0.5, 10.0)))[0] == pytest.approx([5.5])
    assert ends_of([(0.0, 100.0)], rates=((0.0, 10.0), (1.0, 1000.0)))[0] == pytest.approx([1.09])


def test_latency_comes_on_top_and_one_copy_is_no_faster_than_an_instance():
    assert ends_of([(0.0, 100.0)], latency_s=0.25)[0] == [1.25]
    assert ends_of([(0.0, 100.0), (0.0, 50.0)], link=Link(bytes_per_s=25.0))[0] == pytest.approx([4.0, 2.0])


@pytest.mark.parametrize("begin_s", [3600.0, 7 * 86400.0, 1.7e9])
def test_copies_end_however_late_the_clock_is(begin_s):
    """Its steps are then coarser than the time of a copy's last bytes."""
    copies = [(begin_s + 0.1 * i, 1e9 + 7 * i) for i in range(20)]
    ends, route = ends_of(copies, rates=((0.0, 1e11),), link=Link(bytes_per_s=50e9))
    assert ends == pytest.approx([at_s + n_bytes / 50e9 for at_s, n_bytes in copies], abs=1e-6)
    assert route.state().queued_bytes == 0.0


@given(
    copies=st.lists(st.tuples(st.floats(0.0, 20.0), st.floats(1.0, 1e4)), min_size=1, max_size=12),
    rates=st.lists(st.floats(1.0, 1e4), min_size=1, max_size=4),
)
@settings(max_examples=2000, deadline=None)
def test_a_route_is_never_idle_and_never_faster_than_its_rate(copies, rates):
    pieces = tuple((5.0 * i, rate) for i, rate in enumerate(rates))
    ends, route = ends_of(copies, rates=pieces)
    assert route.sent_bytes == pytest.approx(sum(n for _, n in copies), rel=1e-6)
    assert route.state().queued_bytes == pytest.approx(0.0, abs=1e-3)
    for (begin_s, n_bytes), end_s in zip(copies, ends, strict=True):
        assert end_s >= begin_s + n_bytes / max(rates) * (1 - 1e-9)
    busy_s = sum(n for _, n in copies) / min(rates)
    assert max(ends) <= max(begin_s for begin_s, _ in copies) + busy_s * (1 + 1e-9) + 1e-6


@pytest.mark.parametrize(
    "wrong", [{"rates": ()}, {"rates": ((1.0, 5.0),)}, {"rates": ((0.0, 1.0), (0.0, 2.0))}, {"rates": ((0.0, 0.0),)}]
)
def test_a_route_without_sense_is_refused(wrong):
    with pytest.raises(ConfigError, match="the route from a to b"):
        Route(source="a", target="b", **wrong)


@pytest.mark.parametrize("workload", TRACES)
@pytest.mark.parametrize("layout", ["1E1P1D", "2E2P3D", "1E1PD+1EPD"])
def test_one_cluster_by_whichever_name_is_the_same_bit_for_bit(layout, workload):
    def outcome(cluster):
        requests = as_requests(TRACES[workload](3), KV.block_tokens)
        simulator = Simulator(list(deployment(layout, cluster=cluster)), home=cluster)
        return [(one.token_s, one.tokens) for one in simulator.run(requests)]

    assert outcome("") == outcome("here")


def test_an_encoder_in_another_cluster_waits_for_the_pixels_and_a_decoder_for_the_kv():
    """What is encoded far away is late by its pixels over the link, and nothing else is."""
    routes = [
        Route(source="home", target="far", rates=((0.0, 1e5),), latency_s=0.001),
        Route(source="far", target="home", rates=((0.0, 1e9),), latency_s=0.001),
    ]
    instances = list(deployment("1EP1D"))
    instances[0] = msgspec.structs.replace(instances[0], cluster="far")
    instances[1] = msgspec.structs.replace(instances[1], cluster="home")
    request = as_requests([TraceRequest(arrival_s=0.0, n_text=8, pictures=(20,), n_output=3)], KV.block_tokens)

    def first_s(pixel_bytes):
        (one,) = Simulator(instances, routes=routes, home="home", pixel_bytes=pixel_bytes).run(request)
        return one.token_s[0]

    assert first_s(500.0) == pytest.approx(first_s(0.0) + 20 * 500.0 / 1e5, abs=1e-3)
