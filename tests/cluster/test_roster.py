"""Who gets a request: the ring of encoders, bursts, loads, suspects, and stages that nobody runs."""

import random

import msgspec
import pytest

from hydrainfer.cluster import Placer, Roster
from hydrainfer.cluster.messages import Peer
from hydrainfer.cluster.roster import delay_s
from hydrainfer.core import Cached, CachedKeys, HashRing, Layout, Load, Stage, split_chain
from tests.cluster.virtual import Cluster
from tests.scheduler.fakes import make_request

pytestmark = pytest.mark.unit


def placer(layout, balancing="least_load", seed=0):
    """All of them there."""
    made = Placer(Roster(), balancing, random.Random(seed))
    roles = Layout.parse(layout).instances
    made.roster.update(Peer(f"{role}{i}", str(role), 1, "-") for i, role in enumerate(roles))
    return made


def without(made, *names):
    return made.roster.update([p for n, p in made.roster.peers.items() if n not in names])


def suspect(made, *names):
    made.roster.update([msgspec.structs.replace(p, suspect=p.name in names) for p in made.roster.peers.values()])


def hear(made, **loads):
    for name, load in loads.items():
        made.roster.hear(name, load)


def cached(made, request, name):
    return made.roster.locator.locate(request).get(name, 0)


def full(added, dropped=()):
    """The news of an instance whose only cache keeps all tokens."""
    return Cached(4, (CachedKeys(1, True, added, dropped),))


def test_a_ring_moves_only_the_keys_of_who_left():
    names = [f"E{i}" for i in range(5)]
    ring, keys = HashRing(names), [b"picture%d" % i for i in range(500)]
    before = {k: ring.owner(k, names) for k in keys}
    after = {k: ring.owner(k, names[1:]) for k in keys}
    assert all(after[k] == before[k] for k in keys if before[k] != "E0")
    assert {after[k] for k in keys if before[k] == "E0"} == set(names[1:])
    shares = [list(before.values()).count(n) for n in names]
    assert min(shares) > 40, shares
    assert ring.owner(b"x", []) is None


def test_a_picture_goes_to_the_encoder_that_its_content_names_while_that_is_not_much_busier():
    made = placer("3E1P1D")
    requests = [make_request(f"r{i}", pictures=[i % 7]) for i in range(70)]

    def chosen(request, *busy):
        hear(made, **dict.fromkeys(made.roster.peers, Load()))  # all of them have said that they have nothing to do
        hear(made, **{n: Load(n_pictures=k, picture_s=0.1) for n, k in busy})
        return made.choose(request, Stage.ENCODE, ())

    owners = [chosen(r) for r in requests]
    assert owners[:7] * 10 == owners and len(set(owners)) == 3
    assert chosen(requests[0], (owners[0], 1)) == owners[0], "as long as it takes to encode it again"
    assert chosen(requests[0], (owners[0], 2)) != owners[0]
    without(made, owners[0])
    again = [chosen(r) for r in requests[:7]]
    assert owners[0] not in again
    assert all(a == b for a, b in zip(again, owners) if b != owners[0])


def test_a_burst_of_different_pictures_is_spread():
    made = placer("4E1P1D")
    owners = [made.choose(make_request(f"r{i}", pictures=[i]), Stage.ENCODE, ()) for i in range(200)]
    assert {owners.count(n) for n in set(owners)} <= {49, 50, 51}


def test_the_way_with_more_instances_behind_it_gets_more_requests():
    made = placer("1E2PD+1EPD")
    counts = {"E0": 0, "EPD3": 0}
    for i in range(90):
        request = make_request(f"r{i}", n_text=200, pictures=[i])
        counts[way := made.choose(request, Stage.ENCODE, ())] += 1
        if way == "E0":
            made.choose(request, Stage.PREFILL, ["EPD3"])
    assert counts["E0"] > 1.4 * counts["EPD3"], counts


def test_the_order_in_which_a_layout_is_written_changes_nothing():
    """But the numbers in the names, which decide between equals."""
    rng = random.Random(1)

    def chosen(roles):
        made = Placer(Roster())
        made.roster.update(Peer(name, str(role), 1, "-") for name, role in roles)
        requests = [make_request(f"r{i}", pictures=[i] * (i % 3 == 0)) for i in range(60)]
        return [made.choose(r, r.plan()[0], ()) for r in requests]

    roles = list(placer("2E2P1ED+2EPD").roster.roles.items())
    assert all(chosen(rng.sample(roles, len(roles))) == chosen(roles) for _ in range(10))


