"""Who goes next: ranks of requests and chunks, and that nobody is passed for long."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydrainfer.core import EncodeWork, Lane, LiveSequence, Request, Role, SamplingParams, Stage, StepBatch, TokenWork
from hydrainfer.scheduler import Budgets, Policy, Scheduler, backlog
from hydrainfer.scheduler.fair import Fair
from hydrainfer.scheduler.order import Order
from hydrainfer.scheduler.pace import Pace
from hydrainfer.scheduler.waiting import Waiting
from tests.scheduler.fakes import FakeDevice, expected_tokens, make_caches, make_request
from tests.scheduler.test_scheduler import ids, turn

pytestmark = pytest.mark.unit
EPD = Role.parse("EPD")
SEQ = LiveSequence(make_request("any"), (0.0, 0), 0.0)
POLICY = Policy(encode_wait_s=1.0)


def make(tokens=8, images=2, running=256, policy=POLICY, step_s=float("inf"), enough_s=float("inf"), **caches):
    budgets = Budgets(tokens=tokens, images=images, running=running, step_s=step_s, enough_s=enough_s)
    return Scheduler(EPD, make_caches(**caches), budgets, policy)


def test_a_prompt_that_came_later_and_takes_less_goes_before_the_next_chunk():
    s, device = make(), FakeDevice()
    s.add(make_request("long", n_text=40, max_tokens=1), 0.0)
    assert ids(turn(s, device, Lane.LANGUAGE)[0]) == [("long", 8)]
    s.add(make_request("short", n_text=3, max_tokens=1), 0.05)  # 37 tokens more, a ms each, are worth 0.12 s of waiting
    s.add(make_request("late", n_text=3, max_tokens=1), 0.5)
    batches = [ids(turn(s, device, Lane.LANGUAGE)[0]) for _ in range(5)]
    assert batches == [[("short", 3), ("long", 5)], *[[("long", 8)]] * 3, [("long", 3), ("late", 3)]]


def test_pictures_do_not_hold_up_text_where_lanes_take_turns():
    s, device = make(tokens=64), FakeDevice()
    s.add(make_request("picture", pictures=[1]), 0.0)
    assert not s.gate.prefers_language()
    s.add(make_request("text"), 0.2)
    assert s.gate.prefers_language()
    turn(s, device, Lane.LANGUAGE, now=0.2)
    assert not s.gate.prefers_language()  # the text decodes
    s.add(make_request("late", n_text=3), 1.5)
    assert not s.gate.prefers_language()


def test_text_that_finds_no_place_does_not_hold_up_pictures():
    s = make(tokens=64, running=1)
    s.add(make_request("picture", pictures=[1, 2, 3]), 0.0)
    turn(s, FakeDevice(), Lane.VISION)  # one of three is left
    s.add(make_request("text"), 0.0)
    assert not s.gate.prefers_language() and s.next(0.0, Lane.VISION).batch is not None


@pytest.mark.parametrize("order", ["rank", "fcfs"])
def test_the_backlog_is_told_by_size_where_short_prompts_go_first(order):
    s = make(policy=Policy(order=order))
    for name, n in (("a", 3), ("long", 40), ("b", 2)):
        s.add(make_request(name, n_text=n), 0.0)
    assert backlog(s) == (0, 45, 0, ((2, 5), (1, 40)) if order == "rank" else ())
    turn(s, FakeDevice(), Lane.LANGUAGE)  # of 8 tokens
    assert backlog(s).n_tokens == 37 and (order == "fcfs" or backlog(s).sizes == ((1, 37),))


def test_equals_are_told_apart():
    """Choices of a request that began at different instances may have the same age and as much left."""
    waiting, seqs = Waiting(Fair(Pace(EPD), 0.0)), [LiveSequence(make_request(name), (0.0, 0), 0.0) for name in "abc"]
    for seq in seqs:
        waiting.add(seq)
    for seq in (seqs[1], seqs[0], seqs[2]):
        assert seq in waiting
        waiting.remove(seq)
        assert seq not in waiting
    assert not waiting and waiting.n_tokens == 0


@pytest.mark.parametrize(("priority", "first"), [(0, "early"), (1, "late"), (-1, "early"), (99, "late")])
def test_priority_is_worth_some_seconds_of_waiting(priority, first):
    s = make(tokens=4)
    s.add(make_request("early", n_text=4), 0.0)
    s.add(make_request("late", n_text=4, priority=priority), 9.0)
    assert ids(s.next(30.0, Lane.LANGUAGE).batch) == [(first, 4)]


@pytest.mark.parametrize("priority", [2, 99])
def test_priority_is_bounded(priority):
    s = make(tokens=4)
    s.add(make_request("early", n_text=4), 0.0)
    s.add(make_request("late", n_text=4, priority=priority), 21.0)
    assert ids(s.next(30.0, Lane.LANGUAGE).batch) == [("early", 4)]


def test_only_so_many_are_half_way():
    s, device = make(tokens=4, policy=Policy(half_way=3)), FakeDevice()
    for i in range(6):  # each takes less than those before, and goes first
        s.add(make_request(f"r{i}", n_text=60 - 8 * i, max_tokens=1), 0.0)
        turn(s, device, Lane.LANGUAGE)
    assert list(s.prefilling) == ["r0", "r1", "r2"] and s.n_waiting == 3
    s.add(make_request("small", n_text=3, max_tokens=1), 0.0)  # is done within a batch
    assert ids(turn(s, device, Lane.LANGUAGE)[0])[0] == ("small", 3)


def test_ranks_follow_the_measured_pace():
    order, text = (
        Order(EPD, Policy()),
        Request(id="r", prompt_ids=(1,) * 100, sampling=SamplingParams(), max_tokens=4, seed=0),
    )
    batch = StepBatch(1, Lane.LANGUAGE, [TokenWork(SEQ, 0, 100, False)], 100)
    assert not order.observe(batch, 0.12)  # close enough to what was assumed
    assert order.rank(text, (2.0, 0), 100, 0)[0] == pytest.approx(2.0 + 0.1 / 0.3)
    assert order.observe(batch, 0.9)
    measured = (0.12 * 0.9 + 0.9) / 190
    assert order.pace.seconds(100, 2) == pytest.approx(100 * measured + 0.6)
    decodes = StepBatch(2, Lane.LANGUAGE, [TokenWork(SEQ, 0, 1, True)], 1, 1)
    assert not order.observe(decodes, 50.0)
    assert order.observe(StepBatch(3, Lane.VISION, [EncodeWork(SEQ, 0)], 1), 2.0)
    assert Pace(Role.parse("E")).seconds(100, 0) == Pace(Role.parse("D")).seconds(9, 9) == 0.0


def test_the_least_time_is_half_of_the_fastest_that_large_batches_showed():
    pace = Pace(EPD)
    for n, seconds in ((10, 0.01), (1000, 2.0), (500, 0.5), (2000, 2.0)):
        pace.observe(StepBatch(1, Lane.LANGUAGE, [TokenWork(SEQ, 0, n, False)], n), seconds)
        assert pace.least_s(0, 5) == 0.0
    assert pace.least_s(100, 5) == pytest.approx(0.05)


def test_a_prompt_that_is_almost_done_in_time_is_done():
    s = make(tokens=1000, kv_blocks=1000, step_s=0.4)  # a millisecond per token is assumed
    for name, n_text in (("little more", 490), ("more", 900)):
        s.add(make_request(name, n_text=n_text, max_tokens=1), 0.0)
        assert s.next(0.0, Lane.LANGUAGE).batch.work[0].count == {"little more": 490, "more": 400}[name]
        s.cancel(name)


def test_chunks_and_vision_batches_take_no_longer_than_a_step_may():
    s, device = make(tokens=1000, images=4, kv_blocks=1000, step_s=0.4), FakeDevice()
    s.add(make_request("long", n_text=2500, max_tokens=1), 0.0)

    def chunk(token_s):
        batch = s.next(0.0, Lane.LANGUAGE).batch
        s.apply(device.run(batch), 0.0)
        s.observe(batch, batch.n_items * token_s)
        return batch.n_items

    assert [chunk(2e-3), chunk(2e-3), chunk(4e-3)] == [400, 200, 200]  # the first before anything is known
    assert [chunk(40e-3), chunk(40e-3)] == [100, 64]  # no smaller ones
    s.add(make_request("other", n_text=10, max_tokens=1), 0.0)
    batch = s.next(0.0, Lane.LANGUAGE).batch
    assert ids(batch) == [("other", 10)]  # what is left of the time makes no chunk
    s.apply(device.run(batch), 0.0)
    assert s.next(0.0, Lane.LANGUAGE).batch.n_items == 64
    s.add(make_request("pictures", pictures=[1, 2, 3, 4]), 0.0)
    assert len(turn(s, device, Lane.VISION, now=9.0)[0].work) == 1  # 0.3 s each, it is assumed
    s.observe(StepBatch(1, Lane.VISION, [EncodeWork(SEQ, 0)], 1), 0.13)
    assert len(turn(s, device, Lane.VISION, now=9.0)[0].work) == 3


def test_a_long_batch_ends_with_the_prompt_or_the_picture_that_it_is_at():
    s, device = make(tokens=1000, images=4, kv_blocks=1000, step_s=0.5, enough_s=0.1), FakeDevice()
    for i, n_text in enumerate((20, 70, 60, 300, 30)):  # a millisecond per token is assumed
        s.add(make_request(f"r{i}", n_text=n_text, max_tokens=1), float(i))
    assert turn(s, device, Lane.LANGUAGE)[0].n_items == 20 + 70 + 60
    assert turn(s, device, Lane.LANGUAGE)[0].n_items == 300
    s.add(make_request("long", n_text=900, max_tokens=1), 0.0)
    assert [turn(s, device, Lane.LANGUAGE)[0].n_items for _ in range(2)] == [500, 400]
    s.add(make_request("pictures", pictures=[1, 2, 3, 4]), 5.0)
    s.observe(StepBatch(1, Lane.VISION, [EncodeWork(SEQ, 0)], 1), 0.12)
    assert len(turn(s, device, Lane.VISION, now=9.0)[0].work) == 1
    for _ in range(20):
        s.observe(StepBatch(1, Lane.VISION, [EncodeWork(SEQ, 0)], 1), 0.03)
    assert len(turn(s, device, Lane.VISION, now=9.0)[0].work) == 3


def test_a_new_pace_reorders_who_waits():
    s, device = make(tokens=64), FakeDevice()
    s.add(make_request("now", n_text=64, max_tokens=1), 0.0)
    batch = s.next(0.0, Lane.LANGUAGE).batch
    s.add(make_request("large", n_text=50, max_tokens=1), 0.0)
    s.add(make_request("small", n_text=5, max_tokens=1), 1.0)
    assert [q.id for q in s.waiting.ready] == ["large", "small"]
    s.apply(device.run(batch), 1.0)
    assert s.observe(batch, 6.4)
    assert [q.id for q in s.waiting.ready] == ["small", "large"]
    s.check()


traces = st.lists(
    st.tuples(
        st.integers(1, 40),  # text tokens
        st.integers(0, 3),  # pictures
        st.integers(1, 8),  # max_tokens
        st.integers(0, 25),  # arrives at step
        st.integers(-1, 3),  # priority
    ),
    min_size=2,
    max_size=16,
)
STEP_S = 0.1


@settings(max_examples=200, deadline=None)
@given(
    trace=traces,
    tokens=st.integers(2, 30),
    images=st.integers(1, 3),
    running=st.integers(1, 8),
    kv_blocks=st.integers(18, 50),
    half_way=st.integers(1, 4),
    ageing=st.sampled_from([0.03, 0.3, 3.0]),
)
def test_a_request_is_passed_only_by_those_that_arrived_within_the_bound(
    trace, tokens, images, running, kv_blocks, half_way, ageing
):
    policy = Policy(ageing=ageing, boost_s=0.5, half_way=half_way, encode_wait_s=0.3, headroom_tokens=2)
    s = make(tokens, images, running, policy, kv_blocks=kv_blocks, embed_blocks=8)
    requests = [
        (at, make_request(f"r{i}", n_text, range(10 * i, 10 * i + n), out, priority=priority))
        for i, (n_text, n, out, at, priority) in enumerate(trace)
    ]
    order = Order(EPD, policy)
    largest_s = max(order.pace.seconds(r.n_prompt + r.max_tokens, len(r.media)) for _, r in requests)
    bound_s = largest_s / ageing + 2 * policy.boost_s * policy.max_priority
    watch, device, got, step = Watch(s, bound_s), FakeDevice(), {}, 0
    while step <= 25 or s.n_running or s.n_waiting:
        for at, request in requests:
            if at == step:
                s.add(request, step * STEP_S)
        for lane in Lane:
            batch = watch.next(step * STEP_S, lane)
            if batch is not None:
                for outcome in s.apply(device.run(batch), step * STEP_S):
                    got.setdefault(outcome.seq.id, []).extend(outcome.tokens)
            s.check()
        step += 1
        assert step < 3000, "some request never ended"
    assert {r.id: expected_tokens(r) for _, r in requests} == got


class Watch:
    """Looks at each batch who is in it and who had to wait."""

    def __init__(self, scheduler, bound_s):
        self.s, self.bound_s = scheduler, bound_s
        self.no_room = {}  # waited for room when last tried

    def next(self, now, lane):
        s = self.s
        waited = [*s.waiting.pictured, *s.waiting.ready]
        n_begun = sum(q.started for q in s.prefilling.values())
        turn = s.next(now, lane)
        if turn.preempted:
            self.no_room.clear()  # may have been rewound, and rank as before or worse
        left = [q for q in waited if q in s.waiting]
        admitted = [q for q in waited if q not in s.waiting]
        for r in [r for r in self.no_room.values() if r in s.waiting]:
            self.not_passed(r, admitted)
        queue = s.waiting.ready if lane is Lane.LANGUAGE else s.waiting.pictured
        for r in [q for q in left if q in queue]:
            self.not_passed(r, [q for q in admitted if bool(q.request.media) is (lane is Lane.VISION)])
        if turn.batch is None:
            return None
        group = s.prefilling if lane is Lane.LANGUAGE else s.encoding
        chosen = {w.seq.id: w.seq for w in turn.batch.work[turn.batch.n_decodes :]}
        for r in group.values():
            if r.id not in chosen:
                self.not_passed(r, chosen.values())
        other = s.waiting.pictured if lane is Lane.LANGUAGE else s.waiting.ready
        if not queue or (other and other.first.rank < queue.first.rank):  # who may wait for the same room
            return turn.batch
        r = queue.first
        passed = any(q.rank > r.rank for q in chosen.values())
        if passed and s.n_running < s.budgets.running and n_begun < s.policy.half_way:
            visit = r.plan[r.cursor :]
            assert not s.room.reserve(r, s.room.finder.match(r, visit), visit), "passed though it had room"
            self.no_room[r.id] = r
        return turn.batch

    def not_passed(self, r, by):
        for q in by:
            assert q.rank < r.rank, f"{q} goes before {r}"
            assert q.order[0] < r.order[0] + self.bound_s


def test_the_watch_sees_who_is_passed():
    s = make()
    s.add(make_request("first"), 0.0)
    s.add(make_request("second"), 9.0)
    first, second = s.waiting.ready
    with pytest.raises(AssertionError, match="goes before"):
        Watch(s, 1.0).not_passed(first, [second])
    assert first.stage is Stage.PREFILL


def test_a_request_that_others_wait_for_has_the_best_rank_among_them():
    s, device = make(tokens=8, policy=Policy(shared_tokens=8)), FakeDevice()
    s.add(make_request("first", n_text=60, max_tokens=1, salt=b""), 0.0)
    assert ids(turn(s, device, Lane.LANGUAGE)[0]) == [("first", 8)]
    s.add(make_request("other", n_text=20, max_tokens=1, salt=b"mine"), 0.0)
    assert ids(turn(s, device, Lane.LANGUAGE)[0]) == [("other", 8)]
    s.add(make_request("urgent", n_text=60, max_tokens=1, salt=b"", priority=2), 0.1)
    batches = [ids(turn(s, device, Lane.LANGUAGE)[0]) for _ in range(8)]
    assert batches[:6] == [[("first", 8)]] * 6 and ("urgent", 4) in batches[7] + batches[6]
    assert s.prefilling["other"].rest[0] > 0


@settings(max_examples=150, deadline=None)
@given(
    specs=st.lists(
        st.tuples(st.integers(0, 2), st.integers(12, 60), st.integers(-2, 2), st.integers(0, 12)),
        min_size=3,
        max_size=12,
    ),
    tokens=st.integers(4, 24),
)
def test_no_request_of_worse_rank_goes_before_one_that_others_wait_for(specs, tokens):
    """An urgent request that shares what another computes is not held up by whom it would pass itself."""
    s, device = make(tokens=tokens, policy=Policy(shared_tokens=8), kv_blocks=400), FakeDevice()
    todo = [
        (arrives, make_request(f"r{i}", n, max_tokens=1, salt=b"%d" % group, priority=priority))
        for i, (group, n, priority, arrives) in enumerate(specs)
    ]
    for step in range(400):
        for arrives, request in todo:
            if arrives == step:
                s.add(request, 0.1 * step)
        if step > 12 and not s.n_running and not s.n_waiting:
            return
        computed, waiting = list(s.prefilling.values()), list(s.waiting.ready)
        batch = s.next(0.1 * step, Lane.LANGUAGE).batch
        prefilled = [work.seq for work in batch.work] if batch else []
        for waits in waiting:  # whoever is not the first to go may be looked at a step later
            others = [o for o in computed if s.room.finder.computed_by(o, waits, (Stage.PREFILL,), 8)]
            if not others:
                break
            first = next((i for i, seq in enumerate(prefilled) if seq in others), len(prefilled))
            assert all(seq.rank <= waits.rank for seq in prefilled[:first])
        if batch:
            s.apply(device.run(batch), 0.1 * step)
        s.check()
    raise AssertionError("some request never ended")
