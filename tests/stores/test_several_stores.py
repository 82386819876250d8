"""A store of several places: what a dead, slow or full place costs, and what stays where it is when places change."""

import random
import threading
from collections import Counter
from functools import partial

import fakeredis
import pytest

from hydrainfer.stores import StoreError, StoreFull
from hydrainfer.stores.port import Contents
from hydrainfer.stores.resp import RespStore
from hydrainfer.stores.several import SeveralStores
from tests.stores.resp_server import ROOT, block_of, got, name_of, put
from tests.waiting import HELD_S, wait_until

pytestmark = [pytest.mark.unit, pytest.mark.timeout(60)]


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


class Memory:
    """A store in this process. `error`: what every call raises; `write_error`: what writing raises; `gate`: what every
    call waits for."""

    def __init__(self, place):
        self.place, self.counts = place, Counter()
        self.blocks, self.calls, self.error, self.write_error = {}, [], None, None
        self.gate, self.closed = threading.Event(), False
        self.gate.set()

    def _called(self, what):
        self.calls.append(what)
        self.gate.wait(HELD_S)
        if self.error is not None:
            raise self.error

    def has(self, names):
        self._called("has")
        return [name in self.blocks for name in names]

    touch = has

    def read(self, names, into):
        self._called("read")
        for name, buffer in zip(names, into, strict=True):
            if name in self.blocks:
                buffer[:] = self.blocks[name]
        return [name in self.blocks for name in names]

    def write(self, names, blocks, wanted=lambda: True):
        self._called("write")
        if self.write_error is not None:
            raise self.write_error
        for i, (name, block) in enumerate(zip(names, blocks, strict=True)):
            if name not in self.blocks:
                if not wanted():
                    return i
                self.blocks[name] = bytes(block)
        return len(names)

    def contents(self):
        self._called("contents")
        return Contents(len(self.blocks), sum(map(len, self.blocks.values())), 1000)

    def close(self):
        self.closed = True