@pytest.mark.parametrize("balancing", ["least_load", "round_robin", "random"])
def test_a_burst_is_spread(balancing):
    """Before any of them has said how busy it is now."""
    cluster = Cluster("3EPD", 64, 32, balancing=balancing)
    for i in range(30):
        cluster.submit(make_request(f"r{i}"))
    owners = [live.owner[0] for live in cluster.side.lives._live.values()]
    shares = sorted(owners.count(name) for name in cluster.roles)
    assert sum(shares) == 30 and (shares[0] >= 4 if balancing == "random" else shares == [10, 10, 10])


@pytest.mark.parametrize("stage", [Stage.PREFILL, Stage.DECODE])
def test_a_burst_between_instances_is_spread(stage):
    made = placer("1E3P3D")
    owners = [made.choose(make_request(f"r{i}"), stage, ()) for i in range(30)]
    assert sorted(owners.count(n) for n in set(owners)) == [10, 10, 10]


def test_the_least_predicted_delay_is_chosen():
    made = placer("3EPD")
    slow, fast = Load(n_tokens=100, token_s=1e-2), Load(n_tokens=1000, token_s=1e-4)
    decoding = Load(n_decoding=64, decode_s=1e-2)
    assert delay_s(slow) == pytest.approx(1.0) and delay_s(fast) == pytest.approx(0.1)
    assert delay_s(decoding) == pytest.approx(0.64)
    hear(made, EPD0=slow, EPD1=fast, EPD2=decoding)
    assert made.choose(make_request("a"), Stage.PREFILL, ()) == "EPD1"
    assert made.choose(make_request("b"), Stage.PREFILL, ["EPD1"]) == "EPD2"
    made.roster.hear("EPD1", Load(n_pictures=100))  # not measured yet: a guess
    assert made.choose(make_request("c"), Stage.PREFILL, ()) == "EPD2"


def test_placed_requests_count_until_the_next_report_of_the_instance():
    made = placer("2EPD")
    hear(made, EPD0=Load(n_tokens=10), EPD1=Load(n_tokens=100))
    owners = [made.choose(make_request(f"r{i}", n_text=60), Stage.PREFILL, ()) for i in range(4)]
    assert owners == ["EPD0", "EPD0", "EPD1", "EPD0"]
    made.roster.hear("EPD0", Load())
    assert made.choose(make_request("r"), Stage.PREFILL, ()) == "EPD0"


def test_little_of_a_long_prompt_goes_before_a_short_one():
    made = placer("2EPD")
    made.roster.hear("EPD0", Load(n_tokens=8000, sizes=((1, 8000),)))
    made.roster.hear("EPD1", Load(n_tokens=1000, sizes=((10, 1000),)))
    assert made.choose(make_request("short", n_text=50), Stage.PREFILL, ()) == "EPD0"  # 50 tokens before it, not 500
    assert made.choose(make_request("long", n_text=5000), Stage.PREFILL, ()) == "EPD1"
    assert made.roster.loads["EPD0"].n_before(10) == 20 and made.roster.loads["EPD1"].n_before(10_000) == 6000


def test_sizes_stay_few_however_many_are_placed_between_two_reports():
    made = placer("3EPD")
    hear(made, **{f"EPD{i}": Load(n_tokens=40, sizes=((2, 40),)) for i in range(3)})
    for i in range(3000):
        made.choose(make_request(f"r{i}", n_text=1 + i % 100), Stage.PREFILL, ())
    assert all(len(load.sizes) <= 8 for load in made.roster.loads.values())
    assert [sum(tokens for _, tokens in load.sizes) for load in made.roster.loads.values()] == [
        load.n_tokens for load in made.roster.loads.values()
    ]
    assert sum(n for load in made.roster.loads.values() for n, _ in load.sizes) == 3000 + 6


def test_a_suspect_is_chosen_only_if_there_is_nobody_else():
    made, request = placer("1E1P2D+1PD"), make_request("x", pictures=[1])
    hear(made, D2=Load(n_decoding=50), PD4=Load(n_decoding=60))
    suspect(made, "D3")
    assert made.choose(request, Stage.DECODE, ()) == "D2"
    assert made.choose(request, Stage.DECODE, ["D2"]) == "PD4"
    assert made.choose(request, Stage.DECODE, ["D2", "PD4"]) == "D3"
    suspect(made, "E0", "D2", "D3", "PD4")
    assert made.choose(request, Stage.ENCODE, ()) == "E0"
    assert made.choose(request, Stage.DECODE, ()) == "D3"


