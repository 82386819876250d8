"""Conversations in every layout: each instance computes what it lacks, and pulls leave out what it has."""

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from hydrainfer.core import EventKind, Lane
from tests.cache.other_kinds import STATE, WINDOW
from tests.cluster.test_virtual import LAYOUTS
from tests.cluster.virtual import Cluster
from tests.scheduler.fakes import KV, expected_tokens, make_request
from tests.scheduler.test_prefix import Turn, oracle, requests_of, turns

pytestmark = pytest.mark.unit

CONVERSATION = [Turn(i - 1 if i else None, [1, 2] * 5, 1 if i == 0 else None, 9, b"") for i in range(5)]


def n_pulled(cluster, spec):
    """Blocks that came to an instance from another."""
    return sum(p.n_blocks[spec.name] for p in cluster.pullers.values())


def n_prefilled(cluster):
    """Tokens computed in prefill by all instances."""
    batches = [b for name, d in cluster.devices.items() if "P" in name for b in d.batches if b[0] is Lane.LANGUAGE]
    return sum(n for _, n, _ in batches)


def test_a_later_turn_moves_the_blocks_that_are_lacking_a_window_and_two_states():
    """To who decodes, and has the turns before."""
    caches = {WINDOW: 30, STATE: 24}
    cluster, moved = Cluster("1EP1D", kv_blocks=200, embed_blocks=32, more=caches), []
    cluster.copy_s = 200.0  # nothing is fetched back from there
    requests = requests_of(CONVERSATION)
    for i, r in enumerate(requests):
        before = [n_pulled(cluster, spec) for spec in (KV, *caches)]
        cluster.submit(r)
        cluster.run()
        assert cluster.tokens(r.id) == expected_tokens(r)
        kv, window, states = (n_pulled(cluster, spec) - n for spec, n in zip((KV, *caches), before))
        assert kv == KV.blocks_for(r.n_prompt) - oracle(r, requests[:i]) // 4
        assert window <= len(WINDOW.moved(r, r.n_prompt)) and states <= len(STATE.moved(r, r.n_prompt)) <= 2
        moved.append((kv, window, states))
    assert max(kv for kv, *_ in moved[1:]) < moved[0][0], "moved anew"
    cluster.check_whole()


@pytest.mark.parametrize("layout", ["1EPD", "1EP1D", "1E1PD", "1E1P1D", "1ED1P"])
@pytest.mark.parametrize("copy_s", [0.1, 200.0])
def test_a_later_turn_computes_and_moves_only_what_is_new(layout, copy_s):
    """Who decodes keeps the answer; who prefills fetches it from there if that is soon done, or computes it."""
    cluster = Cluster(layout, kv_blocks=200, embed_blocks=32)
    cluster.copy_s = copy_s
    requests = requests_of(CONVERSATION)
    fetches = layout in ("1EP1D", "1E1P1D", "1ED1P") and copy_s < 1.0
    for i, r in enumerate(requests):
        before, pulled = n_prefilled(cluster), sum(p.n_blocks["kv"] for p in cluster.pullers.values())
        cluster.submit(r)
        cluster.run()
        assert cluster.tokens(r.id) == expected_tokens(r)
        whole = oracle(r, requests[:i])  # of what some instance decoded
        decodes_there = "PD" in layout
        prefilled_before = requests[i - 1].n_prompt // 4 * 4 if i else 0
        found = whole if decodes_there or fetches else prefilled_before
        n_decoded = r.max_tokens - 1 if decodes_there else 0
        assert n_prefilled(cluster) - before == r.n_prompt - found + n_decoded, "something was computed again"
        moved = 0 if decodes_there else KV.blocks_for(r.n_prompt) - whole // 4
        moved += (whole - prefilled_before) // 4 if fetches else 0
        assert sum(p.n_blocks["kv"] for p in cluster.pullers.values()) - pulled == moved
        assert max(o.n_cached for o in cluster.outputs if o.request_id == r.id) == found
    assert [d.n_encoded for d in cluster.devices.values() if d.n_encoded] == [{b"picture1": 1}]
    if layout in ("1E1PD", "1E1P1D"):
        wanted = cluster.engines["E0"].stats(cluster.now).pictures_wanted
        assert wanted == 1, "only the first turn came to the encoder"
    assert sum(p.n_blocks["embed"] for p in cluster.pullers.values()) == (0 if layout in ("1EPD", "1EP1D") else 2)
    cluster.check_whole()


