"""A store that the instances of a cluster share: the same tokens, less to compute, whatever fails."""

import random

import pytest

from tests.cache.other_kinds import STATE, WINDOW
from tests.cluster.virtual import Cluster
from tests.scheduler.fakes import expected_tokens, make_request

pytestmark = pytest.mark.unit
BLOCK = 4


def conversation(rng, name, n_turns, pictures):
    """Prompts that continue each other: each begins with the one before. Salts keep conversations apart."""
    n_text = rng.randint(20, 60)
    for turn in range(n_turns):
        yield make_request(f"{name}.{turn}", n_text=n_text, pictures=pictures, max_tokens=3, salt=name.encode())
        n_text += rng.randint(4, 30)


def served(cluster, requests):
    """One after the other. Returns how many tokens of each prompt were not computed."""
    found = {}
    for request in requests:
        cluster.submit(request)
        cluster.run()
        cluster.now += 5.0  # what was published is saved
        assert cluster.tokens(request.id) == expected_tokens(request)
        found[request.id] = max(o.n_cached for o in cluster.outputs if o.request_id == request.id)
    cluster.check_whole()
    return found


def restart_all(cluster):
    """As after `kill -9` of everything: nothing is left but what is on the shelf."""
    for name in list(cluster.wires):
        cluster.crash(name, restart_s=2.0)
    cluster.run()
    cluster.now += 30.0


@pytest.mark.parametrize("layout", ["1EPD", "1E1P1D", "2EPD", "1EP1D", "1ED1P"])
@pytest.mark.parametrize("more", [{}, {WINDOW: 200, STATE: 60}], ids=["full", "all kinds"])
@pytest.mark.parametrize("pictures", [(), (1, 2)], ids=["text", "pictures"])
def test_after_a_restart_as_much_is_found_as_without_one(layout, more, pictures):
    """The oracle: all whole blocks of the prompt before its last token, because an earlier prompt begins with them. For
    caches that keep little, where one of the earlier prompts ended."""
    rng = random.Random(1)
    cluster = Cluster(layout, kv_blocks=400, embed_blocks=40, tokens=64, more=more, store="good")
    first = list(conversation(rng, "a", 3, pictures))
    served(cluster, first)
    restart_all(cluster)
    n_encoded = [dict(device.n_encoded) for device in cluster.devices.values()]
    again = [
        make_request(f"again{i}", r.n_prompt - 6 * len(pictures), pictures, 3, salt=b"a") for i, r in enumerate(first)
    ]
    found = served(cluster, again)
    assert [dict(device.n_encoded) for device in cluster.devices.values()] == n_encoded, "encoded again"
    for request in again:
        assert found[request.id] == (request.n_prompt - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("layout", ["1EPD", "1E1P1D", "2EPD"])
def test_a_bad_store_with_kills_and_cancellations(layout, seed):
    rng = random.Random(seed)
    more = rng.choice([{}, {WINDOW: 30, STATE: 12}])
    cluster = Cluster(layout, 60, 12, seed, chaos=True, more=more, landing=rng.choice([0, 20]), store="bad")
    requests = [r for i in range(6) for r in conversation(rng, f"c{i}", 4, rng.choice([(), (i % 3,), (1, 2)]))]
    for i, request in enumerate(requests):
        cluster.at(i * 4.0, lambda request=request: cluster.submit(request), awaited=True)
        if i % 7 == 3:
            cluster.at(i * 4.0 + 2.0, lambda request=request: cluster.cancel(request.id), awaited=True)
    for at_s in (20.0, 50.0):
        cluster.at(at_s, lambda: cluster.crash(rng.choice(list(cluster.roles)), 1.0, 3.0), awaited=True)
    cluster.run()
    for request in requests:
        end = cluster.end(request.id)
        assert end.finish_reason in ("length", "abort"), end
        if end.finish_reason == "length":
            assert cluster.tokens(request.id) == expected_tokens(request)
    cluster.now += 1000.0
    cluster.run()
    cluster.check_whole()
