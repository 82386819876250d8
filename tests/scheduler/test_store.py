"""A shared store from a scheduler's side: what is asked, loaded, saved, and what happens when it does not come."""

import pytest

from hydrainfer.cache import CacheSet, StoreTier
from hydrainfer.core import Lane, Role
from hydrainfer.engine import Stored
from hydrainfer.scheduler import Budgets, Scheduler
from tests.cache.other_kinds import STATE, WINDOW
from tests.scheduler.fakes import EMBED, KV, FakeDevice, expected_tokens, make_request
from tests.scheduler.store import FakeStore, Shelf, StoreRig

pytestmark = pytest.mark.unit


class Instance:
    """A scheduler with a store on a `shelf`, driven a step a second."""

    def __init__(self, shelf=None, sizes=None, slowest=1.0, **options):
        self.now, self.device, self.said, self.computed = 0.0, FakeDevice(), {}, {}
        self.caches = CacheSet(sizes or {KV: 200, EMBED: 20})
        self.store = FakeStore(self.device, lambda: self.now, shelf=shelf or Shelf(), slowest=slowest)
        self.rig = StoreRig(self.caches, self.store)
        self.s = Scheduler(Role.parse("EPD"), self.caches, Budgets(tokens=64, **options), store=self.rig.tier)
        self.rig.attach(self.s)

    def step(self):
        self.rig.turn(self.now)
        for lane in Lane:
            batch = self.s.next(self.now, lane).batch
            if batch is None:
                continue
            for item in batch.work if lane is Lane.LANGUAGE else ():
                if item.seq.n_produced == 0:
                    self.computed[item.seq.id] = self.computed.get(item.seq.id, 0) + item.count
            for outcome in self.s.apply(self.device.run(batch), self.now):
                self.said.setdefault(outcome.seq.id, []).extend(outcome.tokens)
        self.s.check()
        self.now += 1.0

    def serve(self, *requests, at_once=False):
        """Until all have ended and nothing waits to be saved."""
        for request in requests:
            self.s.add(request, self.now)
            if not at_once:
                self.settle()
        self.settle()
        for request in requests:
            assert self.said[request.id] == expected_tokens(request)
        return self

    def settle(self):
        for _ in range(2000):
            if not (self.s.n_running or self.s.n_waiting or self.s.fetching.live or self.rig.busy):
                break
            self.step()
        self.caches.check(idle=True)

    def jobs(self, what):
        return [job for job in self.store.jobs if job.what == what]

    @property
    def stats(self):
        return self.rig.stored.stats()


def prompt(name, n_text=40, **more):
    return make_request(name, n_text=n_text, max_tokens=3, **{"salt": b""} | more)


@pytest.mark.parametrize("more", [{}, {WINDOW: 60}, {STATE: 40}, {WINDOW: 60, STATE: 40}], ids=str)
@pytest.mark.parametrize("pictures", [(), (1, 2)], ids=["text", "pictures"])
def test_another_instance_loads_what_one_has_computed(more, pictures):
    sizes, shelf = {KV: 200, EMBED: 20, **more}, Shelf()
    Instance(shelf, sizes).serve(prompt("a", pictures=pictures))
    later = Instance(shelf, sizes).serve(prompt("b", pictures=pictures))
    n_prompt = prompt("x", pictures=pictures).n_prompt
    assert later.computed["b"] == n_prompt - (n_prompt - 1) // 4 * 4
    assert not later.device.n_encoded and later.stats.n_lost == 0


def test_what_is_here_is_not_loaded_and_what_is_not_worth_it_neither():
    shelf = Shelf()
    Instance(shelf).serve(prompt("a"))
    here = Instance(shelf).serve(prompt("b"), prompt("c"))
    assert len(here.jobs("load")) == 1 and here.computed["c"] == 4
    slow = Instance(shelf)
    slow.rig.tier.byte_s = 1e6
    slow.serve(prompt("d"))
    assert not slow.jobs("load") and slow.computed["d"] == 40


def counts_of(instance):
    """The prompt tokens that were wanted, found anywhere, asked of the store, and found there."""
    room = instance.s.room
    return room.n_tokens_wanted, room.n_tokens_found, room.n_tokens_asked, dict(room.n_tokens_from)


def test_tokens_are_counted_by_where_they_were_found():
    shelf = Shelf()
    first = Instance(shelf).serve(prompt("a"))
    assert counts_of(first) == (40, 0, 40, {"store": 0})
    second = Instance(shelf).serve(prompt("b"))
    assert counts_of(second) == (40, 36, 40, {"store": 36})
    second.serve(prompt("c"))
    assert counts_of(second) == (80, 72, 44, {"store": 36}), "on the device now; of the rest the store was asked"
    second.serve(prompt("d", 60))
    assert counts_of(second) == (140, 112, 64, {"store": 36}), "longer than what any has"