def test_kv_kept_by_the_decode_instance_is_fetched_when_the_prefill_instance_lacks_it():
    cluster = Cluster("1E1P1D", kv_blocks=200, embed_blocks=32)
    cluster.copy_s = 0.1
    first, second, *_ = requests_of(CONVERSATION)
    cluster.submit(first)
    cluster.run()
    for name in ("E0", "P1"):
        for pool in cluster.caches[name].pools.values():
            pool.drop(pool.take(pool.n_blocks))
    before = n_prefilled(cluster)
    cluster.submit(second)
    cluster.run()
    assert cluster.tokens(second.id) == expected_tokens(second)
    assert n_prefilled(cluster) - before == second.n_prompt - oracle(second, [first])
    assert cluster.devices["E0"].n_encoded == {b"picture1": 1}, "nor is the picture encoded"
    room = cluster.nodes["P1"].engine.scheduler.room
    assert room.n_tokens_from == {"peer": oracle(second, [first])} and room.n_tokens_asked == 0
    cluster.check_whole()


@pytest.mark.parametrize("layout", ["1EP1D", "1ED1P"])
@pytest.mark.parametrize("is_gone", [False, True])
def test_an_instance_without_room_for_the_kept_kv_gets_the_request_without_it(layout, is_gone):
    """Nobody waits with KV at one that decodes for room at one that prefills, whose requests may wait for room there.
    The same if what was kept is gone when the request comes. Where that one encodes, too, it begins with that."""
    cluster = Cluster(layout, kv_blocks=30, embed_blocks=32)
    cluster.copy_s = 0.1
    first, second, *_ = requests_of(CONVERSATION)
    cluster.submit(first)
    cluster.run()
    prefills, decodes = sorted(cluster.caches, key=lambda name: "P" not in name)
    for name in (prefills, decodes) if is_gone else (prefills,):
        for pool in cluster.caches[name].pools.values():
            pool.drop(pool.take(pool.n_blocks))
    others = [make_request(f"other{i}", n_text=100, max_tokens=2) for i in range(3)]
    for r in (*others, second):
        cluster.submit(r)
    cluster.run()
    for r in (*others, second):
        assert cluster.tokens(r.id) == expected_tokens(r) and cluster.end(r.id).finish_reason == "length"
    cluster.check_whole()


@pytest.mark.parametrize("layout", ["1E2P1D", "1E2PD"])
def test_encoders_hand_a_request_to_who_has_computed_its_beginning(layout):
    """Also one that was started anew: it is told what has been computed before."""
    cluster = Cluster(layout, kv_blocks=400, embed_blocks=64)
    tree = [Turn(None, [1 + i % 2, 2] * 12, i, 1, b"%d" % i) for i in range(4)]
    asked = [Turn(i, [1, 2, 2], 2 + i, 1, b"%d" % i) for i in (0, 2, 1, 3)]  # another picture: by the encoder
    requests = requests_of([*tree, *asked])
    for i, r in enumerate(requests):
        if i == len(tree):
            cluster.crash("E0", restart_s=1.0)
            cluster.run()
        cluster.submit(r)
        cluster.run()
        assert cluster.end(r.id).n_cached == oracle(r, requests[:i])
    assert all(any(b[0] is Lane.LANGUAGE for b in cluster.devices[n].batches) for n in cluster.roles if "P" in n)
    cluster.check_whole()


