"""Every transport between real processes: both directions at once, peers that die, hang and come back."""

from __future__ import annotations

import time

import pytest
import torch

from tests.storage.peers import Instance, Peer
from tests.waiting import HELD_S, PATIENCE_S

pytestmark = [pytest.mark.multi, pytest.mark.timeout(60)]

BETWEEN = ["shared-memory", "gloo", "tcp"]
SCATTERED, RUN = [7, 0, 1, 2, 5], [0, 1, 2, 3, 4]
N = 128  # blocks of 1 MiB: a copy that takes long enough to be interrupted


@pytest.mark.parametrize("transport", [*BETWEEN, "auto"])
def test_both_directions_at_once(transport):
    a, b = Peer("E0:1", transport, 1), Peer("P0:1", transport, 2)
    us = Instance("D0:1", transport, 3)
    for ids in (SCATTERED, RUN):
        a.begin_pulls(4, b.handles, ids, [8, 9, 10, 11, 12], 2)
        b.begin_pulls(4, a.handles, ids, [14, 15, 8, 9, 10], 1)
        for peer, seed in ((a, 1), (b, 2)):
            assert us.pull(peer.handles, ids, [11, 12, 8, 9, 10], seed) is True
        assert (a.result(), b.result()) == (True, True)
    us.close()
    assert (a.end(), b.end()) == ([], [])


@pytest.mark.parametrize("transport", ["gloo", "tcp"])
def test_a_peer_killed_during_a_copy(transport):
    doomed, other = Peer("E0:1", transport, 1, n=N, n_source=N), Peer("E1:1", transport, 2)
    us = Instance("P0:1", transport, 3, n=N, n_source=0, timeout_s=HELD_S)
    embed = us.stores["embed"].bytes
    copy = us.begin(doomed.handles, list(range(N)), list(range(N)), ["embed"])
    while not embed[0, 0]:
        time.sleep(0.0005)
    doomed.stop()  # hung, for now
    assert us.pull(other.handles, SCATTERED, RUN, 2, ["kv"]) is True, "another peer does not wait"
    assert copy.done is None
    killed_s = time.monotonic()
    doomed.kill()
    assert us.wait(copy) is False and time.monotonic() - killed_s < PATIENCE_S
    seen = embed.clone()
    assert us.pull(doomed.handles, RUN, RUN) is False, "nobody there"
    us.puller.forget("E0:1")
    again = Peer("E0:2", transport, 4)
    assert us.pull(again.handles, RUN, RUN, 4) is True and us.pull(other.handles, RUN, RUN, 2) is True
    assert torch.equal(embed[5:], seen[5:]), "nothing was written after the copy had failed"
    us.close()
    assert (again.end(), other.end()) == ([], [])


def test_mapped_memory_survives_its_exporter():
    peer, us = Peer("E0:1", "shared-memory", 1), Instance("P0:1", "shared-memory", 2)
    assert us.pull(peer.handles, RUN, [8, 9, 10, 11, 12], 1, ["kv"]) is True
    peer.kill()
    assert us.pull(peer.handles, SCATTERED, [8, 9, 10, 11, 12], 1, ["kv"]) is True
    assert us.pull(peer.handles, RUN, RUN, None, ["embed"]) is False, "never mapped: gone"
    again = Peer("E0:2", "shared-memory", 3)
    assert us.pull(again.handles, RUN, [8, 9, 10, 11, 12], 3) is True
    us.close()
    assert again.end() == []


@pytest.mark.parametrize("transport", ["gloo", "tcp"])
def test_a_hung_peer(transport):
    """Its copies end when their time is over, or at once when we close; ours to it end too."""
    peer = Peer("E0:1", transport, 1, n=N, n_source=N)
    patient, hasty = (
        Instance("P0:1", transport, 2, n=N, timeout_s=HELD_S),
        Instance("P1:1", transport, 3, n=N, timeout_s=2.0),
    )
    assert patient.pull(peer.handles, RUN, RUN, 1) is True and hasty.pull(peer.handles, RUN, RUN, 1) is True
    peer.begin_pulls(1, patient.handles, list(range(8)) * 12, list(range(96)), None)
    peer.stop()
    began_s = time.monotonic()
    assert hasty.pull(peer.handles, RUN, RUN) is False
    assert 1.0 < time.monotonic() - began_s < PATIENCE_S
    copy = patient.begin(peer.handles, RUN, RUN)
    time.sleep(0.1)
    assert copy.done is None
    began_s = time.monotonic()
    patient.close()
    hasty.close()
    assert copy.done is False and time.monotonic() - began_s < PATIENCE_S
    peer.kill()
