"""Random traffic through a scheduler and a device that knows what every cache slot holds."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydrainfer.cache import CacheSet, CacheSizes, Wishes, share_memory
from hydrainfer.core import Grammar, Lane, Role, SamplingParams, Stage
from hydrainfer.scheduler import Budgets, Policy, Scheduler
from tests.cache.other_kinds import STATE, WINDOW
from tests.scheduler.fakes import EMBED, KV, DictTier, FakeDevice, Guessing, expected_tokens, make_request
from tests.scheduler.store import FakeMover, FakeStore, StoreRig

pytestmark = pytest.mark.unit


def held_by(seq):
    return {name: list(blocks) for name, blocks in seq.hold.blocks.items()}


GAPS = {4: ((2, 1), (5, 2))}  # by picture
requests = st.lists(
    st.tuples(
        st.integers(1, 20),  # text tokens
        st.lists(st.integers(0, 4), max_size=3),  # pictures
        st.integers(1, 16),  # max_tokens
        st.integers(0, 30),  # arrives at step
        st.one_of(st.none(), st.integers(0, 60)),  # cancelled at step
        st.sampled_from([SamplingParams(), SamplingParams(), SamplingParams(grammar=Grammar("json", "{}"))]),
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=300, deadline=None)
@given(
    specs=requests,
    kv_blocks=st.integers(15, 40),
    embed_blocks=st.integers(6, 12),
    tokens=st.integers(1, 40),
    images=st.integers(1, 4),
    running=st.integers(1, 8),
    gate=st.sampled_from(["paper", "aged"]),
    batching=st.sampled_from(["stage-level", "prefill-first"]),
    headroom=st.integers(0, 8),
    salts=st.sampled_from([[None], [b""], [None, b"", b"mine"]]),
    window=st.sampled_from([0, 5, 9]),
    states=st.sampled_from([0, 3, 9]),
    elastic=st.booleans(),
    gap_s=st.sampled_from([None, 0.0, 0.003]),
    drafts=st.sampled_from([None, 0.0, 0.5, 0.9]),
    landing=st.sampled_from([0, 8, 60]),
    tier=st.sampled_from([0, 0, 12, 400]),
    store=st.sampled_from([None, None, "good", "bad"]),
    ahead=st.booleans(),
    eos=st.sampled_from([(), tuple(range(10, 25))]),
    seed=st.integers(0, 2**16),
)
def test_every_request_ends_with_its_tokens_within_budgets_and_pools_come_back_whole(
    specs,
    kv_blocks,
    embed_blocks,
    tokens,
    images,
    running,
    gate,
    batching,
    headroom,
    salts,
    window,
    states,
    elastic,
    gap_s,
    drafts,
    landing,
    tier,
    store,
    ahead,
    eos,
    seed,
):
    """Also with kinds that keep little of a request: a window, and a state, which cannot take back what was drafted;
    with caches that lend each other memory; with host memory for preempted ones, to and from which some copies fail;
    with a shared store, which fails in all ways if it is bad; and with the next batch launched `ahead`, while tokens of
    the one before are not known and may prove to be ends."""
    rng = random.Random(seed)
    budgets = Budgets(tokens=tokens, images=images, running=running, gap_s=gap_s, wait_s=2000 * (gap_s or 0.0))
    shared = rng.choice([1, 8, 64])
    policy = Policy(
        encode_gate=gate, encode_wait_s=5.0, headroom_tokens=headroom, batching=batching, shared_tokens=shared
    )
    sizes = {KV: kv_blocks, EMBED: embed_blocks, WINDOW: window, STATE: states}
    sizes = {spec: n for spec, n in sizes.items() if n}
    caches = CacheSet(*(share_memory(sizes, Wishes()) if elastic else CacheSizes(sizes)))
    hosted = CacheSet({spec: landing for spec in caches.specs.values() if landing and spec is not EMBED})
    got, ended, cancelled, device = {}, set(), set(), FakeDevice()
    if drafts is not None:
        device = Guessing(device, drafts, rng)
    tiers = [DictTier(device, tier)] if tier else []
    store = FakeStore(device, lambda: float(step), rng, store == "bad") if store else None
    rig = StoreRig(caches, store, FakeMover(device, rng, bad=True), [tier.name for tier in tiers])
    s = Scheduler(Role.parse("EPD"), caches, budgets, policy, hosted, tiers, rig.tier)
    rig.attach(s)
    flying = {lane: [] for lane in Lane}  # batches, and which blocks their sequences held when they were launched
    todo = []
    for i, (n_text, pictures, max_tokens, arrives, cancel_at, sampling) in enumerate(specs):
        more = {"salt": rng.choice(salts), "sampling": sampling, "eos_ids": eos, "gaps": GAPS}
        todo.append((arrives, cancel_at, make_request(f"r{i}", n_text, pictures, max_tokens, **more)))

    def settle(lane):
        batch, held = flying[lane].pop(0)
        for item, (first, blocks) in zip(batch.work, held, strict=True):
            now = {name: item.seq.hold.blocks[name][: len(before)] for name, before in blocks.items()}
            assert (item.seq.hold.first_block, now) == (first, blocks), "blocks became others while a lane used them"
        s.observe(batch, 1e-3 * (batch.n_items if lane is Lane.LANGUAGE else 8 * batch.n_items))
        rig.computed(batch)
        for outcome in s.apply(device.run(batch), float(step)):
            assert outcome.seq.id not in ended | cancelled, "an ended request produced something"
            got.setdefault(outcome.seq.id, []).extend(outcome.tokens)
            if outcome.finish:
                ended.add(outcome.seq.id)

    added, step = set(), 0
    for step in range(4000):
        for arrives, cancel_at, request in todo:
            if arrives == step:
                s.add(request, float(step))
                added.add(request.id)
            if cancel_at is not None and cancel_at == step and request.id in added and s.cancel(request.id):
                cancelled.add(request.id)
        assert all(not seq.cancelled for seq in rig.turn(float(step)))
        for lane in rng.sample(list(Lane), 2):  # lanes start and land in any order
            if flying[lane] and rng.random() < 0.7:
                settle(lane)
            interrupts = gap_s is not None and lane is Lane.LANGUAGE and bool(flying[Lane.VISION])
            behind = flying[lane]
            if behind and not (ahead and lane is Lane.LANGUAGE and len(behind) == 1 and behind[0][0].decodes_only):
                continue
            if (batch := s.next(float(step), lane, interrupts, bool(behind)).batch) is not None:
                behind.append((batch, [(dict(w.seq.hold.first_block), held_by(w.seq)) for w in batch.work]))
                if lane is Lane.VISION:
                    assert batch.n_items <= images
                else:
                    n_decodes = sum(w.seq.stage is Stage.DECODE for w in batch.work)
                    assert batch.n_items <= max(tokens, n_decodes)
                assert s.n_running <= running
            s.check()
        if len(added) == len(todo) and not (
            any(flying.values())
            or rig.copies.copying
            or s.n_running
            or s.n_waiting
            or s.parking.n_live
            or s.fetching.live
        ):
            break
    else:
        raise AssertionError("some request never ended")

    for _, _, request in todo:
        if request.id in cancelled:
            assert expected_tokens(request)[: len(got.get(request.id, []))] == got.get(request.id, [])
        else:
            assert request.id in ended
            assert got[request.id] == expected_tokens(request)
    for step in range(4000, 8000):
        rig.turn(float(step))
        if not rig.busy:
            break
    s.room.caches.check(idle=True)
    s.parking.caches.check(idle=True)
    for kept in tiers:
        kept.check_idle()


def test_a_prefix_computed_before_is_not_computed_again():
    caches, device = CacheSet({KV: 40, EMBED: 8}), FakeDevice()
    s = Scheduler(Role.parse("EPD"), caches, Budgets(tokens=64))
    computed = []
    for name in ("first", "second"):
        s.add(make_request(name, n_text=18, max_tokens=3, salt=b""), 0.0)
        while s.n_running or s.n_waiting:
            batch = s.next(0.0, Lane.LANGUAGE).batch
            computed.append((name, batch.n_items))
            s.apply(device.run(batch), 0.0)
            s.check()
    assert computed == [("first", 18), *[("first", 1)] * 2, ("second", 2), *[("second", 1)] * 2]
