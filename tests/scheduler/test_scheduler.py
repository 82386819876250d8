"""Algorithm 1 and its two deviations, on hand-made cases; first come, first served where the case is about something
else. `test_order.py` is about ranks."""

import pytest

from hydrainfer.core import Grammar, InvalidRequest, Lane, LiveSequence, MediaSpan, Request, Role, SamplingParams, Stage
from hydrainfer.scheduler import Budgets, Policy, Scheduler
from hydrainfer.scheduler.filling import add_chunk
from tests.scheduler.fakes import FakeDevice, make_caches, make_request

pytestmark = pytest.mark.unit

FCFS = Policy(order="fcfs")


def make(budgets=None, policy=None, role="EPD", **caches):
    return Scheduler(Role.parse(role), make_caches(**caches), budgets or Budgets(tokens=8, images=2), policy or FCFS)


def turn(scheduler, device, lane, now=0.0):
    batch = scheduler.next(now, lane).batch
    scheduler.check()
    if batch is None:
        return None
    outcomes = scheduler.apply(device.run(batch), now)
    scheduler.check()
    return batch, outcomes


def ids(batch):
    return [(w.seq.id, w.count) for w in batch.work]


@pytest.mark.parametrize(
    ("order", "second"), [("fcfs", [("a", 1), ("b", 3), ("c", 4)]), ("rank", [("a", 1), ("c", 2), ("b", 3)])]
)
def test_decodes_first_then_chunks_of_who_has_begun_and_who_waits_within_the_budget(order, second):
    s, device = make(Budgets(tokens=8), Policy(order=order)), FakeDevice()
    s.add(make_request("a", n_text=6), 0)
    turn(s, device, Lane.LANGUAGE)  # a decodes from now on
    s.add(make_request("b", n_text=10), 0)
    assert ids(turn(s, device, Lane.LANGUAGE)[0]) == [("a", 1), ("b", 7)]
    s.add(make_request("c", n_text=4 if order == "fcfs" else 2), 0)  # of rank, the less remains the sooner
    assert ids(turn(s, device, Lane.LANGUAGE)[0]) == second
    assert sorted(ids(turn(s, device, Lane.LANGUAGE)[0])) == [("a", 1), ("b", 1), ("c", 1)]


def test_prefill_first_stalls_decodes_until_nothing_is_left_to_prefill():
    s, device = make(Budgets(tokens=8), Policy(order="fcfs", batching="prefill-first")), FakeDevice()
    s.add(make_request("a", n_text=6), 0)
    turn(s, device, Lane.LANGUAGE)
    s.add(make_request("b", n_text=10), 0)
    s.add(make_request("c", n_text=4), 0)
    batches = [ids(turn(s, device, Lane.LANGUAGE)[0]) for _ in range(3)]
    assert batches == [[("b", 8)], [("b", 2), ("c", 4)], [("a", 1), ("b", 1), ("c", 1)]]


def test_a_text_request_starts_on_an_idle_instance():
    s = make()
    s.add(make_request("a"), 0)
    assert s.next(0.0, Lane.LANGUAGE).batch is not None  # verbatim Algorithm 1 (line 16) would wait for ever


def test_pictures_are_encoded_within_the_image_budget_across_batches():
    s, device = make(Budgets(tokens=64, images=2)), FakeDevice()
    s.add(make_request("a", pictures=[1, 2, 3]), 0)
    assert len(turn(s, device, Lane.VISION)[0].work) == 2
    assert s.next(0.0, Lane.LANGUAGE).batch is None  # not before all its pictures are there
    assert len(turn(s, device, Lane.VISION)[0].work) == 1
    assert ids(turn(s, device, Lane.LANGUAGE)[0]) == [("a", 23)]


def test_large_pictures_are_bounded_by_their_tokens_but_one_always_goes():
    s, device = make(Budgets(tokens=64, images=8, image_tokens=2 * 6), role="E", embed_blocks=64), FakeDevice()
    s.add(make_request("a", pictures=[1, 2, 3]), 0)
    s.add(make_request("b", pictures=[4]), 0)
    s.add(make_request("c", pictures=[5]), 0)
    batches = [[(w.seq.id, w.index) for w in turn(s, device, Lane.VISION)[0].work] for _ in range(3)]
    assert batches == [[("a", 0), ("a", 1)], [("a", 2), ("b", 0)], [("c", 0)]]
    s = make(Budgets(tokens=64, images=8, image_tokens=6 - 1), embed_blocks=64)
    s.add(make_request("d", pictures=[6, 7]), 0)
    assert [w.index for w in turn(s, FakeDevice(), Lane.VISION)[0].work] == [0]


