"""KV found again: as much as there can be, never what is another's, and nothing computed or encoded for it."""

import time
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydrainfer.cache import CacheSet, FullSpec, Wishes, share_memory
from hydrainfer.core import (
    InternalError,
    Lane,
    LiveSequence,
    MediaSpan,
    Request,
    Role,
    SamplingParams,
    Stage,
    StepResult,
    chain_of,
    chain_root,
    split_chain,
)
from hydrainfer.scheduler import Budgets, Policy, Scheduler
from hydrainfer.scheduler.finding import missing_pictures
from hydrainfer.scheduler.room import SequenceRoom
from tests.cache.other_kinds import STATE, WINDOW
from tests.scheduler.fakes import EMBED, KV, FakeDevice, expected_tokens, make_request, placeholders, shown_ids

pytestmark = pytest.mark.unit
BLOCK = KV.block_tokens


@dataclass
class Turn:
    """One turn of a tree of conversations: what it says after turn `parent` and its answer (None: from the start)."""

    parent: int | None
    text: list
    picture: int | None
    max_tokens: int
    salt: bytes


turns = st.lists(
    st.builds(
        Turn,
        st.one_of(st.none(), st.integers(0, 8)),
        st.lists(st.integers(1, 2), min_size=1, max_size=9),
        st.one_of(st.none(), st.integers(0, 2)),
        st.integers(1, 9),
        st.sampled_from([b"", b"", b"mine"]),
    ),
    min_size=1,
    max_size=9,
)


def requests_of(tree):
    """The requests of a tree, in order. Pictures have equal ids and, by number, different contents."""
    made = []
    for i, turn in enumerate(tree):
        before = made[turn.parent] if turn.parent is not None and turn.parent < i else None
        ids = [*before.prompt_ids, *expected_tokens(before)] if before else [3]
        media = list(before.media) if before else []
        if turn.picture is not None:
            gaps = ((2, 1), (3, 6)) if turn.picture == 2 else ()
            media.append(MediaSpan(len(ids), 6, b"picture%d" % turn.picture, "px", gaps=gaps))
            ids += shown_ids(media[-1])
        ids += turn.text
        made.append(
            Request(
                id=f"r{i}",
                prompt_ids=tuple(ids),
                sampling=SamplingParams(max_tokens=turn.max_tokens),
                max_tokens=turn.max_tokens,
                seed=0,
                media=tuple(media),
                keys=chain_of(chain_root(turn.salt), ids, BLOCK, media),
            )
        )
    return made


def facts(request, tokens):
    """For each token, what it is and of which picture."""
    shown = {p: (m.key, p - m.start) for m in request.media for p in range(m.start, m.end)}
    return [(t, shown.get(p)) for p, t in enumerate(tokens)]