def test_what_is_not_worth_its_load_counts_as_asked_and_not_found():
    shelf = Shelf()
    Instance(shelf).serve(prompt("a"))
    slow = Instance(shelf)
    slow.rig.tier.byte_s = 1e6
    assert counts_of(slow.serve(prompt("b"))) == (40, 0, 40, {"store": 0})


def test_a_request_waits_for_an_answer_no_longer_than_a_moment():
    late = Instance(slowest=0.0)
    late.store.slowest = 1e6
    late.s.add(prompt("a"), 0.0)
    for _ in range(8):
        late.step()
    assert late.said["a"] == expected_tokens(prompt("a"))


def test_two_with_one_prefix_load_it_once():
    shelf = Shelf()
    Instance(shelf).serve(prompt("a"))
    both = Instance(shelf).serve(prompt("b"), prompt("c"), prompt("d"), at_once=True)
    assert both.stats.n_loaded == 9 and both.computed == {"b": 4, "c": 4, "d": 4}


def test_a_block_that_does_not_come_is_struck_and_what_is_before_it_loaded_again():
    shelf = Shelf()
    first = Instance(shelf).serve(prompt("a"))
    (save,) = first.jobs("save")
    refs, _ = save.blocks["kv"]
    second = Instance(shelf, slowest=0.5)
    second.s.add(prompt("b"), 0.0)
    while not second.jobs("load"):
        second.step()
    del shelf.numbers["kv", refs[5].key]
    second.settle()
    assert second.said["b"] == expected_tokens(prompt("b"))
    assert [len(job.blocks["kv"][0]) for job in second.jobs("load")] == [9, 5]
    assert second.computed["b"] == 20 and second.stats.n_lost == 1
    assert ("kv", refs[5].key) in shelf.numbers, "what was computed again is saved again"


def test_who_takes_a_lost_block_for_loaded_is_caught(monkeypatch):
    """By the test before this one."""
    real = Stored.loaded
    monkeypatch.setattr(Stored, "loaded", lambda stored, job, result, *when: real(stored, job, result, *when) or True)
    with pytest.raises((AssertionError, KeyError)):
        test_a_block_that_does_not_come_is_struck_and_what_is_before_it_loaded_again()


def test_a_load_that_takes_too_long_is_given_up_and_its_room_comes_back():
    shelf = Shelf()
    Instance(shelf).serve(prompt("a"))
    second = Instance(shelf, slowest=0.0)
    second.s.add(prompt("b"), 0.0)
    second.step()
    second.store.slowest = 1e9
    for _ in range(40):
        second.step()
        if second.jobs("load"):
            second.store.slowest = 0.0
    assert second.said["b"] == expected_tokens(prompt("b")) and second.computed["b"] == 40
    assert second.stats.n_late == 1 and second.stats.n_failures and not second.rig.copies.holding
    second.settle()


def test_loads_that_wait_for_others_are_no_failure():
    """Each takes no time, but the last begins long after its limit."""
    shelf = Shelf()
    Instance(shelf).serve(prompt("a"))
    second = Instance(shelf, slowest=0.0)
    second.s.add(prompt("b"), 0.0)
    second.step()
    second.store.queued = 1e3
    for _ in range(40):
        second.step()
        if second.jobs("load"):
            second.store.queued = 0.0
    second.settle()
    assert second.said["b"] == expected_tokens(prompt("b")) and second.computed["b"] == 4
    assert second.stats.n_late == second.stats.n_failures == 0


def test_loads_that_wait_are_given_up_with_the_one_before_them_that_hangs():
    shelf = Shelf()
    Instance(shelf).serve(prompt("a"), prompt("other", salt=b"2"), prompt("third", salt=b"3"))
    second = Instance(shelf, slowest=0.0)
    names = {"b": b"", "c": b"2", "d": b"3"}
    for name, salt in names.items():
        second.s.add(prompt(name, salt=salt), 0.0)
    second.step()
    second.store.slowest, second.store.queued = 1e9, 0.0
    while len(second.jobs("load")) < 3:
        second.step()
        second.store.queued = 1e9 * bool(second.jobs("load"))
    second.store.slowest = second.store.queued = 0.0
    for _ in range(60):
        second.step()
    assert all(second.said[name] == expected_tokens(prompt(name, salt=salt)) for name, salt in names.items())
    assert second.stats.n_late == 1
    second.settle()


