"""While another tenant waits, nobody has more than its share of the places."""

from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydrainfer.core import Lane, Role, Share
from hydrainfer.scheduler import Budgets, Policy, Scheduler
from tests.cluster.virtual import Cluster
from tests.scheduler.fakes import FakeDevice, expected_tokens, make_caches, make_request
from tests.scheduler.test_scheduler import turn

pytestmark = pytest.mark.unit
A, B, C = Share("a", 1.0), Share("b", 1.0), Share("c", 2.0)
N = 6


def make(credit_s=1.0):
    caches = make_caches(kv_blocks=4000)
    return Scheduler(Role.parse("EPD"), caches, Budgets(tokens=64, running=N), Policy(credit_s=credit_s))


def request(name, share, **fields):
    return msgspec.structs.replace(make_request(name, **fields), share=share)


class Rig:
    def __init__(self):
        self.s, self.device, self.now, self.got = make(), FakeDevice(), 0.0, {}
        self.requests = []

    def add(self, name, share, **fields):
        self.requests.append(request(name, share, **fields))
        self.s.add(self.requests[-1], self.now)

    def step(self):
        self.now += 0.01
        for outcome in (turn(self.s, self.device, Lane.LANGUAGE, self.now) or (None, ()))[1]:
            self.got.setdefault(outcome.seq.id, []).extend(outcome.tokens)
        self.s.check()

    def held(self):
        return Counter(q.request.share.tenant for g in (self.s.prefilling, self.s.decoding) for q in g.values())

    def finish(self):
        n = 0
        while self.s.waiting or self.s.n_running:
            self.step()
            n += 1
            assert n < 5000, "somebody waits for ever"
        for r in self.requests:
            assert self.got[r.id] == expected_tokens(r)


def test_the_first_tenant_gives_up_the_places_that_others_wait_for_and_no_more():
    rig = Rig()
    for i in range(20):
        rig.add(f"a{i}", A, max_tokens=40)
    for _ in range(4):
        rig.step()
    assert rig.held() == {"a": N}
    rig.add("b0", B, max_tokens=3)
    for _ in range(2):
        rig.step()
    assert rig.held() == {"a": N - 1, "b": 1}
    for i in range(20):
        rig.add(f"b{i + 1}", B, max_tokens=40)
    for _ in range(3):
        rig.step()
    assert rig.held() == {"a": N // 2, "b": N // 2}
    rig.finish()


def test_shares_are_by_weight():
    rig = Rig()
    for i in range(20):
        rig.add(f"a{i}", A, max_tokens=30)
    for _ in range(3):
        rig.step()
    for i in range(20):
        rig.add(f"c{i}", C, max_tokens=30)
    for _ in range(3):
        rig.step()
    assert rig.held() == {"a": 2, "c": 4}
    rig.finish()


def test_one_tenant_has_all_places():
    rig = Rig()
    for i in range(10):
        rig.add(f"a{i}", A, max_tokens=10)
    rig.step()
    assert rig.held() == {"a": N}
    rig.finish()
    assert not rig.s.n_preemptions


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([A, B, C]), st.integers(1, 12)), max_size=40))
def test_everybody_is_served(trace):
    rig = Rig()
    for i, (pause, share, n) in enumerate(trace):
        for _ in range(pause):
            rig.step()
        rig.add(f"r{i}", share, max_tokens=n)
    rig.finish()


@pytest.mark.parametrize("layout", ["1EPD", "1EP1D", "1E1P1D", "2EPD"])
def test_a_tenant_gets_its_share_of_places_also_between_instances(layout):
    cluster = Cluster(layout, kv_blocks=400, embed_blocks=32)
    requests = [request(f"a{i}", A, max_tokens=120) for i in range(12)]
    for r in requests:
        cluster.submit(r)
    cluster.run(30.0)
    requests += [request(f"b{i}", B, max_tokens=2) for i in range(2)]
    for r in requests[-2:]:
        cluster.submit(r)
    cluster.run(60.0)
    assert all(cluster.end(r.id).finish_reason == "length" for r in requests[-2:]), "no a has ended yet"
    assert not any(o.finish_reason for o in cluster.outputs if o.request_id[0] == "a")
    cluster.run()
    for r in requests:
        assert cluster.tokens(r.id) == expected_tokens(r) and cluster.end(r.id).finish_reason == "length"
    cluster.check_whole()
