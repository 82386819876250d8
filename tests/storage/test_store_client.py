"""Loads from a shared store that are given up, and what happens behind them."""

import threading
import time
from collections import Counter

import pytest
import torch

from hydrainfer.cache import BlockRef, StoreJob, stored_bytes
from hydrainfer.storage.store import BlockStore
from hydrainfer.storage.store_client import ThreadedClient
from tests.storage.peers import SPECS
from tests.waiting import HELD_S, wait_until

pytestmark = pytest.mark.cpu
SPEC = SPECS["kv"]
N = 6


class Hanging:
    """A `SharedStore` whose blocks are full of sevens, and whose reads wait until they are `released`. The blocks
    with the numbers in `broken` are: what is read of them are NaNs."""

    place = "a test's"

    def __init__(self):
        self.counts, self.released, self.n_reads, self.broken = Counter(), threading.Event(), 0, set()

    def has(self, names):
        return [True] * len(names)

    def read(self, names, into):
        self.n_reads += 1
        self.released.wait(HELD_S)
        for name, view in zip(names, into):
            view[:] = (b"\xff" if name.number in self.broken else b"\7") * len(view)
        return [name.number not in self.broken for name in names]

    def close(self):
        self.released.set()


@pytest.fixture
def rig():
    store, woken = BlockStore(SPEC, N), []
    store.bytes.zero_()
    shared = Hanging()
    client = ThreadedClient(shared, {SPEC.name: store}, lambda: woken.append(time.monotonic()))
    yield store, shared, client, woken
    client.close()


def load(client, blocks):
    refs = [BlockRef(b"%16d" % block, block, b"") for block in blocks]
    return client.start(StoreJob("load", {SPEC.name: (refs, blocks)}))


def test_a_load_that_is_given_up_writes_nothing_more(rig):
    store, shared, client, woken = rig
    first, second = load(client, [0, 1]), load(client, [2, 3])
    wait_until(lambda: shared.n_reads == 2 and first.began_at() <= time.monotonic() and woken)
    first.cancel()
    shared.released.set()
    wait_until(lambda: first.poll(0.0) is not None and second.poll(0.0) is not None)
    assert second.poll(0.0).there == {SPEC.name: [True, True]}
    assert not store.bytes[:2].any()
    assert torch.equal(
        store.bytes[2:4, : stored_bytes(SPEC)], torch.full((2, stored_bytes(SPEC)), 7, dtype=torch.uint8)
    )


def test_behind_loads_that_were_given_up_and_hang_none_is_begun(rig):
    _, shared, client, _ = rig
    hung = [load(client, [0]), load(client, [1])]
    wait_until(lambda: shared.n_reads == 2)
    waiting = load(client, [2])
    for ticket in hung:
        ticket.cancel()
    refused = load(client, [3]).poll(0.0)
    assert refused is not None and "not ended" in refused.error
    assert waiting.poll(0.0) is None and waiting.began_at() == float("inf")
    shared.released.set()
    wait_until(lambda: waiting.poll(0.0) is not None)
    assert waiting.poll(0.0).there == {SPEC.name: [True]}
    later = load(client, [3])
    wait_until(lambda: later.poll(0.0) is not None)
    assert not later.poll(0.0).error


def test_blocks_come_through_a_buffer_that_is_smaller_than_a_load(rig, monkeypatch):
    store, shared, client, _ = rig
    monkeypatch.setattr("hydrainfer.storage.store_client._BUFFER_BYTES", 2 * stored_bytes(SPEC))
    shared.released.set()
    ticket = load(client, [4, 0, 3, 1, 5])
    wait_until(lambda: ticket.poll(0.0) is not None)
    assert ticket.poll(0.0).there == {SPEC.name: [True] * 5} and shared.n_reads == 3
    assert all(store.bytes[block].any() for block in (0, 1, 3, 4, 5)) and not store.bytes[2].any()


def test_what_did_not_come_is_not_written(rig):
    """A masked row that nobody wrote must not hold a NaN, so whatever a store leaves in a buffer stays there."""
    store, shared, client, _ = rig
    shared.broken = {0, 4}
    shared.released.set()
    ticket = load(client, [4, 0, 3])
    wait_until(lambda: ticket.poll(0.0) is not None)
    assert ticket.poll(0.0).there == {SPEC.name: [False, False, True]}
    assert store.bytes[3].any() and not store.bytes[[0, 4]].any()
