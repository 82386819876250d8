"""Reads over sockets name their offer, and are refused once it is over."""

import time

import pytest

from tests.storage.peers import Instance

pytestmark = pytest.mark.cpu
IDS, INTO = [1, 2, 5], [9, 10, 12]


@pytest.fixture(params=["tcp", "gloo"])
def pair(request):
    source, target = Instance("E0:1", request.param, 1), Instance("D1:1", request.param, 2)
    yield source, target
    target.close()
    source.close()


def test_an_offer_can_be_read_until_it_is_over(pair):
    source, target = pair
    first, second = (source.puller.offer(name, "") for name in ("r/0", "r/1"))
    assert {h.offer for h in first.values()} == {"r/0"}
    assert target.pull(first, IDS, INTO, 1) and target.pull(second, IDS, INTO, 1)
    assert source.puller.end_offer("r/0"), "nobody reads it now"
    copy = target.begin(first, IDS, INTO)
    assert target.wait(copy) is False and not copy.cut, "refused, but connected"
    assert target.pull(second, IDS, INTO, 1), "another offer is still served"
    assert source.puller.end_offer("r/1") and source.puller.end_offer("r/1")


def test_a_read_that_is_running_is_cut_when_its_offer_ends():
    source, target = Instance("E0:1", "tcp", 1, n=600, n_source=300), Instance("D1:1", "tcp", 2, n=600, n_source=300)
    handles, server = source.puller.offer("r/0", ""), source.exports._server
    begun = time.monotonic()
    copy = target.begin(handles, list(range(300)), list(range(300, 600)), ("embed",))
    while not server._reading and copy.done is None:
        time.sleep(0.0005)
    while not source.puller.end_offer("r/0"):
        time.sleep(0.001)
    assert target.wait(copy) in (True, False) and time.monotonic() - begun < 5.0
    assert not server._reading, "somebody reads blocks that are given back"
    assert target.pull(handles, IDS, [300, 301, 302]) is False
    target.close()
    source.close()


def test_a_peer_that_cannot_be_connected_is_cut(pair):
    source, target = pair
    handles = source.puller.offer("r/0", "")
    source.exports.close()
    copy = target.begin(handles, IDS, INTO)
    assert target.wait(copy) is False and copy.cut


def test_a_peer_on_another_machine_is_offered_sockets_and_one_on_this_machine_memory():
    source, target = Instance("E0:1", "auto", 1), Instance("D1:1", "tcp", 2)
    here = source.puller.offer("r/0", source.handles["kv"].host)
    assert all("shared-memory" in h.ways and not h.offer for h in here.values()), "its reads cannot be refused"
    there = source.puller.offer("r/1", "another machine")
    assert all(set(h.ways) == {"tcp"} and h.offer == "r/1" for h in there.values())
    assert target.pull(there, IDS, INTO, 1)
    target.close()
    source.close()