@pytest.mark.parametrize("gate", ["paper", "aged"])
def test_the_gate_holds_encode_back_while_something_is_in_prefill(gate):
    s, device = make(policy=Policy(encode_gate=gate, encode_wait_s=1.0)), FakeDevice()
    s.add(make_request("text", n_text=30), 0)
    turn(s, device, Lane.LANGUAGE)
    s.add(make_request("picture", pictures=[1]), 0)
    assert s.next(0.9, Lane.VISION).batch is None
    late = s.next(1.0, Lane.VISION).batch
    assert (late is not None) == (gate == "aged")


@pytest.mark.parametrize("gate", ["paper", "aged"])
def test_steady_text_cannot_starve_a_picture_behind_an_aging_gate(gate):
    s, device = make(Budgets(tokens=4), Policy(encode_gate=gate, encode_wait_s=1.0)), FakeDevice()
    done = []
    for step in range(60):  # 61 is prime to the budget: there is always a prompt half way through prefill
        s.add(make_request(f"t{step}", n_text=61, max_tokens=1), step * 0.1)
        if step == 1:
            s.add(make_request("picture", pictures=[1], max_tokens=1), 0)
        for lane in reversed(Lane):
            if (out := turn(s, device, lane, step * 0.1)) is not None:
                done += [o.seq.id for o in out[1] if o.finish]
    assert bool(device.n_encoded) == (gate == "aged")
    assert done


def one_block_pictures(name, *pictures):
    return make_request(name, n_text=2, pictures=pictures, picture_tokens=4, max_tokens=1)


def test_a_request_that_would_only_hold_room_is_not_admitted_to_encode():
    s, device = make(Budgets(tokens=64, images=2)), FakeDevice()
    s.add(one_block_pictures("a", 1, 2, 3, 4, 5), 0)
    turn(s, device, Lane.VISION)
    s.add(one_block_pictures("b", 6), 0)
    turn(s, device, Lane.VISION)  # a fills this batch, too
    assert list(s.encoding) == ["a"]
    assert [w.seq.id for w in turn(s, device, Lane.VISION)[0].work] == ["a", "b"]


@pytest.mark.parametrize("order", ["rank", "fcfs"])
def test_a_request_that_waits_for_anothers_encoding_is_not_passed_for_ever(order):
    s, device, n, done = make(Budgets(tokens=64, images=2), Policy(order=order), embed_blocks=8), FakeDevice(), 0, []
    s.add(one_block_pictures("first", 1000, 1001, 1), 0)
    s.add(one_block_pictures("victim", *range(1, 9)), 0)
    for step in range(60):  # always somebody is half way through encoding one of the victim's pictures, evicted since
        while s.n_waiting < 4:
            s.add(one_block_pictures(f"y{n}", 2000 + n, 1 + (n + 1) % 8), step)
            n += 1
        for lane in Lane:
            if (out := turn(s, device, lane)) is not None:
                done += [o.seq.id for o in out[1] if o.finish]
    assert done[:2] == ["first", "victim"] if order == "fcfs" else {"first", "victim"} <= set(done[:24])


def test_one_picture_in_two_requests_is_encoded_once():
    s, device = make(Budgets(tokens=64, images=4)), FakeDevice()
    s.add(make_request("a", pictures=[1]), 0)
    s.add(make_request("b", pictures=[1, 2]), 0)  # waits while a encodes picture 1
    assert [w.seq.id for w in turn(s, device, Lane.VISION)[0].work] == ["a"]
    assert [(w.seq.id, w.index) for w in turn(s, device, Lane.VISION, now=9)[0].work] == [("b", 1)]
    while turn(s, device, Lane.LANGUAGE):
        pass
    s.add(make_request("c", pictures=[2, 1]), 0)  # both still cached: no vision batch at all
    assert s.next(0.0, Lane.VISION).batch is None
    assert ids(turn(s, device, Lane.LANGUAGE)[0]) == [("c", 17)]
    assert device.n_encoded == {b"picture1": 1, b"picture2": 1}


