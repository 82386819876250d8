"""Tenants: each gets its share of an instance while others wait, whatever it asks for."""

from itertools import combinations

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hydrainfer.core import Handoff, Lane, Role, Share, Stage
from hydrainfer.scheduler import Budgets, Policy, Scheduler
from tests.scheduler.fakes import FakeDevice, expected_tokens, make_caches, make_request
from tests.scheduler.test_scheduler import turn

pytestmark = pytest.mark.unit
TENANTS = (Share("a", 1.0), Share("b", 2.0), Share("c", 0.5))
LONGEST = 12  # tokens of a prompt
COST_S = LONGEST * 1e-3  # before anything is measured


def make(role="EPD", tokens=8, order="rank", credit_s=0.0):
    return Scheduler(Role.parse(role), make_caches(), Budgets(tokens=tokens), Policy(order=order, credit_s=credit_s))


def request(name, share, **fields):
    return msgspec.structs.replace(make_request(name, **fields), share=share)


@settings(max_examples=150, deadline=None)
@example([(0, TENANTS[0], LONGEST)] * 6 + [(9, TENANTS[2], 1), (0, TENANTS[1], 1)], 4, "fcfs", 0.02)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(TENANTS), st.integers(1, LONGEST)), min_size=1, max_size=60),
    st.integers(4, 24),
    st.sampled_from(["rank", "fcfs"]),
    st.sampled_from([0.0, 0.02]),
)
def test_counters_of_those_who_wait_are_near_each_other(trace, tokens, order, credit_s):
    """Each entry: turns that pass before it comes, whose it is, the length of its prompt."""
    s, device, requests = make(tokens=tokens, order=order, credit_s=credit_s), FakeDevice(), []
    now, got = 0.0, {}

    def step():
        nonlocal now
        now += 0.01
        for outcome in (turn(s, device, Lane.LANGUAGE, now) or (None, ()))[1]:
            got[outcome.seq.id] = outcome.tokens
        s.check()
        waiting = {q.request.share for q in s.waiting.ready}
        for one, other in combinations(waiting, 2):
            apart = abs(s.fair.counters[one.tenant] - s.fair.counters[other.tenant])
            assert apart <= credit_s + COST_S / one.weight + COST_S / other.weight + 1e-9

    for i, (pause, share, n) in enumerate(trace):
        for _ in range(pause):
            step()
        requests.append(request(f"r{i}", share, n_text=n, max_tokens=1))
        s.add(requests[-1], now)
    while s.waiting or s.n_running:
        step()
        assert now < 100.0, "somebody waits for ever"
    assert got == {r.id: tuple(expected_tokens(r)) for r in requests}


def test_an_instance_is_divided_by_weight_and_a_late_tenant_goes_first_but_saves_nothing_up():
    s, device = make(tokens=4), FakeDevice()
    for i in range(60):
        s.add(request(f"a{i}", TENANTS[0], n_text=4, max_tokens=1), 0.0)
    served = [turn(s, device, Lane.LANGUAGE, 0.0)[0].work[0].seq.id for _ in range(20)]
    assert served == [f"a{i}" for i in range(20)]
    for i in range(60):
        s.add(request(f"b{i}", TENANTS[1], n_text=4, max_tokens=1), 5.0)
    served = [turn(s, device, Lane.LANGUAGE, 5.0)[0].work[0].seq.id for _ in range(30)]
    assert [name[0] for name in served].count("b") == 20, "twice the weight"
    assert served.index("b0") <= 1, "beside sixty that are older"


def test_a_tenant_decodes_at_its_own_cost():
    s, device = make(tokens=64), FakeDevice()
    for share in TENANTS[:2]:
        s.add(request(share.tenant, share, n_text=4, max_tokens=9), 0.0)
    turn(s, device, Lane.LANGUAGE, 0.0)
    before = dict(s.fair.counters)
    batch, _ = turn(s, device, Lane.LANGUAGE, 0.1)
    s.observe(batch, 0.5)
    assert s.fair.counters == pytest.approx({"a": before["a"] + 0.25, "b": before["b"] + 0.125})


def test_offers_go_by_tenant():
    s = make("D")
    shares = [TENANTS[0], TENANTS[0], TENANTS[1]]
    offers = []
    for i, share in enumerate(shares):
        seq = Scheduler(Role.parse("P"), make_caches(), Budgets()).add(request(f"r{i}", share), float(i))
        offers.append((Stage.DECODE, Handoff.of(seq, {}, "P0", 1, {})))
    assert s.fair.offers(offers[:2]) == offers[:2]
    s.fair.counters["a"] = 1.0
    assert [h.request.id for _, h in s.fair.offers(offers)] == ["r2", "r0", "r1"]


