"""Where a prompt is prefilled: the rules, and the loop that follows the links."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydrainfer.cluster.messages import Peer
from hydrainfer.cluster.offload import Balance, LinkState, Offload, OffloadSettings, Where, advise, offloaded
from hydrainfer.cluster.roster import Roster
from hydrainfer.core import Cached, CachedKeys, ConfigError, Load, Role, chain_of, chain_root
from tests.scheduler.fakes import KV, make_request

pytestmark = pytest.mark.unit
BASE = 100.0
IDLE = LinkState(1e9, 0.1, 0.0)
FULL = LinkState(1e9, 0.95, 3e9)
BOTH = ("home", "far")


def made(links=None, returns=(), **settings):
    links = links or {"far": IDLE}
    return Offload(OffloadSettings(threshold=BASE, **settings), "home", links, lambda n: 1e6 * n, returns)


def prefilled_s(seconds):
    return lambda cluster, n_fetched: seconds[cluster] - 0.01 * n_fetched


def chosen(offload, n, cached=None, live=BOTH, seconds=None):
    return offload.choose(n, cached or {}, live, prefilled_s(seconds or {"home": 9.0, "far": 1.0}))


# ---- the rules


def test_prompts_with_more_uncached_tokens_than_the_threshold_leave_home():
    offload = made()
    assert chosen(offload, 100) == Where("home")
    assert chosen(offload, 101) == Where("far")
    assert chosen(offload, 150, {"home": 50}) == Where("home")
    assert chosen(offload, 151, {"home": 50}) == Where("far")
    assert chosen(offload, 300, {"far": 290}) == Where("far"), "the far cluster has most of it"


def test_nobody_goes_where_nobody_prefills():
    assert chosen(made(), 500, live=("home",)) == Where("home")


def test_nobody_is_too_short_to_leave_a_home_where_nobody_prefills():
    assert chosen(made(), 30, live=("far",)) == Where("far")
    near = made({"near": IDLE, "slow": LinkState(1e6, 0.1, 0.0)})
    assert chosen(near, 30, live=("near", "slow"), seconds={"near": 2.0, "slow": 1.0}) == Where("near")
    assert chosen(made(), 30, live=()) == Where("home")


def test_a_prefix_follows_only_over_a_link_from_home_that_is_not_scarce():
    cached = {"home": 200, "far": 100}
    assert chosen(made(), 500, cached) == Where("far")
    offload = made(returns=("far",))
    assert chosen(offload, 500, cached) == Where("far", fetch_from="home")
    assert chosen(offload, 500, {"home": 100, "far": 200}) == Where("far")
    offload.observe(1.0, {"far": FULL}, 0.0)
    assert offload.is_scarce("far") and chosen(offload, 5000, cached) == Where("far")


def test_bandwidth_is_scarce_until_it_is_abundant():
    offload = made(adapts=False)
    for share, queued, scarce in [(0.7, 0, False), (0.81, 0, True), (0.7, 0, True), (0.59, 0, False), (0.1, 2e9, True)]:
        offload.observe(0.0, {"far": LinkState(1e9, share, queued)}, 0.0)
        assert offload.is_scarce("far") is scarce
    assert offload.threshold("far") == BASE


def test_of_several_far_clusters_the_one_that_is_ready_first_gets_it():
    links = {"near": IDLE, "slow": LinkState(1e6, 0.1, 0.0)}
    seconds = {"home": 0.0, "near": 2.0, "slow": 1.0}
    assert chosen(made(links), 300, live=("home", "near", "slow"), seconds=seconds) == Where("near")
    assert chosen(made(links), 300, live=("home", "slow"), seconds=seconds) == Where("slow")
    links["slow"] = IDLE
    assert chosen(made(links), 300, live=("home", "near", "slow"), seconds=seconds) == Where("slow")


def test_by_seconds_the_way_that_is_ready_first_wins():
    offload = made(rule="seconds")
    assert chosen(offload, 50, seconds={"home": 3.0, "far": 1.0}) == Where("far"), "the threshold does not count"
    assert chosen(offload, 50, seconds={"home": 1.0, "far": 0.99}) == Where("home"), "50 MB take 0.05 s"
    queued = made({"far": LinkState(1e9, 0.5, 4e9)}, rule="seconds")
    assert chosen(queued, 50, seconds={"home": 3.0, "far": 1.0}) == Where("home")


def test_a_negative_threshold_is_refused():
    with pytest.raises(ConfigError, match="threshold must not be negative"):
        OffloadSettings(threshold=-1.0)


# ---- the short loop

links = st.builds(LinkState, st.floats(1e6, 1e10), st.floats(0.0, 1.0), st.floats(0.0, 1e11))


@given(seen=st.lists(st.tuples(links, st.floats(0.0, 60.0)), max_size=80))
def test_the_threshold_stays_between_its_base_and_four_times_that(seen):
    offload = made()
    for second, (link, home_s) in enumerate(seen):
        offload.observe(float(second), {"far": link}, home_s)
        assert BASE <= offload.threshold("far") <= 4 * BASE


@given(link=links, home_s=st.floats(0.0, 60.0), before=st.lists(st.tuples(links, st.floats(0.0, 60.0)), max_size=20))
def test_at_constant_input_it_moves_in_one_direction_and_then_stays(link, home_s, before):
    offload = made()
    for second, (other, other_s) in enumerate(before):
        offload.observe(float(second), {"far": other}, other_s)
    thresholds = []
    for second in range(len(before), len(before) + 60):
        offload.observe(float(second), {"far": link}, home_s)
        thresholds.append(offload.threshold("far"))
    assert thresholds in (sorted(thresholds), sorted(thresholds, reverse=True))
    assert len(set(thresholds[-20:])) == 1


@given(
    shares=st.lists(st.floats(0.0, 1.0), min_size=2, max_size=2),
    queued=st.floats(0.0, 1e10),
    home_s=st.floats(0.0, 20.0),
    n=st.integers(1, 60),
)
def test_it_is_no_lower_where_more_of_the_link_is_in_use(shares, queued, home_s, n):
    less, more = (made() for _ in range(2))
    for second in range(n):
        less.observe(float(second), {"far": LinkState(1e9, min(shares), queued)}, home_s)
        more.observe(float(second), {"far": LinkState(1e9, max(shares), queued)}, home_s)
    assert less.threshold("far") <= more.threshold("far")


def test_a_full_link_raises_it_and_an_idle_one_brings_it_back():
    offload = made()
    for second in range(4):
        offload.observe(float(second), {"far": FULL}, 0.0)
    assert offload.threshold("far") == pytest.approx(BASE * 1.25**4)
    for second in range(4, 14):
        offload.observe(float(second), {"far": IDLE}, 0.0)
    assert offload.threshold("far") == pytest.approx(BASE * 1.25**4 / 1.1), "not before it has settled"
    for second in range(14, 30):
        offload.observe(float(second), {"far": IDLE}, 0.0)
    assert offload.threshold("far") == BASE


def test_it_waits_for_what_was_queued_before_to_drain():
    offload = made()
    for second, queued in enumerate([9e9, 8e9, 7e9, 6e9]):
        offload.observe(float(second), {"far": LinkState(1e9, 1.0, queued)}, 0.0)
    assert offload.threshold("far") == pytest.approx(BASE * 1.25)


def test_it_does_not_send_home_what_would_wait_longer_there():
    offload = made()
    for second in range(4):
        offload.observe(float(second), {"far": FULL}, 4.0)
    assert offload.threshold("far") == BASE
    for second in range(4, 8):
        offload.observe(float(second), {"far": FULL}, 0.0)
    raised = offload.threshold("far")
    offload.observe(8.0, {"far": FULL}, 5.5)
    assert offload.threshold("far") == pytest.approx(raised / 1.1)


# ---- with a roster


def request_of(name, n_text, **more):
    return make_request(name, n_text, salt=b"", **more)


def two_clusters(*, encoders=()):
    roster = Roster()
    names = {"P0": "home", "D0": "home", "P1": "far", **dict(encoders)}
    roster.update(Peer(name, name.rstrip("0123456789"), 1, "-", cluster=c) for name, c in names.items())
    return roster


def test_the_request_says_where_and_may_not_begin_elsewhere():
    request, elsewhere = offloaded(request_of("long", 300), two_clusters(), made())
    assert request.prefill_cluster == "far" and elsewhere == {"P0", "D0"}
    request, elsewhere = offloaded(request_of("short", 30), two_clusters(), made())
    assert request.prefill_cluster == "home" and elsewhere == {"P1"}


def test_pictures_are_encoded_where_they_are_prefilled_or_else_at_home():
    pictured = request_of("r", 300, pictures=[1])
    _, elsewhere = offloaded(pictured, two_clusters(encoders={"E0": "home", "EP1": "far"}.items()), made())
    assert elsewhere == {"P0", "D0", "E0"}, "its pixels cross the link"
    _, elsewhere = offloaded(pictured, two_clusters(encoders={"E0": "home"}.items()), made())
    assert elsewhere == {"P0", "D0"}, "its embeddings do"
    _, elsewhere = offloaded(pictured, two_clusters(encoders={"E0": "third"}.items()), made())
    assert elsewhere == {"P0", "D0"}, "there is no other encoder"


def test_what_each_cluster_has_cached_counts():
    roster = two_clusters()
    request = request_of("r", 300)
    keys = chain_of(chain_root(b""), request.prompt_ids, KV.block_tokens, request.media)
    blocks = tuple(keys[i : i + 16] for i in range(16, len(keys), 16))[:60]
    assert len(blocks) == 60
    roster.locator.learn("D0", Cached(KV.block_tokens, (CachedKeys(0, True, blocks),)))
    assert offloaded(request, roster, made())[0].prefill_cluster == "home", "240 of its tokens are at home"


def test_a_cluster_whose_instances_are_suspect_gets_nothing():
    roster = two_clusters()
    roster.update([*(p for n, p in roster.peers.items() if n != "P1"), Peer("P1", "P", 1, "-", True, cluster="far")])
    assert offloaded(request_of("r", 300), roster, made())[0].prefill_cluster == "home"


def test_a_busy_cluster_is_avoided_by_seconds():
    roster = two_clusters()
    roster.hear("P1", Load(n_tokens=100_000, token_s=1e-3))
    roster.hear("P0", Load(token_s=1e-3))
    assert offloaded(request_of("r", 300), roster, made(rule="seconds"))[0].prefill_cluster == "home"


# ---- the long loop


@pytest.mark.parametrize(
    ("far", "home", "decode", "role"),
    [(1.0, 1.0, 2.0, None), (1.0, 1.0, 2.4, None), (1.0, 1.0, 2.6, "P"), (2.0, 1.0, 2.5, None), (2.0, 1.0, 2.3, "D")],
)
def test_the_allocation_is_left_alone_within_a_fifth(far, home, decode, role):
    assert advise(far, home, decode) == (role and Role.parse(role))


def test_its_first_three_minutes_begin_when_it_is_first_asked():
    roster, balance = two_clusters(), Balance("home", 20)
    roster.hear("D0", Load(n_decoding=20))
    assert [balance.observe(1e6 + n, roster, 5 + n, 5 + n, 0) for n in range(10)] == [None] * 10


@pytest.mark.parametrize(
    ("n_prefill", "decoding", "role"), [(4, 10, None), (9, 20, None), (9, 2, "P"), (0, 20, "D")], ids=str
)
def test_every_three_minutes_it_says_of_which_role_home_should_have_more(n_prefill, decoding, role):
    """Prefill is busy for one second of ten, and `n_prefill` more; decode has so many of 20 places taken."""
    roster, balance = two_clusters(), Balance("home", 20)
    for second in range(200):
        busy = Load(n_tokens=5 * (second % 10 <= n_prefill))
        for name in ("P0", "P1"):
            roster.hear(name, busy)
        roster.hear("D0", Load(n_decoding=decoding))
        advice = balance.observe(float(second), roster, second, second, 2 * second)
        assert advice is None or second == 180
        if second == 180:
            assert advice == (role and Role.parse(role))