def test_one_picture_twice_in_a_request_is_encoded_once():
    s, device = make(Budgets(tokens=64, images=4)), FakeDevice()
    s.add(make_request("a", pictures=[1, 1]), 0)
    assert len(turn(s, device, Lane.VISION)[0].work) == 1
    assert ids(turn(s, device, Lane.LANGUAGE)[0]) == [("a", 17)]


def test_embeddings_are_released_after_prefill_but_stay_findable():
    s, device = make(Budgets(tokens=64)), FakeDevice()
    s.add(make_request("a", pictures=[1]), 0)
    turn(s, device, Lane.VISION)
    assert s.room.caches.usage()["embed"][1] == 2
    turn(s, device, Lane.LANGUAGE)
    assert s.room.caches.usage()["embed"][1:] == (0, 2)


def test_a_request_too_large_for_the_empty_cache_is_refused():
    s = make(kv_blocks=4)  # 16 tokens
    with pytest.raises(InvalidRequest, match="holds 16"):
        s.add(make_request("a", n_text=9, max_tokens=8), 0)
    s.add(make_request("b", n_text=8, max_tokens=8), 0)
    with pytest.raises(InvalidRequest, match="image cache"):
        make(embed_blocks=1).add(make_request("c", pictures=[1]), 0)
    s.check()


def test_the_youngest_is_preempted_and_its_tokens_are_kept():
    s, device = make(Budgets(tokens=64), Policy(headroom_tokens=0), kv_blocks=5), FakeDevice()
    s.add(make_request("old", n_text=8, max_tokens=8), 0)
    s.add(make_request("young", n_text=8, max_tokens=8), 0)
    while not s.n_preemptions:
        turn(s, device, Lane.LANGUAGE)
    young = s.get("young")
    assert "old" in s.decoding and young is s.waiting.ready.first
    assert young.attempt == 1 and young.n_produced > 0 and young.hold.blocks == {}


@pytest.mark.parametrize("order", ["rank", "fcfs"])
def test_no_later_request_passes_one_that_finds_no_room(order):
    s, device = make(Budgets(tokens=64), Policy(order=order), kv_blocks=8), FakeDevice()
    s.add(make_request("running", n_text=10, max_tokens=6), 0)
    turn(s, device, Lane.LANGUAGE)
    s.add(make_request("large picture", n_text=14, pictures=[1], max_tokens=4), 0)
    s.add(make_request("small text", n_text=2, max_tokens=2), 2.0)  # so much later that it cannot rank before
    assert turn(s, device, Lane.VISION) is None  # no room
    batch, _ = turn(s, device, Lane.LANGUAGE)
    assert ids(batch) == [("running", 1)]


def test_cancel_in_flight_frees_when_the_batch_lands():
    s, device = make(), FakeDevice()
    s.add(make_request("a", pictures=[1]), 0)
    batch = s.next(0.0, Lane.VISION).batch
    assert s.cancel("a") and not s.cancel("a")
    assert s.room.caches.usage()["embed"][1] == 2
    assert s.apply(device.run(batch), 0.0) == []
    assert s.room.caches.usage()["embed"] == (32, 0, 2)  # what was computed stays findable
    s.check()


def test_min_tokens_and_stop_tokens():
    request = make_request("a", max_tokens=9, sampling=SamplingParams(max_tokens=9, min_tokens=3, stop_token_ids=(5,)))
    seq = make().add(request, 0)
    seq.tokens += [5]
    assert seq.finish_reason(5) is None
    seq.tokens += [7, 5]
    assert seq.finish_reason(5) is None
    seq.tokens += [5]
    assert seq.finish_reason(5) == "stop"
    seq.tokens += [7] * 5
    assert seq.finish_reason(7) == "length"