def test_the_dead_and_the_excluded_are_not_chosen():
    made, request = placer("1E1P2D+1PD"), make_request("x", pictures=[1])
    assert [p.name for p in without(made, "D2")] == ["D2"]
    assert made.choose(request, Stage.DECODE, ["D3", "PD4"]) is None
    without(made, "E0", "P1", "PD4")
    assert made.choose(request, Stage.PREFILL, ()) is None and made.choose(request, Stage.ENCODE, ()) is None
    assert made.choose(request, Stage.DECODE, ()) == "D3"


def test_another_incarnation_starts_with_no_load():
    made = placer("2EPD")
    hear(made, EPD0=Load(n_tokens=1000), EPD1=Load(n_tokens=10))
    gone = made.roster.update(
        [msgspec.structs.replace(p, incarnation=2) if p.name == "EPD0" else p for p in made.roster.peers.values()]
    )
    assert [(p.name, p.incarnation) for p in gone] == [("EPD0", 1)]
    assert made.roster.knows("EPD0", 2) and not made.roster.knows("EPD0", 1)
    assert made.choose(make_request("a"), Stage.PREFILL, ()) == "EPD0"


def test_an_instance_with_the_cached_prefix_is_preferred_until_it_is_too_busy():
    made, request = placer("3PD"), make_request("a", n_text=40, salt=b"")
    keys = tuple(split_chain(request.keys)[1:])
    made.roster.locator.learn("PD1", full(keys[:8]))
    made.roster.locator.learn("PD2", full(keys[:3]))
    assert [cached(made, request, f"PD{i}") for i in range(3)] == [0, 32, 12]
    assert made.choose(request, Stage.PREFILL, ()) == "PD1"
    assert made.choose(make_request("b", n_text=40, salt=b"other"), Stage.PREFILL, ()) != "PD1"
    hear(made, PD0=Load(), PD1=Load(n_tokens=33), PD2=Load())
    assert made.choose(request, Stage.PREFILL, ()) == "PD2"
    made.roster.locator.learn("PD2", full((), keys[1:3]))
    assert cached(made, request, "PD2") == 4
    without(made, "PD1")
    made.roster.update([*made.roster.peers.values(), Peer("PD1", "PD", 2, "-")])
    assert cached(made, request, "PD1") == 0, "another incarnation has computed nothing"


def test_a_request_goes_past_the_encoder_to_who_has_computed_its_pictures():
    made, request = placer("1E2PD"), make_request("a", n_text=9, pictures=[1, 2], salt=b"")
    keys = tuple(split_chain(request.keys)[1:])
    made.roster.locator.learn("PD1", full(keys[:3]))
    assert made.choose(request, Stage.ENCODE, ()) == "E0", "the second picture is not wholly computed"
    made.roster.locator.learn("PD2", full(keys[:4]))
    assert made.choose(request, Stage.ENCODE, ()) == "PD2"
    assert made.choose(request, Stage.ENCODE, ["PD2"]) == "E0"
    made.roster.hear("PD2", Load(n_tokens=1000))
    assert made.choose(request, Stage.ENCODE, ()) == "E0"


@pytest.mark.parametrize(
    ("pull_s", "token_s", "pictures", "way"),
    [(1e-5, 1e-3, [1], "D1"), (1e-2, 1e-3, [1], "EP0"), (1e-5, 1e-5, [1], "EP0"), (1e-5, 1e-3, [1, 2], "EP0")],
    ids=["soon", "slow", "computed-sooner", "another-picture"],
)
def test_kv_kept_by_a_decode_instance_is_fetched_if_that_takes_less_time(pull_s, token_s, pictures, way):
    made = placer("1EP1D")
    request = make_request("r", n_text=400, pictures=pictures, salt=b"")
    keys = split_chain(make_request("r", n_text=400, pictures=[1], salt=b"").keys)[1:]
    made.roster.locator.learn("D1", full(tuple(keys)))
    made.roster.hear("EP0", Load(token_s=token_s, picture_s=1e-4, pull_s=pull_s))
    assert made.choose(request, Stage.ENCODE, ()) == way
    made.roster.locator.learn("EP0", full(tuple(keys)))
    assert made.choose(msgspec.structs.replace(request, id="again"), Stage.ENCODE, ()) == "EP0"