@pytest.mark.parametrize("layout", ["1EPD", "1EP1D", "1E1PD", "1E1P1D", "1ED1P"])
def test_choices_of_one_prompt_compute_it_once(layout):
    cluster = Cluster(layout, kv_blocks=200, embed_blocks=32)
    requests = [make_request(f"r{i}", n_text=40, pictures=[1, 2], max_tokens=1, salt=b"") for i in range(8)]
    for r in requests:
        cluster.submit(r)
    cluster.run()
    n = requests[0].n_prompt
    assert n_prefilled(cluster) == n + 7 * (n - (n - 1) // 4 * 4)
    assert [d.n_encoded for d in cluster.devices.values() if d.n_encoded] == [{b"picture1": 1, b"picture2": 1}]
    assert sum(p.n_blocks["embed"] for p in cluster.pullers.values()) == (0 if "EP" in layout else 4)
    cluster.check_whole()


@pytest.mark.parametrize("layout", ["1E1PD", "1E1P1D"])
@pytest.mark.parametrize("is_gone", [False, True])
def test_a_request_that_skipped_the_encoder_goes_back_to_it_if_the_kv_is_gone(layout, is_gone):
    """Evicted, and the hub does not know it yet."""
    cluster = Cluster(layout, kv_blocks=24, embed_blocks=2)
    first, *_ = requests_of(CONVERSATION)
    cluster.submit(first)
    cluster.run()
    (name,) = (n for n in cluster.engines if "P" in n)
    assert cluster.side.lives.roster.locator.locate(first)[name] >= first.media[-1].end
    for pool in cluster.caches[name].pools.values() if is_gone else ():
        pool.drop(pool.take(pool.n_blocks))
    again = msgspec.structs.replace(first, id="again")
    cluster.submit(again)
    cluster.run()
    assert cluster.tokens("again") == expected_tokens(again) and cluster.end("again").finish_reason == "length"
    assert cluster.engines["E0"].stats(cluster.now).pictures_wanted == 1 + is_gone
    cluster.check_whole()


def test_the_kv_of_one_that_encodes_and_decodes_spares_it_a_picture_that_another_prefills():
    cluster = Cluster("1ED1P", kv_blocks=60, embed_blocks=8)
    cluster.copy_s = 0.1
    first, second, *_ = requests_of(CONVERSATION)
    cluster.submit(first)
    cluster.run()
    for pool in (*cluster.caches["P1"].pools.values(), cluster.caches["ED0"].pools["embed"]):
        pool.drop(pool.take(pool.n_blocks))
    before = n_prefilled(cluster)
    cluster.submit(second)
    cluster.run()
    assert cluster.tokens(second.id) == expected_tokens(second)
    assert n_prefilled(cluster) - before == second.n_prompt - oracle(second, [first])
    assert cluster.devices["ED0"].n_encoded == {b"picture1": 1}
    cluster.check_whole()


@settings(max_examples=60, deadline=None)
@given(
    tree=turns,
    layout=st.sampled_from(LAYOUTS),
    kv_blocks=st.integers(0, 20),
    at_once=st.integers(1, 4),
    crash=st.one_of(st.none(), st.tuples(st.integers(0, 8), st.floats(0.0, 40.0))),
    cancels=st.dictionaries(st.integers(0, 8), st.floats(0.0, 20.0), max_size=3),
    chaos=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_trees_of_conversations_under_pressure_and_kills(tree, layout, kv_blocks, at_once, crash, cancels, chaos, seed):
    requests = requests_of(tree)
    most = max(KV.blocks_for(r.n_prompt + r.max_tokens) for r in requests)
    cluster = Cluster(layout, most + kv_blocks, 2 * max(len(r.media) for r in requests) + 2, seed, chaos)
    if crash is not None:
        who = list(cluster.roles)[crash[0] % len(cluster.roles)]
        cluster.at(crash[1], lambda: cluster.crash(who, restart_s=5.0), awaited=True)
    for i in range(0, len(requests), at_once):
        for k, r in enumerate(requests[i : i + at_once], i):
            cluster.submit(r)
            if k in cancels:
                cluster.at(cluster.now + cancels[k], lambda r=r: cluster.cancel(r.id), awaited=True)
        cluster.run()
    for k, r in enumerate(requests):
        said, finish = cluster.tokens(r.id), cluster.end(r.id).finish_reason
        assert said == expected_tokens(r)[: len(said)]
        assert (finish == "length" and len(said) == r.max_tokens) or (finish == "abort" and k in cancels)
    cluster.check_whole()


def test_a_request_that_is_preempted_and_needs_the_encoder_in_one_turn_departs_once():
    """ "young" gives way to "old". Its prefix would spare it the encoder, but "first" takes those blocks at once."""
    cluster = Cluster("1E1PD", kv_blocks=12, embed_blocks=2)
    requests = [
        make_request("old", n_text=8, max_tokens=30, arrival_s=0.0),
        make_request("young", n_text=9, pictures=[1], max_tokens=30, salt=b"", arrival_s=0.1),
        make_request("other", n_text=1, pictures=[2], max_tokens=1, arrival_s=4.0),
        make_request("first", n_text=24, max_tokens=1, priority=2, arrival_s=12.0),
    ]
    for r in requests:
        cluster.at(r.arrival_s, lambda r=r: cluster.submit(r), awaited=True)
    cluster.run(until=500.0)
    assert [cluster.tokens(r.id) for r in requests] == [expected_tokens(r) for r in requests]
    preempted = [event.request_id for _, event in cluster.lifecycle if event.kind is EventKind.PREEMPTED]
    assert preempted[0] == "young"
    cluster.check_whole()


@pytest.mark.parametrize("layout", ["1EP1D", "1E1P1D", "1EPD", "2EPD"])
def test_a_preempted_request_does_not_count_its_own_blocks_as_cached(layout):
    """Its produced tokens are no part of the prompt, of which `cached_tokens` is a part."""
    cluster = Cluster(layout, kv_blocks=24, embed_blocks=32)
    requests = [make_request(f"r{i}", n_text=6, max_tokens=40, salt=b"%d" % (i % 4)) for i in range(8)]
    for r in requests:
        cluster.submit(r)
    cluster.run()
    assert sum(e.scheduler.n_preemptions for e in cluster.engines.values())
    for r in requests:
        assert cluster.tokens(r.id) == expected_tokens(r)
        said = [o.n_cached for o in cluster.outputs if o.request_id == r.id]
        assert max(said) < r.n_prompt
    cluster.check_whole()


KINDS = {"window": {WINDOW: 400}, "state": {STATE: 400}, "both": {WINDOW: 400, STATE: 400}}


@pytest.mark.parametrize("layout", ["1EPD", "2EPD", "1E2P1D", "1EP1D", "1ED1P"])
@pytest.mark.parametrize("kinds", KINDS)
@settings(max_examples=8, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(tree=turns)
def test_the_prefix_that_a_placer_counts_on_is_found_by_the_scheduler_of_hybrids(layout, kinds, tree):
    """With room for everything. More may be found: an instance that is alone in its stage is not asked."""
    cluster, promised = Cluster(layout, kv_blocks=2000, embed_blocks=200, more=KINDS[kinds]), {}
    cluster.copy_s = 0.1
    for placer in (cluster.placer, *(node.placer for node in cluster.nodes.values())):

        def choose(request, stage, exclude, locator=placer.roster.locator, asked=placer.choose):
            name = asked(request, stage, exclude)
            found = locator.locate(request).get(name, 0)
            if "P" in name or found >= max((m.end for m in request.media), default=0):  # else it only encodes there
                promised[request.id] = max(promised.get(request.id, 0), found)
            return name

        placer.choose = choose
    for r in requests_of(tree):
        cluster.submit(r)
        cluster.run()
        assert cluster.tokens(r.id) == expected_tokens(r)
        assert max(o.n_cached for o in cluster.outputs if o.request_id == r.id) >= promised.get(r.id, 0)
    cluster.check_whole()