@pytest.mark.parametrize("how", [{"min_tokens": 5}, {"ignore_eos": True}, {"min_tokens": 5, "ignore_eos": True}])
def test_the_end_of_a_grammar_ends_the_choice(how):
    """Before `min_tokens` the sampler takes an end token only if the grammar allows nothing else; a stop token may be
    part of the text."""
    grammar = Grammar("choice", '["red"]')
    sampling = SamplingParams(max_tokens=9, stop_token_ids=(5,), grammar=grammar, **how)
    seq = make().add(make_request("a", max_tokens=9, sampling=sampling, eos_ids=(2, 3)), 0)
    early = 0 if sampling.min_tokens == 0 else 4
    assert set(seq.request.ends_to_avoid(early)) >= {2, 3}
    seq.tokens += [7, 5]
    assert seq.finish_reason(7) is None
    assert (seq.finish_reason(5) is None) is (sampling.min_tokens == 5)
    seq.tokens += [3]
    assert seq.finish_reason(3) == "stop"


def test_min_tokens_and_ignore_eos_hold_without_a_grammar():
    for how in ({"min_tokens": 5}, {"ignore_eos": True}):
        sampling = SamplingParams(max_tokens=9, **how)
        seq = make().add(make_request("a", max_tokens=9, sampling=sampling, eos_ids=(2,)), 0)
        seq.tokens += [2, 2]
        assert seq.finish_reason(2) is None


def test_a_picture_of_a_cancelled_request_is_encoded_by_the_next_that_wants_it():
    s, device = make(Budgets(tokens=64, images=1)), FakeDevice()
    s.add(make_request("a", pictures=[1, 2]), 0)
    batch = s.next(0.0, Lane.VISION).batch  # picture 1 only
    s.cancel("a")
    s.apply(device.run(batch), 0.0)
    s.add(make_request("b", pictures=[2]), 0)
    assert [w.seq.id for w in turn(s, device, Lane.VISION)[0].work] == ["b"]


def test_a_half_evicted_picture_is_encoded_anew_into_blocks_nobody_shares():
    s, device = make(Budgets(tokens=64), embed_blocks=5), FakeDevice()
    s.add(make_request("a", pictures=[1], max_tokens=1), 0)
    turn(s, device, Lane.VISION)
    turn(s, device, Lane.LANGUAGE)
    pool = s.room.caches.pools["embed"]
    kept = [b for b in range(5) if pool.is_cached(b)]
    pool.take(4)  # evicts one of the two blocks of picture 1
    left = [b for b in kept if pool.is_cached(b)]
    assert len(left) == 1
    for b in range(5):
        if b not in left:
            pool.drop([b])
    hit = s.room.finder.match(s.add(make_request("b", pictures=[1]), 0), tuple(Stage))
    assert hit.blocks["embed"] == [None, None]
    batch = s.next(0.0, Lane.VISION).batch
    assert not set(batch.work[0].seq.hold.blocks["embed"]) & set(left)
    s.apply(device.run(batch), 0.0)
    assert set(batch.work[0].seq.hold.blocks["embed"]) & set(left), "the block that others find was not adopted"
    s.check()


@pytest.mark.parametrize("n_computed", [0, 2, 7])
def test_no_budget_is_no_chunk_even_if_the_cache_has_the_start_of_a_picture(n_computed):
    media = (MediaSpan(2, 16, b"k", "p", whole=True),)
    request = Request(id="a", prompt_ids=(1,) * 30, sampling=SamplingParams(), max_tokens=2, seed=0, media=media)
    seq, work = LiveSequence(request, (0.0, 0), 0.0), []
    seq.n_computed, seq.hold.capacity = n_computed, 64
    assert add_chunk(work, seq, 0, first=True) == 0 and not work


@pytest.mark.parametrize("budget", range(1, 12))
def test_no_chunk_ends_inside_a_picture_that_sees_itself_whole_nor_in_a_text_inside_it(budget):
    span = MediaSpan(4, 6, b"k", "p", whole=True, gaps=((2, 3), (5, 4)))
    request = Request(id="a", prompt_ids=(1,) * 17, sampling=SamplingParams(), max_tokens=2, seed=0, media=(span,))
    seq, work = LiveSequence(request, (0.0, 0), 0.0), []
    seq.hold.capacity = 64
    while seq.n_computed < 17:
        seq.n_computed += add_chunk(work, seq, budget, first=True)
    ends = {item.start + item.count for item in work}
    assert {4, 14} <= ends | {seq.n_computed} or budget > 4
    assert not ends & set(range(5, 14)) and 17 in ends