NAMES = [name_of(i, group=(i // 4).to_bytes(8)) for i in range(400)]  # 100 groups of 4


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def places():
    return [Memory(f"redis://host{i}:6379") for i in range(3)]


@pytest.fixture
def store(places, clock):
    store = SeveralStores(places, clock)
    yield store
    store.close()


def groups_of(place):
    return {name.group for name in place.blocks}


def name_in(store, place):
    """A name whose group lies in this place."""
    return next(n for n in NAMES if store._ring.owner(n.group, store._places) == place.place)


def test_groups_are_spread_and_found_in_every_process(store, places):
    assert put(store, NAMES) == 400
    assert all(20 <= len(groups_of(place)) <= 50 for place in places)
    assert sum(len(groups_of(place)) for place in places) == 100
    mixed = random.Random(0).sample(NAMES, 400)
    other = SeveralStores(places[::-1])
    assert got(other, mixed) == other.has(mixed) == other.touch(mixed) == [True] * 400
    assert store.contents() == (400, 400_000, 3000)


def test_a_place_that_dies_costs_its_own_blocks_only():
    servers = [fakeredis.FakeServer(server_type="redis") for _ in range(3)]
    stores = [
        RespStore(f"redis://host{i}", ROOT, {}, partial(fakeredis.FakeRedis, server=server))
        for i, server in enumerate(servers)
    ]
    store = SeveralStores(stores)
    assert put(store, NAMES) == 400
    servers[1].connected = False
    there = got(store, NAMES)
    assert 240 <= sum(there) < 400
    assert all(len({there[i] for i in range(g, g + 4)}) == 1 for g in range(0, 400, 4))
    assert store.has(NAMES) == there
    n_first = put(store, NAMES)
    assert n_first == there.index(False)
    store.close()


def test_a_new_place_takes_its_share_from_the_others(store, places):
    put(store, NAMES)
    larger = SeveralStores([*places, Memory("redis://host3:6379")])
    there = larger.has(NAMES)
    assert 240 <= sum(there) < 400
    assert got(larger, NAMES) == there
    larger.close()


def test_a_dead_place_is_asked_after_ever_longer_pauses(store, places, clock):
    places[0].error = StoreError("gone")
    mine, other = name_in(store, places[0]), name_in(store, places[1])
    put(store, [other])
    for pause_s in (1, 2, 4, 8, 16, 30, 30):
        n_calls = len(places[0].calls)
        assert store.has([mine, other]) == [False, True]
        assert len(places[0].calls) == n_calls + 1
        clock.now_s += pause_s - 0.01
        for call in (store.has, store.touch, lambda names: got(store, names)):
            assert call([mine, other]) == [False, True]
        assert put(store, [other, mine]) == 1
        assert len(places[0].calls) == n_calls + 1
        clock.now_s += 0.01
    places[0].error = None
    assert put(store, [mine]) == 1
    assert store.has([mine]) == [True]
    places[0].error = StoreError("gone again")
    assert store.has([mine]) == [False]
    places[0].error = None
    clock.now_s += 1
    assert store.has([mine]) == [True]


def test_calls_that_fail_together_make_one_pause(store, places, clock):
    places[0].error = StoreError("gone")
    places[0].gate.clear()
    mine = name_in(store, places[0])
    threads = [threading.Thread(target=store.has, args=([mine],)) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(places[0].calls) == 4)
    clock.now_s += 1
    places[0].gate.set()
    for thread in threads:
        thread.join()
    places[0].error = None
    assert store.has([mine]) == [False]
    clock.now_s += 1
    put(store, [mine])
    assert store.has([mine]) == [True]


def test_after_a_pause_one_thread_tries_and_no_other_waits(store, places, clock):
    mine = name_in(store, places[0])
    places[0].error = StoreError("gone")
    store.has([mine])
    clock.now_s += 1
    places[0].gate.clear()
    slow = threading.Thread(target=store.has, args=([mine],))
    slow.start()
    wait_until(lambda: len(places[0].calls) == 2)
    assert store.has([mine]) == [False]
    assert slow.is_alive()
    places[0].gate.set()
    slow.join()
    assert places[0].calls == ["has", "has"]


def test_only_if_all_places_fail_is_it_an_error(store, places):
    for place in places:
        place.error = StoreError(f"{place.place} is gone")
    assert store.has([name_in(store, places[0])]) == [False]  # the others may work
    for call in (store.has, store.touch, lambda names: got(store, names), lambda names: put(store, names)):
        with pytest.raises(StoreError, match="redis://host0:6379 is gone"):
            call(NAMES)
    with pytest.raises(StoreError):
        store.contents()
    with pytest.raises(StoreError):
        store.has([name_in(store, places[0])])
    assert max(len(place.calls) for place in places) <= 2


def test_a_full_place_is_read_and_not_written(store, places, clock):
    mine, other = name_in(store, places[0]), name_in(store, places[1])
    put(store, [mine])
    places[0].write_error = StoreFull("full")
    more = NAMES[NAMES.index(mine) + 1]._replace(group=mine.group)
    assert put(store, [other, more]) == 1
    assert put(store, [other, more]) == 1
    assert places[0].calls == ["write", "write"]
    assert got(store, [mine, more]) == [True, False]
    clock.now_s += 1
    places[0].write_error = None
    assert put(store, [other, more]) == 2


def test_if_all_places_are_full_the_store_is(store, places):
    put(store, NAMES[:40])
    for place in places:
        place.write_error = StoreFull("no room")
    for _ in range(2):
        with pytest.raises(StoreFull, match="no room"):
            put(store, NAMES)
    assert got(store, NAMES[:40]) == [True] * 40
    places[0].error = StoreError("gone")
    store.has(NAMES)
    with pytest.raises(StoreFull):
        put(store, NAMES)


def test_places_are_called_at_the_same_time(store, places):
    together = threading.Barrier(len(places))
    for place in places:
        place.gate = together
    assert store.has(NAMES) == [False] * 400


def test_a_slow_place_does_not_delay_calls_to_others(store, places):
    places[0].gate.clear()
    callers = [threading.Thread(target=store.has, args=(NAMES,)) for _ in range(8)]  # more than it has threads
    for caller in callers:
        caller.start()
    wait_until(lambda: places[0].calls)
    store.has([name_in(store, places[1]), name_in(store, places[2])])
    assert all(caller.is_alive() for caller in callers)
    places[0].gate.set()
    for caller in callers:
        caller.join()


def test_write_counts_the_first_blocks_of_all_places(store, places):
    assert put(store, NAMES[:100]) == 100
    answers = iter([True] * 50)
    n = store.write(NAMES, [block_of(name.number, 1000) for name in NAMES], lambda: next(answers, False))
    there = store.has(NAMES)
    assert sum(there) == 150
    assert n == there.index(False)


def test_no_means_no_for_all_places(store, places):
    answers = iter([True, False])  # asking once more would raise
    store.write(NAMES, [block_of(0, 10)] * 400, lambda: next(answers))
    assert sum(len(place.blocks) for place in places) == 1


def test_a_defect_is_not_hidden_and_all_have_finished(store, places):
    places[0].error = KeyError("a defect")
    places[1].delay_s = places[2].delay_s = 0.2
    with pytest.raises(KeyError):
        store.has(NAMES)
    assert all(place.calls == ["has"] for place in places)


def test_counts_are_summed_and_nothing_asked_is_nothing_answered(store, places):
    places[0].counts["corrupt"] = 2
    places[1].counts.update(corrupt=1, evicted=5)
    store.has(NAMES)
    assert store.counts == {"corrupt": 3, "evicted": 5}
    assert (store.has([]), store.read([], []), store.write([], [])) == ([], [], 0)
    store.close()
    assert all(place.closed for place in places)
