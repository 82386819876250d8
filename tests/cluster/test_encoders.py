"""Several encoders keep as much as one of their size together: each picture has its own. One may come or go."""

import random

import pytest

from hydrainfer.planner.nouns import TraceRequest
from hydrainfer.planner.simulation import Simulator, as_requests
from tests.cluster.virtual import Cluster
from tests.planner.simulation.test_leaps import EMBED, deployment
from tests.scheduler.fakes import expected_tokens, make_request

pytestmark = pytest.mark.unit
N_PICTURES, N_ASKED, TOKENS = 120, 1000, 24


def popular(n, seed):
    """Requests for pictures of which a few are asked for often (Zipf), at a rate that one encoder bears."""
    rng, at = random.Random(seed), 0.0
    weights = [1 / (1 + i) for i in range(N_PICTURES)]
    for number in rng.choices(range(N_PICTURES), weights, k=n):
        at += rng.expovariate(10.0)
        yield TraceRequest(arrival_s=at, n_text=9, pictures=(TOKENS,), n_output=2, content=f"picture {number}")


def hit_rate(layout, n_cached, seed):
    """The share of pictures found, where the encoders' caches hold `n_cached` together."""
    instances = list(deployment(layout, kv_blocks=2000))
    encoders = [i for i in instances if str(i.role) == "E"]
    for i in instances:
        n = n_cached // len(encoders) if i in encoders else 100
        if EMBED in i.blocks:
            i.blocks[EMBED] = n * EMBED.blocks_for(TOKENS)
    simulator = Simulator(instances)
    simulator.run(as_requests(popular(N_ASKED, seed)))
    stats = [simulator.nodes[i.name].engine.stats(0.0) for i in encoders]
    assert min(s.pictures_wanted for s in stats) > 0.25 * N_ASKED / len(encoders), "an encoder has little to do"
    return sum(s.pictures_found for s in stats) / sum(s.pictures_wanted for s in stats)


@pytest.mark.parametrize("n_cached", [24, 48])
def test_two_and_four_encoders_find_what_one_of_their_size_together_does(n_cached):
    """0.57, 0.56 and 0.54 with room for 24 of 120 pictures; 0.74, 0.74 and 0.74 with room for 48 (3000 requests)."""
    rates = {k: hit_rate(f"{k}E1P1D", n_cached, 0) for k in (1, 2, 4)}
    assert rates[1] > 0.5
    assert rates[2] > 0.95 * rates[1] and rates[4] > 0.9 * rates[1], rates


def test_only_the_pictures_of_who_comes_or_goes_are_encoded_again():
    """About 1/N of them move to the others when one of N goes, and back when it returns, with nothing in its cache."""
    cluster, n = Cluster("3E1P1D", kv_blocks=64, embed_blocks=2 * N_PICTURES), 0

    def ask_all():
        """How many pictures are encoded when all are asked for, one after the other."""
        nonlocal n
        before = sum(sum(d.n_encoded.values()) for d in cluster.devices.values())
        for picture in range(N_PICTURES):
            n += 1
            cluster.submit(r := make_request(f"r{n}", n_text=3, pictures=[picture], max_tokens=1))
            cluster.run()
            assert cluster.tokens(r.id) == expected_tokens(r)
        return sum(sum(d.n_encoded.values()) for d in cluster.devices.values()) - before

    assert ask_all() == N_PICTURES and ask_all() == 0
    share = sum(cluster.devices["E0"].n_encoded.values())
    assert 0.6 * N_PICTURES / 3 < share < 1.4 * N_PICTURES / 3
    cluster.crash("E0")
    cluster.run()
    assert ask_all() == share and ask_all() == 0, "those of who has gone"
    cluster.start("E0")
    cluster.settle("E0")
    assert ask_all() == share and ask_all() == 0, "those of who has come"
    cluster.check_whole()