def oracle(request, earlier):
    """The longest prefix that an earlier request of the same salt computed, in whole blocks, less the last token."""
    best = 0
    for other in earlier:
        if other.keys[:16] == request.keys[:16]:
            mine = facts(request, request.prompt_ids)
            theirs = facts(other, [*other.prompt_ids, *expected_tokens(other)[:-1]])
            same = next((i for i, (a, b) in enumerate(zip(mine, theirs)) if a != b), min(len(mine), len(theirs)))
            best = max(best, same // BLOCK)
    return min(best, (request.n_prompt - 1) // BLOCK) * BLOCK


def scheduler(kv_blocks=4000, embed_blocks=400, more=None, **policy):
    caches = CacheSet({KV: kv_blocks, EMBED: embed_blocks, **(more or {})})
    return Scheduler(Role.parse("EPD"), caches, Budgets(tokens=24, images=2), Policy(**policy)), FakeDevice()


def closed(s, requests):
    """What is found of every chain is a beginning of it."""
    pool = s.room.caches.pools[KV.name]
    for request in requests:
        tokens = [*request.prompt_ids, *expected_tokens(request)]
        chain = split_chain(chain_of(request.keys[:16], tokens, BLOCK, request.media))[1:]
        there = [key in pool for key in chain]
        assert there == sorted(there, reverse=True), "a block outlived one before it"


def run(s, device, requests):
    """Until all have ended; their tokens and how much of each was found."""
    found, got = {}, {}
    for request in requests:
        s.add(request, 0.0)
    for _ in range(4000):
        for lane in Lane:
            batch = s.next(0.0, lane).batch
            if batch is None:
                continue
            for outcome in s.apply(device.run(batch), 0.0):
                found[outcome.seq.id] = outcome.seq.n_cached
                got.setdefault(outcome.seq.id, []).extend(outcome.tokens)
            s.check()
        if not s.n_running and not s.n_waiting:
            break
    for request in requests:
        assert got[request.id] == expected_tokens(request)
    return found


@settings(max_examples=100, deadline=None)
@given(tree=turns)
def test_with_room_for_all_everything_is_found_that_can_be(tree):
    s, device = scheduler()
    requests = requests_of(tree)
    for i, request in enumerate(requests):
        assert run(s, device, [request])[request.id] == oracle(request, requests[:i])
        closed(s, requests)
    s.room.caches.check(idle=True)


def same_tokens(request, other):
    """How many of its prompt are those of what the other computed."""
    if other.keys[:16] != request.keys[:16]:
        return 0
    mine, theirs = facts(request, request.prompt_ids), facts(other, [*other.prompt_ids, *expected_tokens(other)[:-1]])
    return next((i for i, (a, b) in enumerate(zip(mine, theirs)) if a != b), min(len(mine), len(theirs)))


def points(request, found, n_chained):
    """The ends of blocks at which its state is kept: of its prompt, of its last picture, of its answer, and where it
    parted from what was computed before."""
    n_last = request.n_prompt + len(expected_tokens(request)) - 1
    ends = [request.n_prompt - 1, request.n_prompt, n_last, n_chained, *(m.end for m in request.media[-1:])]
    return {end // BLOCK * BLOCK for end in ends if end // BLOCK * BLOCK > found}


@settings(max_examples=100, deadline=None)
@given(tree=turns)
def test_with_room_for_all_states_are_found_wherever_they_are_kept(tree):
    s, device = scheduler(more={STATE: 400})
    requests, kept, missed = requests_of(tree), [], 0
    for i, request in enumerate(requests):
        n_chained = oracle(request, requests[:i])
        there = [end for other, ends in kept for end in ends if end <= min(same_tokens(request, other), n_chained)]
        found = run(s, device, [request])[request.id]
        assert found == max(there, default=0)
        kept.append((request, points(request, found, n_chained)))
        missed += n_chained - found
        closed(s, requests)
    assert s.room.n_tokens_missed == missed
    s.room.caches.check(idle=True)


@settings(max_examples=150, deadline=None)
@given(tree=turns, at_once=st.integers(1, 4), spare=st.integers(0, 12), headroom=st.integers(0, 6))
def test_with_few_blocks_what_is_found_is_right_and_whole(tree, at_once, spare, headroom):
    requests = requests_of(tree)
    most = max(KV.blocks_for(r.n_prompt + r.max_tokens) for r in requests)
    s, device = scheduler(most + spare, 2 * max(len(r.media) for r in requests) + 2, headroom_tokens=headroom)
    for i in range(0, len(requests), at_once):
        now = requests[i : i + at_once]
        for name, n in run(s, device, now).items():
            request = next(r for r in now if r.id == name)
            assert n <= oracle(request, requests[: i + at_once])
        closed(s, requests)
    s.room.caches.check(idle=True)


@settings(max_examples=60, deadline=None)
@given(tree=turns, fails=st.sets(st.integers(0, 12), max_size=4))
def test_blocks_of_a_failed_batch_are_never_found(tree, fails):
    """Nor is anything that was to follow: the device of the tests asserts that what it reads was written."""
    s, device, n = *scheduler(), 0
    for request in requests_of(tree):
        s.add(request, 0.0)
        while s.n_running or s.n_waiting:
            for lane in (Lane.LANGUAGE, Lane.VISION):
                if (batch := s.next(0.0, lane).batch) is None:
                    continue
                n += 1
                failed = StepResult(batch, error=InternalError("the device failed"))
                s.apply(failed if n in fails else device.run(batch), 0.0)
                s.check()
    s.room.caches.check(idle=True)


def test_a_block_is_found_only_when_its_last_token_is_computed():
    s, device = scheduler()
    seq = s.add(make_request("r", n_text=15, max_tokens=9, salt=b""), 0.0)
    s.apply(device.run(s.next(0.0, Lane.LANGUAGE).batch), 0.0)
    assert (seq.n_computed, len(seq.tokens)) == (15, 16)
    pool = s.room.caches.pools[KV.name]
    keys = split_chain(chain_of(chain_root(b""), seq.tokens, BLOCK))[1:]
    assert [key in pool for key in keys] == [True, True, True, False]


def test_the_second_to_compute_a_block_adopts_the_first_one():
    """Else that would be evicted before those that continue it."""
    s, device = scheduler(kv_blocks=12, headroom_tokens=0)
    requests = [make_request(f"r{n}", n_text=9, max_tokens=n, salt=b"") for n in (1, 16)]
    run(s, device, requests)
    assert s.room.caches.usage()[KV.name] == (12, 0, 6)
    for n_text in (25, 33, 41):
        run(s, device, [make_request(f"other{n_text}", n_text=n_text, max_tokens=1)])
        closed(s, requests)


def test_a_picture_inside_the_hit_is_neither_encoded_nor_leased():
    s, device = scheduler()
    run(s, device, [make_request("first", n_text=4, pictures=[1, 2], max_tokens=1, salt=b"")])
    s.room.caches.pools[EMBED.name].take(400)  # the embeddings are evicted
    s.room.caches.pools[EMBED.name].drop(range(400))
    s.add(make_request("second", n_text=9, pictures=[1, 2], salt=b""), 0.0)
    assert s.next(0.0, Lane.VISION).batch is None
    batch = s.next(0.0, Lane.LANGUAGE).batch
    assert batch.n_items == 21 - 16 and not batch.work[0].seq.hold.blocks[EMBED.name]
    s.apply(device.run(batch), 0.0)
    assert device.n_encoded == {b"picture1": 1, b"picture2": 1}


def test_a_picture_that_the_hit_only_reaches_into_is_encoded():
    s, device = scheduler()
    run(s, device, [make_request("first", n_text=1, pictures=[1, 2], max_tokens=1, salt=b"")])  # 13 tokens: 3 blocks
    s.room.caches.pools[EMBED.name].take(400)
    s.room.caches.pools[EMBED.name].drop(range(400))
    s.add(make_request("second", n_text=5, pictures=[1, 2], salt=b""), 0.0)
    (work,) = s.next(0.0, Lane.VISION).batch.work
    assert work.index == 1 and len(work.seq.hold.blocks[EMBED.name]) == 2 and work.seq.n_computed == 12


def test_equal_answers_are_kept_once():
    s, device = scheduler()
    run(s, device, [make_request(f"r{i}", n_text=9, max_tokens=12, salt=b"") for i in range(4)])
    blocks = s.room.caches.usage()[KV.name]
    assert blocks[1:] == (0, 20 // BLOCK), "twenty tokens are computed of each, in whole blocks"


def prefilled(device):
    """Tokens of each language batch that prefilled."""
    return [n for lane, n, _ in device.batches if lane is Lane.LANGUAGE]


@pytest.mark.parametrize("more", [{}, {WINDOW: 60}, {STATE: 60}], ids=["", "window", "state"])
@pytest.mark.parametrize("pictures", [[], [1]])
def test_a_prefix_that_is_being_computed_is_waited_for_and_shared(pictures, more):
    s, device = scheduler(shared_tokens=8, more=more)
    requests = [make_request(f"r{i}", n_text=40, pictures=pictures, max_tokens=1, salt=b"") for i in range(8)]
    found = run(s, device, requests)
    n = requests[0].n_prompt
    assert sum(prefilled(device)) == n + 7 * (n - (n - 1) // BLOCK * BLOCK)
    assert sorted(found.values()) == [0, *[(n - 1) // BLOCK * BLOCK] * 7] and sum(device.n_encoded.values()) <= 1


def test_a_request_that_waits_for_anothers_prefill_is_passed_by_unrelated_ones():
    s, _ = scheduler(shared_tokens=8, order="fcfs")
    for name, salt in (("first", b""), ("same", b""), ("other", b"mine"), ("short", b"")):
        s.add(make_request(name, n_text=16, max_tokens=1, salt=salt) if name != "short" else make_request(name), 0.0)
    assert [(w.seq.id, w.count) for w in s.next(0.0, Lane.LANGUAGE).batch.work] == [("first", 16), ("other", 8)]
    assert [seq.id for seq in s.waiting.ready] == ["same", "short"]


def test_a_thousand_who_wait_for_one_prefill_are_not_all_looked_at_in_every_step():
    (s, device), looked = scheduler(encode_wait_s=0.0), []
    for i in range(1000):
        s.add(make_request(f"r{i}", n_text=400, pictures=[1], salt=b"s"), 0.0)
    for lane in (Lane.VISION, Lane.LANGUAGE):
        s.apply(device.run(s.next(0.0, lane).batch), 0.0)
    finder = s.room.finder
    finder.computed_by, computed_by = lambda *a: looked.append(a) or computed_by(*a), finder.computed_by
    assert s.next(1.0, Lane.VISION).batch is None and len(looked) <= 100


@pytest.mark.parametrize(("n_text", "waits"), [(40, False), (20, True)])
def test_little_in_common_is_not_waited_for_unless_it_is_half_of_what_is_to_be_computed(n_text, waits):
    s, _ = scheduler(shared_tokens=16)
    s.add(make_request("first", n_text=13, max_tokens=1, salt=b""), 0.0)  # its first 12 tokens could be shared
    s.add(make_request("second", n_text=n_text, max_tokens=1, salt=b""), 0.0)
    assert [w.seq.id for w in s.next(0.0, Lane.LANGUAGE).batch.work] == ["first", "second"][: 2 - waits]


def test_a_prefill_that_is_cancelled_keeps_nobody_waiting():
    s, device = scheduler(shared_tokens=8)
    for name in ("first", "second"):
        s.add(make_request(name, n_text=60, max_tokens=1, salt=b""), 0.0)
    batch = s.next(0.0, Lane.LANGUAGE).batch
    s.cancel("first")
    s.apply(device.run(batch), 0.0)
    assert [w.seq.id for w in s.next(0.0, Lane.LANGUAGE).batch.work] == ["second"]


def test_a_waiting_request_that_skipped_the_encoder_leaves_for_one_if_the_kv_is_evicted():
    s, device = scheduler(kv_blocks=40)
    run(s, device, [make_request("first", n_text=9, pictures=[1], max_tokens=1, salt=b"")])
    caches = s.room.caches
    s = Scheduler(Role.parse("P"), caches, Budgets(tokens=24, running=1), Policy(order="fcfs"))
    s.add(make_request("busy", n_text=30), 0.0)
    again, gone = (s.add(make_request(n, n_text=12, pictures=[1], salt=b""), 0.0) for n in ("again", "gone"))
    turn = s.next(0.0, Lane.LANGUAGE)
    assert turn.batch is not None and again.stage is Stage.PREFILL and not turn.departed
    s.cancel(gone.id)
    s.check()
    for pool in caches.pools.values():
        taken = pool.take(pool.n_available)
        pool.drop(taken)
    assert s.next(0.0, Lane.LANGUAGE).departed == [again]
    assert again.stage is Stage.ENCODE and not s.n_waiting
    s.check()


def test_a_request_without_keys_shares_nothing():
    s, device = scheduler()
    for name in ("first", "second"):
        assert run(s, device, [make_request(name, n_text=20)]) == {name: -1}
    assert s.room.n_tokens_wanted == 0 and s.room.caches.usage()[KV.name][2] == 0


def test_4096_tokens_are_looked_up_in_no_time():
    spec = FullSpec.of(layers=1, kv_heads=1, head_dim=1, dtype="float32")
    room, ids, visit = SequenceRoom(CacheSet({spec: 600}), 0), (1,) * 4097, (Stage.PREFILL, Stage.DECODE)
    keys = chain_of(chain_root(b""), ids, 16)
    made = Request(id="r", prompt_ids=ids, sampling=SamplingParams(), max_tokens=9, seed=0, keys=keys)
    seq = LiveSequence(made, (0.0, 0), 0.0)
    assert room.reserve(seq, room.finder.match(seq, visit), visit)
    seq.n_computed = 4096
    room.settle(seq)
    room.release(seq)
    seconds = []
    for _ in range(50):
        again = LiveSequence(made, (0.0, 0), 0.0)
        start_s = time.perf_counter()
        assert room.finder.match(again, visit).n_tokens == 4096
        seconds.append(time.perf_counter() - start_s)
        room.release(again)
    assert min(seconds) < 250e-6  # 45 µs measured; slower where the machine is busy


@pytest.mark.parametrize("role", ["EPD", "PD"])
def test_a_request_that_evicts_its_own_prefix_to_find_room_has_its_picture_encoded(role, monkeypatch):
    """A request whose prompt is in the caches needs no embeddings. Where it finds room only once all that is cached has
    gone, it needs them after all."""
    sizes = share_memory({KV: 20, STATE: 6}, Wishes())
    caches, device = CacheSet({**sizes.blocks, EMBED: 2}, sizes.split), FakeDevice()
    s = Scheduler(Role.parse("EPD"), caches, Budgets(tokens=64))

    def run():
        while s.n_running or s.n_waiting:
            for lane in (Lane.LANGUAGE, Lane.VISION):
                if (batch := s.next(0.0, lane).batch) is not None:
                    s.apply(device.run(batch), 0.0)
                    s.check()

    for name, picture, salt in (
        ("first", 0, b""),
        ("other", 1, None),
    ):  # which leaves the cache no embeddings of picture 0
        s.add(make_request(name, n_text=12, pictures=[picture], max_tokens=2, salt=salt), 0.0)
        run()
    s = Scheduler(Role.parse(role), caches, Budgets(tokens=64))
    reserve, full = caches.reserve, [True]
    monkeypatch.setattr(caches, "reserve", lambda *args: None if full and full.pop() else reserve(*args))
    s.add(make_request("again", n_text=12, pictures=[0], max_tokens=2, salt=b""), 0.0)
    if role == "PD":  # beside an encoder
        assert [seq.id for seq in s.waiting.ready] == ["again"], "it goes past the encoder"
        turn = s.next(0.0, Lane.LANGUAGE)
        assert turn.batch is None and [seq.id for seq in turn.departed] == ["again"]
        assert s.migrating["again"].stage is Stage.ENCODE and not s.room.holds("again")
        s.check()
        return
    run()
    assert not full and device.n_encoded[b"picture0"] == 2
    caches.check(idle=True)


def test_a_picture_is_needed_until_its_last_placeholder_is_computed_and_no_longer():
    request = make_request("r", 9, [1, 2], gaps={1: ((2, 1), (5, 9)), 2: ((4, 4),)})
    absent, last = {EMBED.name: [None] * 4}, dict.fromkeys(range(2), 0)
    for position, (span, _) in placeholders(request).items():
        last[request.media.index(span)] = position
    for n_computed in range(request.n_prompt):
        needed = [i for i, position in last.items() if position >= n_computed]
        assert missing_pictures(request, [EMBED], absent, n_computed) == needed
        assert len(EMBED.need(request, n_computed, request.n_prompt)) == 2 * len(needed)
