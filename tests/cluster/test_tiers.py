"""A tier of somebody else keeps what the device evicts, and gives it back: the same tokens, less to compute."""

import pytest

from tests.cluster.virtual import Cluster
from tests.scheduler.fakes import expected_tokens, make_request

pytestmark = pytest.mark.unit


def rounds(n_rounds=3, n=6, pictures=()):
    """The same prompts again and again; together they are larger than the caches."""
    for r in range(n_rounds):
        for i in range(n):
            yield make_request(f"r{r}.{i}", n_text=60, pictures=pictures and (i,), max_tokens=4, salt=b"%d" % i)


def serve(cluster, requests):
    """One after the other. Returns how many tokens of their prompts were cached."""
    n_cached = 0
    for request in requests:
        cluster.submit(request)
        cluster.run()
        assert cluster.tokens(request.id) == expected_tokens(request)
        n_cached += max(o.n_cached for o in cluster.outputs if o.request_id == request.id)
    cluster.check_whole()
    return n_cached


@pytest.mark.parametrize("layout", ["1EPD", "1E1P1D"])
@pytest.mark.parametrize("pictures", [(), (1,)], ids=["text", "pictures"])
def test_evicted_blocks_are_found_again_in_a_tier(layout, pictures):
    """By requests that wait where it is. One that comes from an encoder brings its pictures, and asks no tier."""
    found = {}
    for keeps in (False, True):
        cluster = Cluster(layout, kv_blocks=40, embed_blocks=8, keeps_evicted=keeps)
        found[keeps] = serve(cluster, rounds(pictures=pictures))
    n_prompt = 60 + 6 * len(pictures)
    arrives = layout == "1E1P1D" and pictures
    assert found[False] == 0 and found[True] >= (0 if arrives else 0.9 * 2 * 6 * (n_prompt - 4))


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("layout", ["1EPD", "1E1P1D", "2EPD"])
def test_many_at_once_with_late_and_failing_copies(layout, seed):
    cluster = Cluster(layout, kv_blocks=60, embed_blocks=12, seed=seed, chaos=True, keeps_evicted=True)
    requests = list(rounds(n_rounds=4, n=5, pictures=(1,)))
    for i, request in enumerate(requests):
        cluster.at(i * 3.0, lambda request=request: cluster.submit(request), awaited=True)
        if i % 7 == 3:
            cluster.at(i * 3.0 + 2.0, lambda request=request: cluster.cancel(request.id), awaited=True)
    cluster.run()
    for request in requests:
        end = cluster.end(request.id)
        assert end.finish_reason in ("length", "abort"), end
        if end.finish_reason == "length":
            assert cluster.tokens(request.id) == expected_tokens(request)
    cluster.check_whole()
