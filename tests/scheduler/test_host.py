"""Prefixes in host memory: copied down when they are published, found there when the device has evicted them."""

import random

import pytest

from hydrainfer.cache import CacheSet
from hydrainfer.core import Lane, Role
from hydrainfer.scheduler import Budgets, Scheduler
from hydrainfer.scheduler.fetching import Fetching
from hydrainfer.scheduler.room import SequenceRoom
from tests.cache.other_kinds import STATE, WINDOW
from tests.scheduler.fakes import EMBED, KV, FakeDevice, expected_tokens, make_request
from tests.scheduler.store import FakeMover, StoreRig

pytestmark = pytest.mark.unit


class Instance:
    def __init__(self, host, more=None, bad=False, **how):
        self.now, self.device, self.said, self.n_computed = 0.0, FakeDevice(), {}, 0
        sizes = {KV: 40, EMBED: 8, **(more or {})}
        self.caches = CacheSet(sizes)
        self.hosted = CacheSet({spec: host for spec in sizes if spec is not EMBED} if host else {})
        self.mover = FakeMover(self.device, random.Random(0), bad, **how)
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
                    self.rig.computed(batch)
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

    def crowd(self, seed, n_steps=150):
        """Requests that come back all the time, many at once, some of which are cancelled."""
        rng, flying, live, cancelled = random.Random(seed), {lane: [] for lane in Lane}, {}, set()
        for step in range(n_steps + 800):
            if step < n_steps and len(live) < 8 and rng.random() < 0.5:
                salt, n_text = b"%d" % rng.randrange(12), rng.choice([22, 41, 60])
                request = make_request(f"r{step}", n_text, (), rng.randint(1, 6), salt=salt)
                live[request.id] = request
                self.s.add(request, self.now)
            if live and rng.random() < 0.2:
                name = rng.choice(list(live))
                del live[name]
                cancelled.add(name)
                assert self.s.cancel(name)
            self.rig.turn(self.now)
            for lane in Lane:
                batch = self.s.next(self.now, lane).batch if not flying[lane] else None
                if batch is not None:
                    flying[lane] = [(batch, step + rng.randint(0, 2))]
                if flying[lane] and flying[lane][0][1] <= step:
                    batch, _ = flying[lane].pop()
                    self.rig.computed(batch)
                    for outcome in self.s.apply(self.device.run(batch), self.now):
                        said = self.said.setdefault(outcome.seq.id, [])
                        said.extend(outcome.tokens)
                        if outcome.seq.id in live and len(said) == live[outcome.seq.id].max_tokens:
                            assert said == expected_tokens(live.pop(outcome.seq.id))
            self.s.check()
            self.now += 1.0
            if step >= n_steps and not (live or any(flying.values()) or self.rig.busy or self.s.fetching.live):
                break
        assert not live
        self.caches.check(idle=True)
        self.hosted.check(idle=True)


def rounds(n_rounds=2, n=6):
    """The same prompts again; together they are larger than the device's caches."""
    return [make_request(f"r{r}.{i}", 60, (), 4, salt=b"%d" % i) for r in range(n_rounds) for i in range(n)]


@pytest.mark.parametrize("more", [{}, {WINDOW: 30, STATE: 12}], ids=["full", "all kinds"])
def test_what_the_device_has_evicted_is_copied_back(more):
    n_prompt = 60
    assert Instance(0, more).serve(*rounds()).n_computed == 2 * 6 * n_prompt
    kept = Instance(150, more).serve(*rounds())
    assert kept.n_computed == 6 * n_prompt + 6 * 4
    room = kept.s.room
    assert room.n_tokens_asked == 12 * n_prompt and room.n_tokens_found == sum(room.n_tokens_from.values())
    assert room.n_tokens_from == {"host": 6 * (n_prompt - 4)}, "the device had none of it any more"
    assert Instance(20, more).serve(*rounds()).n_computed > 6 * n_prompt + 6 * 4, (
        "found though it was evicted there, too"
    )


@pytest.mark.parametrize("more", [{}, {WINDOW: 30, STATE: 12}], ids=["full", "all kinds"])
def test_a_crowd_gets_its_tokens_while_prefixes_come_and_go(more, monkeypatch):
    """Some are computed while their beginning is on its way, and leave before it is there."""
    ahead, came, gone = [], Fetching._came, []

    def noted(fetching, one, *, ok):
        room, seq = fetching._room, one.shift.seq
        ahead.append(seq.id)
        gone.extend([] if one.held is None or (room.holds(seq.id) and room.lease_of(seq) is one.room) else [seq.id])
        return came(fetching, one, ok=ok)

    monkeypatch.setattr(Fetching, "_came", noted)
    for seed in range(20):
        Instance(300, more, ordered=0.9, slowest=9.0).crowd(seed)
    assert len(ahead) > 10 and (gone or more)


def forget_to_hold(patch):
    """A copy on its way writes over what another request has by then."""
    patch.setattr(SequenceRoom, "hold_fetched", lambda room, *_: room.caches.hold("nobody", "kv", []))


def publish_at_the_end(patch):
    """What is computed behind a copy is found before what is copied."""
    patch.setattr(Fetching, "computed", lambda *_: None)


def publish_before_the_copy(patch):
    """Others find what is still on its way from another tier."""
    real = Fetching.begin

    def mutated(self, seq, hit, *, arrives=False):
        real(self, seq, hit, arrives=arrives)
        self._room.fetched(seq, hit.fetches)

    patch.setattr(Fetching, "begin", mutated)


@pytest.mark.parametrize("mutate", [forget_to_hold, publish_at_the_end, publish_before_the_copy])
def test_a_mistake_is_caught_in_the_crowd(mutate, monkeypatch):
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        for seed in range(60):
            Instance(300, ordered=0.8, slowest=9.0).crowd(seed)


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