def test_offers_go_as_requests_that_wait_do():
    """ "a" came first, but has had more than "b", who comes now and then. Else an offer that may not pass a request
    that found no room could be asked about first for ever."""
    s = make("PD", credit_s=0.1)
    s.add(request("b0", TENANTS[1]), 0.0)  # it comes: for a while, whoever has had more yields
    s.fair._now, s.fair._visited, s.fair._least = 1.0, 1.1, 0.94
    s.fair.counters.update(a=0.99, b=0.94)
    offers = []
    for i, share in enumerate((TENANTS[0], TENANTS[1])):
        seq = Scheduler(Role.parse("P"), make_caches(), Budgets()).add(request(f"r{i}", share), float(i))
        offers.append((Stage.DECODE, Handoff.of(seq, {}, "P0", 1, {})))
    here = [handoff.sequence(0.0) for _, handoff in offers]
    first = min(here, key=s.fair.turn_of)
    assert first.id == "r1" and s.fair.offers(offers)[0][1].request.id == "r1"


def test_a_tenant_whose_first_request_finds_no_room_waits_for_it():
    """The instance is full of another's, and this one's offer is asked about again and again."""
    s, offers = make("D"), []
    for share in TENANTS[:2]:
        seq = Scheduler(Role.parse("P"), make_caches(), Budgets()).add(request(share.tenant, share, n_text=200), 0.0)
        seq.cursor, seq.n_computed = seq.plan.index(Stage.DECODE), 200
        offers.append(Handoff.of(seq, {"kv": tuple(range(50))}, "P0", 1, {"kv": None}))
    assert s.expect(offers[0], 0.0) is not None
    for _ in range(2):
        ((_, offer),) = s.fair.offers([(Stage.DECODE, offers[1])])
        assert not s.repeats(offer, 0.0) and s.expect(offer, 0.0) is None
    assert s.repeats(offers[0], 0.0), "it is here already: a late copy of its offer holds nobody up"


def test_a_flooding_tenant_fills_batches_only_a_little_while_others_come_and_go():
    """A token takes a millisecond as long as nothing is measured."""
    s, device = make(tokens=120, credit_s=0.1), FakeDevice()

    def batch():
        return [item.seq.id for item in turn(s, device, Lane.LANGUAGE, 0.0)[0].work]

    for i in range(40):
        s.add(request(f"a{i}", TENANTS[0], n_text=30, max_tokens=1), 0.0)
    assert batch() == ["a0", "a1", "a2", "a3"], "nobody else has come"
    assert batch() == ["a4", "a5", "a6", "a7"]
    s.add(request("b0", TENANTS[1], n_text=30, max_tokens=1), 0.0)
    assert batch() == ["b0"], "it waits for nobody whom its batch could be filled up with"
    small = [batch() for _ in range(3)]
    assert [len(b) for b in small] == [1] * 3, "nor will the next one for a long batch"
    assert len(batch()) == 4, "nobody has come for as long as the credit"


def test_a_tenant_is_not_left_out_of_a_batch_that_another_may_not_fill():
    """ "b" came now and then and has had a little; "c" has had more, though less than "a", and goes first by rank."""
    s, device = make(tokens=120, credit_s=0.1), FakeDevice()

    def batch():
        return [item.seq.id for item in turn(s, device, Lane.LANGUAGE, 0.0)[0].work]

    for i in range(8):
        s.add(request(f"a{i}", TENANTS[0], n_text=30, max_tokens=1), 0.0)
    assert [len(batch()), len(batch())] == [4, 4]
    s.add(request("b0", TENANTS[1], n_text=60, max_tokens=1), 0.0)
    assert batch() == ["b0"]
    s.fair.counters["c"] = 0.18
    assert s.fair.counters == pytest.approx({"a": 0.24, "b": 0.14, "c": 0.18})
    for i in range(2):
        s.add(request(f"c{i}", TENANTS[2], n_text=30, max_tokens=1), 1.0)
    s.add(request("b1", TENANTS[1], n_text=90, max_tokens=1), 2.0)
    assert batch() == ["b1"], "c0 would leave no time for c1, which would end the batch"
    assert batch() == ["c0"]


def test_a_tenant_that_always_waits_does_not_make_batches_small():
    s, device = make(tokens=120, credit_s=0.1), FakeDevice()
    for i in range(40):
        for share in TENANTS[:2]:
            s.add(request(f"{share.tenant}{i}", share, n_text=30, max_tokens=1), 0.0)
    sizes = [len(turn(s, device, Lane.LANGUAGE, 0.0)[0].work) for _ in range(20)]
    assert sizes == [4] * 20