def test_after_a_load_that_failed_one_is_tried_at_a_time():
    shelf = Shelf()
    salts = [b"%d" % i for i in range(8)]
    Instance(shelf).serve(*(prompt(f"first {i}", salt=salt) for i, salt in enumerate(salts)))
    second = Instance(shelf, slowest=0.0)
    second.rig.tier.failed("load", 0.0)
    second.now = 5.0
    for i, salt in enumerate(salts[:6]):
        second.s.add(prompt(f"r{i}", salt=salt), second.now)
    while not second.jobs("load"):
        second.step()
        second.store.slowest = 1e9 * (len(second.jobs("ask")) == 6)
    second.store.slowest = 0.0
    for _ in range(6):
        second.step()
    assert len(second.jobs("load")) == 1 and sum(len(said) == 3 for said in second.said.values()) == 5
    second.settle()
    assert second.stats.n_late == 1 and len(second.said) == 6
    second.rig.tier.worked("load")
    second.now += 60.0
    second.serve(prompt("last", salt=salts[6]), prompt("very last", salt=salts[7]), at_once=True)
    assert len(second.jobs("load")) == 3


def test_what_is_to_be_loaded_before_counts():
    """A load that takes as long by itself as computing does not pay behind another."""
    tier = StoreTier(Instance(Shelf()).caches.specs)
    tier.byte_s = 1.0
    alone_s = tier.load_s(100)
    tier.hold("kv", [1, 2, 3])
    assert tier.load_s(100) == alone_s + 3 * tier.specs["kv"].block_bytes
    tier.drop("kv", [1, 2, 3])
    assert tier.load_s(100) == alone_s == 100.0


def test_a_store_that_fails_is_left_alone_for_longer_each_time():
    away = Instance(slowest=0.0)
    away.store.bad, away.store.chance = True, lambda p: p == 0.05  # every job fails
    for i in range(40):
        away.s.add(prompt(f"r{i}", n_text=9 + i), away.now)
        away.step()
        away.step()
    asked = away.jobs("ask")
    assert 3 <= len(asked) <= 8 and away.stats.n_failures >= 3
    away.settle()


def test_a_cancelled_one_gives_its_room_back_when_its_load_is_over():
    shelf = Shelf()
    Instance(shelf).serve(prompt("a"))
    second = Instance(shelf, slowest=0.0)
    second.s.add(prompt("b"), 0.0)
    second.step()
    second.store.slowest = 6.0
    while not second.jobs("load"):
        second.step()
    assert second.s.cancel("b")
    second.settle()
    second.serve(prompt("c"))


def test_blocks_are_saved_in_the_order_of_their_chain_a_few_at_a_time():
    one = Instance(sizes={KV: 160, EMBED: 4}).serve(prompt("a", 320))
    saves = one.jobs("save")
    assert all(job.n_blocks <= 160 // 16 for job in saves) and len(saves) >= 8
    numbers = [ref.number for job in saves for ref in job.blocks["kv"][0]]
    assert numbers == list(range(80)) and one.stats.n_saved == 80


def test_what_is_evicted_before_its_turn_is_skipped_with_what_follows_it():
    one = Instance(sizes={KV: 30, EMBED: 4}, slowest=60.0)
    requests = [make_request(f"r{i}", n_text=60, max_tokens=3, salt=b"%d" % i) for i in range(12)]
    one.serve(*requests, at_once=True)
    assert one.stats.n_skipped > 0
    by_root = {}
    for job in one.jobs("save"):
        for ref in job.blocks["kv"][0]:
            by_root.setdefault(ref.group, []).append(ref.number)
    assert all(numbers == list(range(len(numbers))) for numbers in by_root.values()), "a hole in a chain"


def test_what_is_hot_here_is_touched_there_once_a_minute_and_what_is_lost_saved_again():
    one = Instance(slowest=0.0).serve(prompt("a"))
    key = next(iter(one.store.shelf.numbers))
    one.serve(prompt("b"), prompt("c"))
    assert len(one.jobs("touch")) == 1
    del one.store.shelf.numbers[key]
    one.serve(prompt("d"))
    assert key not in one.store.shelf.numbers
    one.now += 60.0
    one.serve(prompt("e"))
    assert key in one.store.shelf.numbers and len(one.jobs("touch")) == 2


def test_an_engine_that_ends_saves_what_waits():
    shelf = Shelf()
    one = Instance(shelf, slowest=5.0)
    one.s.add(prompt("a"), 0.0)
    while "a" not in one.said or len(one.said["a"]) < 3:
        one.step()
    assert one.rig.busy
    one.rig.stored.close()
    one.caches.check(idle=True)
    assert Instance(shelf).serve(prompt("b")).computed["b"] == 4
