"""Windows: how many blocks they take, which are found again, how memory is shared out with caches that keep all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydrainfer.cache import (
    CacheSet,
    FullSpec,
    SlidingPool,
    WindowSpec,
    Wishes,
    host_sizes,
    size_caches,
    tokens_in,
    too_small,
)
from hydrainfer.core import Lane, Role, Stage
from hydrainfer.scheduler import Budgets, Policy, Scheduler
from tests.scheduler.fakes import KV, FakeDevice, expected_tokens, make_request

pytestmark = pytest.mark.unit


def window_over(full, window, ahead=8):
    return WindowSpec("window", full.block_tokens, full.parts, (1,), window, ahead=ahead)


def held_while_decoding(spec, n_prompt, n_new, tokens, salt=None):
    """The most blocks of a window that a request holds when it decodes; its answer is checked."""
    caches = CacheSet({KV: KV.blocks_for(n_prompt + n_new) + 40, spec: spec.most(spec.ahead) + 20})
    scheduler = Scheduler(Role.parse("PD"), caches, Budgets(tokens=tokens), Policy(headroom_tokens=16))
    request, device, said, most = make_request("r", n_prompt, max_tokens=n_new, salt=salt), FakeDevice(spec), [], 0
    scheduler.add(request, 0.0)
    while scheduler.get("r") is not None:
        batch = scheduler.next(0.0, Lane.LANGUAGE).batch
        seq = batch.work[0].seq
        if seq.stage is Stage.DECODE:
            most = max(most, len(seq.hold.blocks[spec.name]))
        assert len(seq.hold.blocks[spec.name]) <= spec.most(spec.ahead)
        said += [token for o in scheduler.apply(device.run(batch), 0.0) for token in o.tokens]
    assert said == expected_tokens(request)
    caches.check(idle=True)
    return most


@pytest.mark.parametrize("tokens", [1, 3, 64])
@pytest.mark.parametrize("window", [1, 3, 4, 5, 17])
def test_a_decoding_request_holds_as_many_blocks_whatever_its_length(window, tokens):
    """ceil((W - 1) / B) + 1, as the design says."""
    spec = window_over(KV, window)
    most = {held_while_decoding(spec, n, 40, tokens, salt=b"") for n in (20, 50, 131)}
    assert most == {-(-(window - 1) // KV.block_tokens) + 1} == {spec.most(1)}


def test_as_many_behind_two_thousand_tokens_as_behind_thirty_thousand():
    spec = window_over(KV, 128, ahead=2048)
    assert {held_while_decoding(spec, n, 5, 2048, salt=b"") for n in (2048, 32768)} == {33}


@given(st.integers(1, 20), st.lists(st.booleans(), max_size=12), st.integers(0, 60))
def test_the_safe_length_is_the_longest_whose_window_is_there(window, there, n_most):
    spec, found = window_over(KV, window), [7 if here else None for here in there]
    ends = range(min(len(found), n_most // 4), -1, -1)
    want = next(e * 4 for e in ends if all(there[max(0, e * 4 - window + 1) // 4 : e]))
    assert spec.safe(found, n_most) == want
    shared = spec.reusable(None, found, want)
    assert all(block is not None for block in shared[spec.stale(want) : want // 4])
    assert sum(block is not None for block in shared) == want // 4 - spec.stale(want)


def test_only_the_windows_of_resume_points_are_published():
    spec = window_over(KV, 7)
    request = make_request("r", n_text=23, pictures=[1])  # 29 tokens, the picture ends at 7
    assert spec.written(request, 0, 20) == [range(1)]
    assert spec.written(request, 20, 29) == [range(5, 7)]
    assert spec.written(request, 29, 35) == []
    assert spec.written(request, 29, 35, leaves=True) == [range(6, 8)]


def test_a_block_counts_once_for_each_holder():
    """So who gives back a block that another holds on to can always take one for it."""
    pool = SlidingPool(4)
    mine = pool.take(2)
    pool.publish(mine, 0, [b"a", b"b"])
    assert pool.n_available == 2 and pool.n_shared_of(mine) == 2
    pool.share(mine[0])
    assert pool.n_available == 1
    pool.drop([mine[0]])
    mine += pool.take(1)
    assert pool.n_available == 1
    pool.check(mine)


def test_caches_of_both_kinds_are_full_at_the_same_time():
    """The caches of gemma-3-4b: 5 layers keep all, 29 a window of 1024."""
    full = FullSpec.of(layers=5, kv_heads=4, head_dim=256, dtype="bfloat16")
    window = WindowSpec.over(full, 1024, tuple(range(29)))
    wishes = Wishes(n_longest=131072)
    sizes = size_caches([full, window], wishes, 16e9)
    assert sum(spec.block_bytes * n for spec, n in sizes.items()) == pytest.approx(16e9, rel=1e-3)
    n_requests = {spec: (n - spec.least(wishes)) / spec.held_by(8192) for spec, n in sizes.items()}
    assert n_requests[full] == pytest.approx(n_requests[window], rel=0.01)
    assert not too_small(sizes, wishes) and tokens_in(sizes) == sizes[full] * 16
    given = size_caches([full, window], wishes, 0.0, {"kv_cache_gib": 8 << 30})
    assert sum(spec.block_bytes * n for spec, n in given.items()) == pytest.approx(8 << 30, rel=1e-3)
    tiny = size_caches([full, window], wishes, 0.0, {"kv_cache_gib": 20 << 20})
    assert too_small(tiny, wishes)
    hosted = host_sizes([full, window], wishes, 8 << 30)
    n_hosted = {spec.name: n / spec.held_by(8192) for spec, n in hosted.items()}
    assert n_hosted[full.name] == pytest.approx(n_hosted[window.name], rel=0.01)
    assert sum(spec.block_bytes * n for spec, n in hosted.items()) == pytest.approx(8 << 30, rel=1e-3)
    assert not host_sizes([full, window], wishes, 1 << 20)
