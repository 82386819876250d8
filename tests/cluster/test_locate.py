"""The index of cached prefixes finds what a search through each instance's own keys finds."""

import random
from itertools import pairwise

import pytest

from hydrainfer.cluster.locate import PrefixIndex
from hydrainfer.core import Cached, CachedKeys, split_chain
from tests.scheduler.fakes import make_request

pytestmark = pytest.mark.unit
BLOCK = 4
FULL, WINDOW, STATE = (1, True), (3, False), (1, False)


class Plain:
    """What one instance has: a set of keys per cache."""

    def __init__(self, kinds):
        self.kinds, self.there = kinds, [set() for _ in kinds]

    def point(self, keys, n_most):
        """The largest number of blocks after which every cache has what it needs."""
        for n in range(min(len(keys), n_most), 0, -1):
            needed = [keys[:n] if chained else keys[max(0, n - resume) : n] for resume, chained in self.kinds]
            if all(there.issuperset(k) for there, k in zip(self.there, needed, strict=True)):
                return n
        return 0


def change(rng, plain, keys):
    """Something that may happen to the caches of an instance, as it reports it."""
    news = []
    for (resume, chained), there in zip(plain.kinds, plain.there, strict=True):
        before = set(there)
        if chained:
            there.difference_update(keys)
            there.update(keys[: rng.randint(0, len(keys))])
        else:
            there.symmetric_difference_update(rng.sample(keys, rng.randint(0, len(keys))))
        news.append(CachedKeys(resume, chained, tuple(there - before), tuple(before - there)))
    return Cached(BLOCK, tuple(news))


@pytest.mark.parametrize("kinds", [[FULL], [FULL, WINDOW], [FULL, STATE, WINDOW], [WINDOW], [STATE, FULL]])
def test_the_index_finds_what_a_search_of_every_instance_finds(kinds):
    rng, index, plain = random.Random(str(kinds)), PrefixIndex(), {}
    requests = [make_request(f"r{i}", n_text=40 + i, salt=b"%d" % (i % 3)) for i in range(6)]
    for _ in range(400):
        name = f"I{rng.randrange(9)}"
        if rng.random() < 0.05:
            index.forget(name)
            plain.pop(name, None)
            continue
        mine = plain.setdefault(name, Plain(kinds))
        index.learn(name, change(rng, mine, split_chain(rng.choice(requests).keys)[1:]))
        request = rng.choice(requests)
        keys, n_most = split_chain(request.keys)[1:], (request.n_prompt - 1) // BLOCK
        expected = {n: BLOCK * p.point(keys, n_most) for n, p in plain.items() if p.point(keys, n_most)}
        assert index.locate(request) == expected
    other = PrefixIndex()
    for name, cached in index.learned():
        other.learn(name, cached)
    assert all(other.locate(r) == index.locate(r) for r in requests)


def test_the_numbers_of_instances_that_are_gone_are_used_again():
    index, request = PrefixIndex(), make_request("r", n_text=40, salt=b"")
    keys = tuple(split_chain(request.keys)[1:])
    names = [f"I{i}" for i in range(50)]
    for before, name in pairwise(names):
        index.forget(before)
        index.learn(name, Cached(BLOCK, (CachedKeys(1, True, keys[:5]),)))
        assert index.locate(request) == {name: 20}
