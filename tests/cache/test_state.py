"""States: how few blocks they take, which are found again, that none is written while others may have it."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydrainfer.cache import CacheSet, Wishes, size_caches
from hydrainfer.core import Lane, Role, Stage, chain_of, chain_root
from hydrainfer.scheduler import Budgets, Scheduler
from tests.cache.other_kinds import STATE
from tests.scheduler.fakes import KV, FakeDevice, expected_tokens, make_request

pytestmark = pytest.mark.unit
B = STATE.block_tokens


def serve(scheduler, device, request):
    """Its answer is checked. Returns the lengths of its chunks, and the most blocks that it held while it decoded."""
    said, chunks, most = [], [], 0
    scheduler.add(request, 0.0)
    while scheduler.get(request.id) is not None:
        batch = scheduler.next(0.0, Lane.LANGUAGE).batch
        (work,) = batch.work
        if work.seq.stage is Stage.DECODE:
            most = max(most, len(work.seq.hold.blocks[STATE.name]))
        else:
            chunks.append(work.count)
        said += [t for o in scheduler.apply(device.run(batch), 0.0) for t in o.tokens]
        scheduler.check()
    assert said == expected_tokens(request)
    return chunks, most


def alone(tokens=64, blocks=40):
    return Scheduler(Role.parse("PD"), CacheSet({KV: 200, STATE: blocks}), Budgets(tokens=tokens)), FakeDevice()


@pytest.mark.parametrize("tokens", [1, 3, 4, 7, 64])
def test_a_decoding_request_holds_two_blocks_whatever_its_length(tokens):
    for n in (1, 3, 4, 5, 20, 131):
        scheduler, device = alone(tokens, 3)
        assert serve(scheduler, device, make_request("r", n, max_tokens=40, salt=b""))[1] == STATE.most(1) == 2
        scheduler.room.caches.check(idle=True)


@given(st.lists(st.booleans(), max_size=12), st.integers(0, 60))
def test_the_safe_length_is_the_furthest_state_that_is_there(there, n_most):
    found = [7 if here and i else None for i, here in enumerate(there)]
    want = max((i * B for i, block in enumerate(found) if block is not None and i * B <= n_most), default=0)
    assert STATE.safe(found, n_most) == want
    assert [i for i, block in enumerate(STATE.reusable(None, found, want)) if block is not None] == [want // B][:want]


@given(st.integers(0, 40), st.integers(1, 40))
def test_a_chunk_writes_no_state_of_a_boundary_before_it(start, count):
    held = [10, 11, 12]
    source, written = STATE.scan(held, start, count)
    stop = start + count
    assert source == (-1 if not start else 10 if start % B == 0 else 11)
    assert [block for _, block in written] == [11, 12][: len(written)] and written[-1][0] == stop
    boundaries = {n for n, _ in written} - {stop}
    assert boundaries == ({stop // B * B} - {stop} if stop // B * B > start else set())


@given(st.integers(1, 40), st.integers(0, 9), st.data())
def test_of_the_states_of_drafts_the_last_boundary_and_the_newest_stay(start, n_drafts, data):
    held = list(range(10, 10 + STATE.with_drafts(n_drafts)))
    source, written = STATE.scan(held, start, 1 + n_drafts, True)
    assert source == (10 if start % B == 0 else 11)
    assert written == tuple((start + i, 10 + i) for i in range(1, n_drafts + 2))
    n_computed = start + 1 + data.draw(st.integers(0, n_drafts))
    kept = [held[i] for i in STATE.after_drafts(start, n_computed)]
    after = {block: n for n, block in written}
    boundary = n_computed // B * B
    assert kept[0] == 10 and [after[block] for block in kept[1:]] == sorted(
        {boundary, n_computed} - set(range(start + 1))
    )


def test_chunks_end_where_a_request_may_go_on():
    """Before the last token, behind the last picture, and where it parts from what is cached."""
    scheduler, device = alone()
    assert serve(scheduler, device, make_request("first", 24, max_tokens=2, salt=b""))[0] == [20, 4]
    longer = make_request("longer", 31, max_tokens=2, salt=b"")
    assert serve(scheduler, device, longer)[0] == [7], "begins where the first one's prompt ended"
    with_picture = make_request("picture", n_text=20, pictures=[1])  # 26 tokens, the picture ends at 7
    assert STATE.stops(with_picture) == [4]
    assert STATE.written(with_picture, 0, 4, stops=(4,)) == [range(1, 2)]
    assert STATE.written(with_picture, 8, 13, stops=(4,)) == []
    assert STATE.written(with_picture, 8, 13, leaves=True) == [range(3, 4)]
    assert STATE.written(with_picture, 13, 26) == [range(6, 7)]


def test_the_third_to_begin_alike_finds_what_the_second_had_to_compute_again():
    scheduler, device = alone()
    for i, (name, found) in enumerate((("a", 0), ("b", 0), ("c", 12))):
        request = make_request(name, 14, max_tokens=1, salt=b"")
        ids = (*request.prompt_ids, 50 + i, 51, 52, 53, 54)
        request = msgspec.structs.replace(request, prompt_ids=ids, keys=chain_of(chain_root(b""), ids, B))
        before = scheduler.room.n_tokens_found
        serve(scheduler, device, request)
        assert scheduler.room.n_tokens_found - before == found
    assert scheduler.room.n_tokens_missed == 12


def test_a_move_takes_the_state_of_the_last_boundary_and_those_after_it():
    moved = {n: list(STATE.moved(None, n)) for n in (0, 1, 4, 5, 8, 11)}
    assert moved == {0: [], 1: [1], 4: [1], 5: [1, 2], 8: [2], 11: [2, 3]}


def test_sizes_count_requests_not_tokens():
    sizes = size_caches([KV, STATE], Wishes(n_tokens=16 * 1024), 1e9)
    assert sizes == {KV: 16 * 1024 // B, STATE: 16 * 4}
