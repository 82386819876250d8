"""Prefixes in host memory: copied down when they are published, found there when the device has evicted them."""

import random

import pytest

from hydrainfer.cache import CacheSet
from hydrainfer.core import Lane, Role
from hydrainfer.scheduler import Budgets, Scheduler
from tests.cache.other_kinds import STATE, WINDOW
from tests.scheduler.fakes import EMBED, KV, FakeDevice, expected_tokens, make_request
from tests.scheduler.store import FakeMover, StoreRig

pytestmark = pytest.mark.unit


class Instance:
    def __init__(self, host, more=None, bad=False):
        self.now, self.device, self.said, self.n_computed = 0.0, FakeDevice(), {}, 0
        sizes = {KV: 40, EMBED: 8, **(more or {})}
        self.caches = CacheSet(sizes)
        self.hosted = CacheSet({spec: host for spec in sizes if spec is not EMBED} if host else {})
        self.mover = FakeMover(self.device, random.Random(0), bad)
        self.rig = StoreRig(self.caches, mover=self.mover)
        self.s = Scheduler(Role.parse("EPD"), self.caches, Budgets(tokens=64), host=self.hosted)
        self.rig.attach(self.s)
        if host:
            self.s.host.load_s = lambda _: 0.0  # a step is a second here

    def serve(self, *requests):
        for request in requests:
            self.s.add(request, self.now)
            for _ in range(400):
                self.rig.turn(self.now)
                for lane in Lane:
                    batch = self.s.next(self.now, lane).batch
                    if batch is None:
                        continue
                    if lane is Lane.LANGUAGE:
                        self.n_computed += sum(item.count for item in batch.work if not item.seq.n_produced)
                    for outcome in self.s.apply(self.device.run(batch), self.now):
                        self.said.setdefault(outcome.seq.id, []).extend(outcome.tokens)
                self.s.check()
                self.now += 1.0
                if len(self.said.get(request.id, ())) == request.max_tokens and not self.rig.busy:
                    break
            assert self.said[request.id] == expected_tokens(request)
        self.caches.check(idle=True)
        self.hosted.check(idle=True)
        return self


def rounds(n_rounds=2, n=6):
    """The same prompts again; together they are larger than the device's caches."""
    return [make_request(f"r{r}.{i}", 60, (), 4, salt=b"%d" % i) for r in range(n_rounds) for i in range(n)]


@pytest.mark.parametrize("more", [{}, {WINDOW: 30, STATE: 12}], ids=["full", "all kinds"])
def test_what_the_device_has_evicted_is_copied_back(more):
    n_prompt = 60
    assert Instance(0, more).serve(*rounds()).n_computed == 2 * 6 * n_prompt
    kept = Instance(150, more).serve(*rounds())
    assert kept.n_computed == 6 * n_prompt + 6 * 4
    assert Instance(20, more).serve(*rounds()).n_computed > 6 * n_prompt + 6 * 4, (
        "found though it was evicted there, too"
    )


def test_copies_that_fail_cost_only_time():
    Instance(150, {WINDOW: 30, STATE: 12}, bad=True).serve(*rounds(4))


def test_parked_sequences_go_before_cached_prefixes():
    instance = Instance(30).serve(*rounds(1))
    pool = instance.hosted.pools["kv"]
    assert pool.n_cached >= 28
    lease = instance.hosted.reserve("parked", {"kv": range(30)})
    assert lease is not None and pool.n_cached == 0
    instance.hosted.release(lease)


@pytest.mark.parametrize(("role", "kept"), [("D", False), ("PD", True)])
def test_an_instance_that_only_decodes_keeps_no_prefixes_there(role, kept):
    caches, device = CacheSet({KV: 40}), FakeDevice()
    s = Scheduler(Role.parse(role), caches, Budgets(), host=CacheSet({KV: 10}))
    rig = StoreRig(caches, mover=FakeMover(device, random.Random(0), bad=False))
    rig.attach(s)
    lease = caches.reserve("r", {"kv": range(1)})
    caches.commit(lease, "kv", 0, [b"key"])
    s.host.published("kv", [b"key"], range(1))
    rig.turn(0.0)
    assert rig.busy == kept and not s.host.waiting
