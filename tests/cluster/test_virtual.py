"""Any layout under a virtual clock: every request ends once with its tokens, moves only what it must, leaks nothing."""

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydrainfer.core import CheckpointError, ConfigError, ErrorInfo, Grammar, Stage, Unavailable
from hydrainfer.metrics import INTERVALS, Timelines
from tests.cache.other_kinds import STATE, WINDOW
from tests.cluster.virtual import PULSE, Cluster
from tests.scheduler.fakes import expected_tokens, make_request

pytestmark = pytest.mark.unit

SALTS = [None, b"", b"", b"mine"]
LAYOUTS = [
    "1EPD",
    "1E1P1D",
    "1EP1D",
    "1ED1P",
    "1E1PD",
    "2E1P2D",
    "1E2PD+1EPD",
    "2EPD",
    "8EPD",
    "1E1P1ED",
    "1EP1D+1ED1PD",
]


def mixed(n=8):
    return [
        make_request(f"r{i}", n_text=3 + 5 * (i % 4), pictures=list(range(i % 3)), max_tokens=1 + 3 * (i % 4))
        for i in range(n)
    ]


@pytest.mark.parametrize("more", [{}, {WINDOW: 12, STATE: 8}], ids=["", "more-kinds"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_tokens_and_moves_only_what_it_must(layout, more):
    cluster = Cluster(layout, kv_blocks=64, embed_blocks=32, more=more)
    requests = mixed()
    for r in requests:
        cluster.submit(r)
    cluster.run()
    for r in requests:
        assert cluster.tokens(r.id) == expected_tokens(r) and cluster.end(r.id).finish_reason == "length"
    cluster.check_whole()
    pulled = {s: sum(p.n_blocks[s] for p in cluster.pullers.values()) for s in ("embed", "kv")}
    if layout in ("1E1P1D", "1ED1P") and more:
        moved = [r for r in requests if r.max_tokens > 1]
        pulls = {spec: sum(p.n_blocks[spec.name] for p in cluster.pullers.values()) for spec in more}
        assert pulls == {spec: sum(len(spec.moved(r, r.n_prompt)) for r in moved) for spec in more}
        assert max(len(WINDOW.moved(r, r.n_prompt)) for r in moved) < max(-(-r.n_prompt // 4) for r in moved)
    if layout in ("1E1P1D", "1ED1P"):
        assert pulled["embed"] == 2 * 2, "two pictures of two blocks: each crosses once"
        assert pulled["kv"] == sum(-(-r.n_prompt // 4) for r in requests if r.max_tokens > 1)
    if "EPD" in layout and "+" not in layout:
        assert pulled == {"embed": 0, "kv": 0}
        assert not any(e.stats(0.0).n_landed for e in cluster.engines.values())


@pytest.mark.parametrize(("layout", "landing"), [("1E1P1D", 0), ("2EP1D", 0), ("1P1D", 40), ("1P2PD", 0)])
def test_a_hand_over_to_another_cluster_leaves_the_state_behind_that_only_others_would_read(layout, landing):
    """Prompts that begin alike find no state there that was not brought, and find it where it is."""
    pictures = [1] * ("E" in layout)
    requests = [make_request(f"r{i}", 9 + i % 3, pictures, max_tokens=1 + 3 * (i % 4), salt=b"") for i in range(16)]

    def n_states(two_clusters):
        cluster = Cluster(layout, 64, 32, more={STATE: 24}, landing=landing, two_clusters=two_clusters)
        for i, r in enumerate(requests):
            cluster.at(4.0 * i, lambda r=r: cluster.submit(r), awaited=True)
        cluster.run()
        for r in requests:
            assert cluster.tokens(r.id) == expected_tokens(r) and cluster.end(r.id).finish_reason == "length"
        cluster.check_whole()
        return sum(p.n_blocks[STATE.name] for p in cluster.pullers.values())

    assert 0 < n_states(True) < n_states(False)


@pytest.mark.parametrize("chaos", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_batch_waits_for_a_grammar(layout, chaos):
    """Requests do, and what they would hold up goes on."""
    cluster = Cluster(layout, kv_blocks=64, embed_blocks=32, chaos=chaos, compile_s=1.5)
    grammars = [None, Grammar("regex", "a+"), Grammar("regex", "b+")]
    requests = [
        msgspec.structs.replace(r, sampling=msgspec.structs.replace(r.sampling, grammar=grammars[i % 3]))
        for i, r in enumerate(mixed())
    ]
    for r in requests:
        cluster.submit(r)
    cluster.run(0.5)
    cluster.cancel("r1")  # it waits for its grammar, unless it waits for its pictures
    cluster.run()
    for r in requests:
        if r.id != "r1":
            assert cluster.tokens(r.id) == expected_tokens(r) and cluster.end(r.id).finish_reason == "length"
    assert cluster.end("r1").finish_reason == "abort"
    cluster.check_whole()


def test_an_instance_that_was_idle_for_long_does_not_count_as_stalled():
    cluster = Cluster("1E1P1D", 64, 32)
    cluster.now = 50_000.0
    cluster.submit(make_request("a", pictures=[1], max_tokens=5))
    longest, until = 0.0, cluster.now
    while not cluster.quiet:
        until += 0.5
        cluster.run(until)
        longest = max(longest, *(e.stats(cluster.now).stalled_s for e in cluster.engines.values()))
    assert longest < 20.0
    assert len(cluster.side.census.kills) == 0


def test_long_back_pressure_is_no_failure():
    """A D that is full for long: who waits for it neither stalls nor loses patience."""
    cluster = Cluster("1EP1D", kv_blocks=20, embed_blocks=32)
    cluster.side.census._stall_s = 30.0
    requests = [make_request(f"r{i}", n_text=8, max_tokens=60) for i in range(8)]
    for r in requests:
        cluster.submit(r)
    cluster.run(until=150.0)
    assert cluster.side.lives.n_live > 2 and not cluster.side.census.kills
    cluster.crash("D1", restart_s=20.0)
    cluster.run()
    for r in requests:
        assert cluster.tokens(r.id) == expected_tokens(r) and cluster.end(r.id).finish_reason == "length"
    cluster.check_whole()


@pytest.mark.parametrize("at_s", [9.0, 10.0, 11.0])
def test_a_pause_of_the_whole_machine_is_no_silence(at_s):
    """A container is paused, or Ctrl-Z stops a server whose instances are threads."""
    cluster = Cluster("1E1P1D", 64, 32)
    pulse = cluster.side.census._pulse = msgspec.structs.replace(PULSE, dead_s=20.0)
    for node in cluster.nodes.values():
        node._pulse = pulse
    requests = [make_request(f"r{i}", pictures=[i] * (i % 2), max_tokens=30) for i in range(6)]
    for r in requests:
        cluster.submit(r)
    cluster.run(at_s)
    cluster.now += 1000.0
    cluster.run()
    assert not cluster.side.census.kills and not any(node.closing for node in cluster.nodes.values())
    for r in requests:
        assert cluster.tokens(r.id) == expected_tokens(r) and cluster.end(r.id).finish_reason == "length"
    cluster.check_whole()


def test_text_never_touches_an_encoder():
    cluster = Cluster("2E1P1D", 64, 32)
    for i in range(4):
        cluster.submit(make_request(f"t{i}"))
    cluster.run()
    assert all(not d.batches for name, d in cluster.devices.items() if name[0] == "E")
    assert all(cluster.end(f"t{i}").finish_reason == "length" for i in range(4))


def test_a_picture_finds_its_encoder_again():
    cluster = Cluster("3E1P1D", 64, 32)
    for i in range(9):
        cluster.submit(make_request(f"r{i}", pictures=[i % 3]))
        cluster.run()
    encoded = [n for d in cluster.devices.values() for n in d.n_encoded.values()]
    assert encoded == [1, 1, 1]
    cluster.check_whole()


def test_intervals_of_a_request_that_moves():
    """The second one finds its picture in the encoder's cache, so it departs while a batch is chosen."""
    cluster, done = Cluster("1E1P1D", 64, 32), {}
    timelines = Timelines(lambda request_id, t: done.update({request_id: t}))
    for name in "ab":
        cluster.submit(make_request(name, pictures=[1], max_tokens=5))
        cluster.run()
    for _, event in cluster.lifecycle:
        timelines.record(event)
    for t in done.values():
        assert t.n_migrations == 2
        assert t.intervals_s["ep_migration"] > 0 < t.intervals_s["pd_migration"]
        assert sum(t.intervals_s.values()) == pytest.approx(t.e2e_s)
    assert set(done["a"].intervals_s) == set(INTERVALS) == {*done["b"].intervals_s, "encode"}
    assert "encode" not in done["b"].intervals_s


def test_too_large_for_its_route_is_a_400():
    cluster = Cluster("1E1P1D", kv_blocks=8, embed_blocks=32)
    cluster.submit(make_request("large", n_text=50, pictures=[1]))
    cluster.submit(make_request("small", pictures=[1]))
    cluster.run()
    assert cluster.end("large").error.status == 400 and cluster.end("small").finish_reason == "length"
    cluster.check_whole()


def test_a_dead_stage_is_a_503_and_nothing_hangs():
    cluster = Cluster("1E1P1D", 64, 32)
    cluster.submit(make_request("a", pictures=[1]))
    cluster.crash("D2")
    cluster.run()
    assert cluster.end("a").error.status == 503 and cluster.now < PULSE.patience_s + 30
    assert cluster.side.census.dark() == [Stage.DECODE]
    cluster.crash("P1")
    cluster.run()
    cluster.submit(make_request("b"))
    cluster.run()
    assert cluster.end("b").error.status == 503 and "prefill" in cluster.end("b").error.message
    cluster.check_whole()


@pytest.mark.parametrize("who", ["E0", "P1", "D2"])
def test_a_stage_that_comes_back_in_time_serves_who_waited(who):
    """Those who were there when it died, those who come while it is away, and those who come when it is back."""
    cluster = Cluster("1E1P1D", 64, 32)
    requests = [make_request(f"r{i}", pictures=[i] * (i % 2), max_tokens=6, arrival_s=2.0 * i) for i in range(24)]
    for r in requests:
        cluster.at(r.arrival_s, lambda r=r: cluster.submit(r), awaited=True)
    cluster.at(7.0, lambda: cluster.crash(who, restart_s=20.0), awaited=True)
    cluster.run()
    for r in requests:
        assert cluster.tokens(r.id) == expected_tokens(r) and cluster.end(r.id).finish_reason == "length"
    assert cluster.side.lives.n_recovered > 0 and len(cluster.devices[who].batches) > 0
    cluster.check_whole()


DEATHS = [(layout, stage, {}) for layout in LAYOUTS if layout != "1EPD" for stage in Stage]
OF_MORE_KINDS = [(layout, stage, {WINDOW: 16, STATE: 12}) for layout in ("1E1P1D", "2E1P2D") for stage in Stage]


@pytest.mark.parametrize(("layout", "stage", "more"), [("1EPD", Stage.PREFILL, {}), *DEATHS, *OF_MORE_KINDS])
def test_every_instance_of_a_stage_may_die_under_load(layout, stage, more):
    """All at once, twice, and all are back within ten seconds: nobody is refused, nothing is lost."""
    cluster = Cluster(layout, kv_blocks=64, embed_blocks=32, chaos=True, more=more)
    requests = [
        make_request(f"r{i}", n_text=3 + i % 9, pictures=[i % 7] * (i % 3), max_tokens=6 + i % 5, arrival_s=0.5 * i)
        for i in range(80)
    ]
    for r in requests:
        cluster.at(r.arrival_s, lambda r=r: cluster.submit(r), awaited=True)
    dying = [name for name, role in cluster.roles.items() if role.runs(stage)]

    def kill():
        for i, name in enumerate(dying):
            cluster.crash(name, notice_s=0.2 * i, restart_s=5.0 + 4.0 * (i + 1) / len(dying))

    for at_s in (7.0, 30.0):
        cluster.at(at_s, kill, awaited=True)
    cluster.run()
    for r in requests:
        assert cluster.tokens(r.id) == expected_tokens(r) and cluster.end(r.id).finish_reason == "length"
    assert all(cluster.incarnations[name] == 3 for name in dying) and cluster.side.lives.n_recovered > 0
    cluster.check_whole()


def test_a_stage_that_comes_back_at_the_third_attempt_serves_who_waited():
    cluster = Cluster("1E1P1D", 64, 32)
    requests = [make_request(f"r{i}", pictures=[i] * (i % 2), max_tokens=6, arrival_s=2.0 * i) for i in range(12)]
    for r in requests:
        cluster.at(r.arrival_s, lambda r=r: cluster.submit(r), awaited=True)
    failures = [ErrorInfo.of(ConfigError("no memory for caches"))] * 2
    cluster.at(7.0, lambda: cluster.crash("P1", restart_s=4.0, failures=failures), awaited=True)
    cluster.run()
    for r in requests:
        assert cluster.tokens(r.id) == expected_tokens(r) and cluster.end(r.id).finish_reason == "length"
    assert cluster.side.census.lost is None and cluster.side.census.restarts.trouble("P1") == ""
    cluster.check_whole()


def test_a_stage_that_is_lost_ends_who_needs_it_at_once_and_lets_the_others_finish():
    cluster = Cluster("1E1P1D", 64, 32)
    requests = [make_request(f"r{i}", pictures=[i], max_tokens=30, arrival_s=8.0 * i) for i in range(4)]
    for r in requests:
        cluster.at(r.arrival_s, lambda r=r: cluster.submit(r), awaited=True)
    failures = [ErrorInfo.of(CheckpointError("/models/x: config.json is missing"))]
    cluster.at(25.0, lambda: cluster.crash("P1", restart_s=4.0, failures=failures), awaited=True)
    cluster.run(until=25.0 + 4.0 + 2 * PULSE.beat_s)
    assert cluster.side.census.lost.stage is Stage.PREFILL
    cluster.run()
    ends = [cluster.end(r.id) for r in requests]
    assert {e.finish_reason for e in ends} == {"length", "error"}
    for r, end in zip(requests, ends):
        tokens = cluster.tokens(r.id)
        assert tokens == expected_tokens(r)[: len(tokens)]
        assert end.finish_reason == "length" or (end.error.code, tokens) == ("stage_lost", [])
    with pytest.raises(Unavailable, match="none can be started again"):
        cluster.submit(make_request("later"))
    cluster.check_whole()


crash = st.tuples(
    st.floats(0.0, 60.0),  # at
    st.integers(0, 8),  # who
    st.floats(0.0, 4.0),  # the hub learns of it after
    st.one_of(st.none(), st.floats(4.0, 30.0)),  # it is there again after
)
crashes = st.one_of(st.just([]), st.lists(crash, max_size=3))
traffic = st.lists(
    st.tuples(
        st.integers(1, 14),  # text tokens
        st.lists(st.integers(0, 4), max_size=2),  # pictures
        st.integers(1, 12),  # max_tokens
        st.floats(0.0, 30.0),  # arrives at
        st.one_of(st.none(), st.none(), st.floats(0.0, 60.0)),  # cancelled after
        st.one_of(st.none(), st.none(), st.floats(1.0, 80.0)),  # deadline after
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(
    specs=traffic,
    layout=st.sampled_from(LAYOUTS),
    kv_blocks=st.integers(10, 24),
    embed_blocks=st.integers(4, 8),
    headroom=st.integers(0, 4),
    balancing=st.sampled_from(["least_load", "round_robin", "random"]),
    chaos=st.booleans(),
    more=st.sampled_from([{}, {WINDOW: 5, STATE: 6}]),
    landing=st.sampled_from([0, 6, 40]),
    store=st.sampled_from([None, "good", "bad"]),
    two_clusters=st.booleans(),
    crashes=crashes,
    seed=st.integers(0, 2**16),
)
def test_random_traffic(
    specs,
    layout,
    kv_blocks,
    embed_blocks,
    headroom,
    balancing,
    chaos,
    more,
    landing,
    store,
    two_clusters,
    crashes,
    seed,
):
    caches = {"more": more, "landing": landing, "store": store, "two_clusters": two_clusters}
    random_traffic(specs, layout, kv_blocks, embed_blocks, headroom, balancing, chaos, crashes, seed, **caches)


@pytest.mark.slow
@pytest.mark.timeout(5400)
@settings(max_examples=10_000, deadline=None)
@given(
    specs=traffic,
    layout=st.sampled_from(["1E1P1D", "2E1P2D", "1ED1P", "2EPD", "1E2PD+1EPD"]),
    crashes=st.lists(crash, min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
)
def test_ten_thousand_schedules_of_a_whole_cluster(specs, layout, crashes, seed):
    random_traffic(specs, layout, 16, 6, 2, "least_load", True, crashes, seed, store=["good", "bad"][seed % 2])


def random_traffic(specs, layout, kv_blocks, embed_blocks, headroom, balancing, chaos, crashes, seed, **caches):
    """Every request ends once: with its tokens, or for a reason that was given it; nothing told twice."""
    cluster = Cluster(layout, kv_blocks, embed_blocks, seed, chaos, headroom, balancing, **caches)
    names, requests, salts = list(cluster.roles), [], random.Random(seed)
    for at_s, who, notice_s, restart_s in crashes:
        name = names[who % len(names)]
        cluster.at(at_s, lambda c=(name, notice_s, restart_s): cluster.crash(*c), awaited=True)
    for i, (n_text, pictures, max_tokens, arrives, cancel_after, deadline_after) in enumerate(specs):
        deadline = arrives + deadline_after if deadline_after is not None else float("inf")
        r = make_request(
            f"r{i}",
            n_text,
            pictures,
            max_tokens,
            arrival_s=arrives,
            deadline_s=deadline,
            salt=salts.choice(SALTS),
            prefill_cluster=salts.choice(["", "far"]),
        )
        requests.append((r, cancel_after, deadline_after))
        cluster.at(arrives, lambda r=r: cluster.submit(r), awaited=True)
        if cancel_after is not None:
            cluster.at(arrives + cancel_after, lambda r=r: cluster.cancel(r.id), awaited=True)
    cluster.run()
    assert cluster.quiet, (cluster.side.lives.n_live, {n: e.stats(cluster.now) for n, e in cluster.engines.items()})
    for r, cancel_after, deadline_after in requests:
        end, tokens, wanted = cluster.end(r.id), cluster.tokens(r.id), expected_tokens(r)
        if end.finish_reason == "length":
            assert tokens == wanted
        elif end.error is not None and end.error.status in (500, 503):
            assert tokens == wanted[: len(tokens)] and crashes
        else:
            assert tokens == wanted[: len(tokens)]
            cause = cancel_after if end.finish_reason == "abort" else deadline_after
            assert cause is not None and (end.error is None or end.error.status == 504), end
    cluster.check_whole()


@settings(max_examples=60, deadline=None)
@given(n=st.integers(2, 12), seed=st.integers(0, 2**16), layout=st.sampled_from(["1ED1P", "2ED1P", "1ED2P", "1ED1PD"]))
def test_ed_and_p_with_minimum_pools_always_finish(n, seed, layout):
    """Each pool holds the largest request and nothing beside it."""
    largest = make_request("x", n_text=4, pictures=[0, 1], max_tokens=10)
    kv = -(-(largest.n_prompt + largest.max_tokens) // 4)
    cluster = Cluster(layout, kv, 4, seed)
    requests = [
        make_request(
            f"r{i}",
            n_text=1 + i % 4,
            pictures=[i % 5, (i + seed) % 5][: 1 + i % 2],
            max_tokens=2 + i % 9,
            salt=SALTS[(i + seed) % 4],
        )
        for i in range(n)
    ]
    for r in requests:
        cluster.submit(r)
    cluster.run()
    for r in requests:
        assert cluster.tokens(r.id) == expected_tokens(r)
    cluster.check_whole()


def test_a_dead_peers_connections_are_dropped():
    cluster = Cluster("1E1P1D", 16, 4)
    cluster.run()
    cluster.crash("E0")
    cluster.run()
    cluster.submit(make_request("a"))
    cluster.run()
    assert {("P1/1", "E0:1"), ("D2/1", "E0:1")} <= set(cluster.forgotten)
