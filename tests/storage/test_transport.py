"""Copies of blocks between stores, through every transport that runs here."""

from __future__ import annotations

import threading

import pytest
import torch

from hydrainfer.cache import CacheSpec
from hydrainfer.storage import BlockStore, LocalExports, LocalTransport, StorePuller
from hydrainfer.storage.transport import runs

pytestmark = pytest.mark.cpu

SPECS = {
    "kv": CacheSpec.full(layers=3, kv_heads=2, head_dim=8, dtype="float32", block_tokens=4),
    "kv16": CacheSpec.full(layers=2, kv_heads=1, head_dim=4, dtype="bfloat16", block_tokens=2),
    "embed": CacheSpec.embed(width=6, dtype="float32", block_tokens=4),
}


class Rig:
    """Two instances' stores, all specs, random bytes in the source's."""

    def __init__(self, transport: str) -> None:
        self.source = {name: BlockStore(spec, 9) for name, spec in SPECS.items()}
        self.target = {name: BlockStore(spec, 7) for name, spec in SPECS.items()}
        for store in self.source.values():
            store.data.copy_(torch.randn(store.data.shape))
        self.woken = threading.Event()
        exports = LocalExports()
        self.handles = {name: exports.add(f"E0/{name}", store) for name, store in self.source.items()}
        self.puller = StorePuller(self.target, {}, {transport: LocalTransport(exports)}, self.woken.set)

    def pull(self, pulls, handles=None):
        self.woken.clear()
        copy = self.puller.pull(handles or {name: self.handles[name] for name in pulls}, pulls)
        assert self.woken.wait(5)
        return copy.poll(0.0)


@pytest.fixture(params=["local"])
def rig(request):
    made = Rig(request.param)
    yield made
    made.puller.close()


@pytest.mark.parametrize("pairs", [[(0, 0)], [(8, 6), (7, 5), (0, 0)], [(1, 2), (2, 3), (3, 4), (5, 0), (6, 1)]])
def test_whole_blocks_arrive_and_nothing_else_changes(rig, pairs):
    ids, into = [a for a, _ in pairs], [b for _, b in pairs]
    assert rig.pull(dict.fromkeys(SPECS, (ids, into))) is True
    for name in SPECS:
        got, sent = rig.target[name].data, rig.source[name].data
        for a, b in pairs:
            assert torch.equal(got[b], sent[a])
        for b in set(range(7)) - set(into):
            assert not got[b].any()


def test_a_copy_that_fails_says_so_and_the_next_one_works(rig):
    assert rig.pull({"kv": ([99], [0])}) is False
    assert rig.pull({"kv": ([1], [0])}) is True


def test_handles_tell_what_a_peer_needs(rig):
    h = rig.handles["kv"]
    assert (h.transport, h.n_blocks, h.block_bytes) == ("local", 9, SPECS["kv"].block_bytes)


def test_neighbours_move_in_one_copy():
    assert list(runs([1, 2, 3, 7, 8, 4], [5, 6, 7, 8, 9, 0])) == [(1, 5, 3), (7, 8, 2), (4, 0, 1)]
    assert list(runs([], [])) == [] and list(runs([3], [1])) == [(3, 1, 1)]
