"""Rules of placement: `least_load` finds the least delay, and rules and locators can be added from outside."""

import random
from collections import Counter
from typing import NamedTuple

import pytest

from hydrainfer.cluster import Placer, Roster
from hydrainfer.cluster.messages import Peer
from hydrainfer.cluster.placing import RULES, Choice
from hydrainfer.cluster.placing.least_load import Delays
from hydrainfer.core import Load, Stage
from tests.cluster.virtual import Cluster
from tests.scheduler.fakes import make_request

pytestmark = pytest.mark.unit


def random_load(rng):
    n = rng.randrange(6)
    sizes = ((n, n * rng.choice([20, 300])),) if n and rng.random() < 0.5 else ()
    n_tokens = sizes[0][1] if sizes else n * 300
    token_s = rng.choice([0.0, 1e-4, 2e-4])
    return Load(rng.randrange(3), n_tokens, rng.randrange(30), token_s=token_s, decode_s=1e-3, sizes=sizes)


@pytest.mark.parametrize("seed", range(200))
def test_the_least_delay_is_found_without_looking_closely_at_every_instance(seed):
    rng, roster = random.Random(seed), Roster()
    roles = [rng.choice(["P", "D", "PD", "EPD", "EP"]) for _ in range(12)] + ["PD", "E"]
    roster.update(Peer(f"{role}{i}", role, 1, "-") for i, role in enumerate(roles))
    for name in roster.peers:
        if rng.random() < 0.8:
            roster.hear(name, random_load(rng))
        roster.turns[name] = rng.randrange(3)
    request = make_request("r", n_text=rng.choice([10, 200, 900]), pictures=[1] * rng.randrange(2), salt=b"")
    located = {n: rng.randrange(4, request.n_prompt) for n in roster.peers if rng.random() < 0.3}
    delays = Delays(request, roster, located)
    for step, stage in enumerate(request.plan()):
        names = roster.running(stage)
        assert delays.least(names, step) == min(names, key=lambda n: (delays.way_s(n, step), roster.turns[n]))
    names, n_kept = roster.running(Stage.PREFILL), rng.randrange(request.n_prompt)
    soonest = min(names, key=lambda n: delays.rest_s(n, n_kept))
    assert delays.soonest(names, n_kept) == (soonest, delays.rest_s(soonest, n_kept))


class Shortest(NamedTuple):
    """A rule of somebody else: the instance with the shortest name, whatever it has to do."""

    rng: random.Random

    def choose(self, request, stage, exclude, facts, located):
        names = facts.able(request, stage, exclude)
        return Choice(min(names, key=len), stage, min(names, key=len)) if names else None


class Oracle:
    """A locator of somebody else: everything is cached at one instance."""

    def __init__(self, name):
        self.name, self.forgotten = name, []

    def learn(self, name, cached):
        pass

    def forget(self, name):
        self.forgotten.append(name)

    def learned(self):
        return iter(())

    def locate(self, request):
        return {self.name: request.n_prompt - 1}


def test_a_rule_is_added_from_outside(monkeypatch):
    monkeypatch.setitem(RULES, "shortest", Shortest)
    cluster = Cluster("12EPD", 64, 32, balancing="shortest")
    for i in range(20):
        cluster.submit(make_request(f"r{i}", pictures=[i % 3]))
    owners = Counter(live.owner[0] for live in cluster.side.lives._live.values())
    cluster.run()
    assert owners == {"EPD0": 20} and all(cluster.end(f"r{i}").finish_reason == "length" for i in range(20))
    cluster.check_whole()


def test_a_locator_is_added_from_outside():
    placer = Placer(Roster(Oracle("PD2")))
    peers = [Peer(f"PD{i}", "PD", 1, "-") for i in range(3)]
    placer.roster.update(peers)
    assert [placer.choose(make_request(f"r{i}", n_text=100), Stage.PREFILL, ()) for i in range(4)] == ["PD2"] * 4
    placer.roster.hear("PD2", Load(n_tokens=1000))
    assert placer.choose(make_request("r"), Stage.PREFILL, ()) != "PD2"
    placer.roster.update(peers[:2])
    assert placer.roster.locator.forgotten == ["PD2"]
