"""Pools and leases under random histories: nothing lost, nothing doubled, "no room" never an exception."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hydrainfer.cache import BlockPool, CacheSet, EmbedSpec, FullSpec, Hit

pytestmark = pytest.mark.unit

KV = FullSpec.of(layers=2, kv_heads=2, head_dim=4, dtype="float32", block_tokens=4)
CHAINS = [[b"%d.%d" % (chat, i) for i in range(20)] for chat in range(2)]
EMBED = EmbedSpec.of(width=8, dtype="bfloat16", block_tokens=8)


class Leases(RuleBasedStateMachine):
    """Random reserve / grow / commit / release / forget; each step the pools must explain every reference."""

    @initialize(kv=st.integers(1, 12), embed=st.integers(1, 8))
    def start(self, kv, embed):
        self.caches = CacheSet({KV: kv, EMBED: embed})
        self.leases = {}
        self.keys = {}
        self.chains = {}  # by owner: the keys of its chat's blocks, and how many of them are written
        self.n = 0

    @rule(kv=st.integers(0, 14), pictures=st.lists(st.integers(0, 5), max_size=5), chat=st.integers(0, 1))
    def reserve(self, kv, pictures, chat):
        keys, chain = [bytes([p]) for p in pictures], CHAINS[chat][:kv]
        known = self.caches.find("kv", chain)
        hit = Hit({"embed": keys, "kv": chain}, {"embed": self.caches.find("embed", keys), "kv": known})
        before = self.caches.usage()
        owner = f"r{self.n}"
        self.n += 1
        fresh = len({k for k, b in zip(keys, hit.blocks["embed"]) if b is None})
        revived = {b for b in hit.blocks["embed"] if b is not None and self.caches.pools["embed"].is_cached(b)}
        lease = self.caches.reserve(owner, {"kv": range(kv), "embed": range(len(keys))}, hit)
        if lease is None:
            assert self.caches.usage() == before
            return
        assert len(lease.blocks["kv"]) == kv == len(set(lease.blocks["kv"]))
        same_key_same_block = dict(zip(keys, lease.blocks["embed"]))
        assert [same_key_same_block[k] for k in keys] == lease.blocks["embed"]
        assert self.caches.usage()["embed"][1] == before["embed"][1] + fresh + len(revived)
        self.leases[owner] = lease
        self.keys[owner] = keys
        self.chains[owner] = CHAINS[chat], len(known)

    @rule(data=st.data(), n=st.integers(1, 4))
    def grow(self, data, n):
        if self.leases:
            lease = self.leases[data.draw(st.sampled_from(sorted(self.leases)))]
            if "kv" not in lease.blocks:
                return
            before, room = len(lease.blocks["kv"]), self.caches.pools["kv"].n_available
            assert self.caches.grow(lease, {"kv": n}) == (n <= room)
            assert len(lease.blocks["kv"]) == before + (n if n <= room else 0)

    @rule(data=st.data())
    def commit(self, data):
        if self.leases:
            owner = data.draw(st.sampled_from(sorted(self.leases)))
            if "embed" in self.leases[owner].blocks:
                self.caches.commit(self.leases[owner], "embed", 0, self.keys[owner])

    @rule(data=st.data(), n=st.integers(1, 4))
    def commit_more_of_a_chain(self, data, n):
        if self.leases:
            owner = data.draw(st.sampled_from(sorted(self.leases)))
            lease, (chain, begin) = self.leases[owner], self.chains[owner]
            keys = chain[begin : min(begin + n, len(lease.blocks.get("kv", ())))]
            if keys:
                self.caches.commit(lease, "kv", begin, keys)
                self.chains[owner] = chain, begin + len(keys)

    @rule()
    def forget(self):
        cached = {name: n for name, (_, _, n) in self.caches.usage().items()}
        before = {name: leased for name, (_, leased, _) in self.caches.usage().items()}
        assert self.caches.forget() == cached
        assert all(usage[1:] == (before[name], 0) for name, usage in self.caches.usage().items())
        assert self.caches.find("embed", [bytes([i]) for i in range(6)]) == [None] * 6
        assert all(self.caches.find("kv", chain) == [] for chain in CHAINS)

    @rule(data=st.data(), spec=st.sampled_from([None, "embed", "kv"]))
    def release(self, data, spec):
        if self.leases:
            owner = data.draw(st.sampled_from(sorted(self.leases)))
            self.caches.release(self.leases[owner], spec)
            if spec is None:
                del self.leases[owner]

    @invariant()
    def whole(self):
        if hasattr(self, "caches"):
            self.caches.check(idle=not self.leases)
            for chain in CHAINS:
                there = [key in self.caches.pools["kv"] for key in chain]
                assert there == sorted(there, reverse=True), "a chain has no hole"
                assert len(self.caches.find("kv", chain)) == sum(there)

    def teardown(self):
        if hasattr(self, "caches"):
            for lease in self.leases.values():
                self.caches.release(lease)
            self.caches.check(idle=True)


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def test_cached_blocks_are_found_until_evicted_least_recently_used_first():
    pool = BlockPool(3)
    a, b, c = pool.take(3)
    for block, key in ((a, b"a"), (b, b"b"), (c, b"c")):
        pool.publish([block], 0, [key])
        pool.drop([block])
    pool.share(a)  # a is used again, so b is now the oldest
    pool.drop([a])
    (fresh,) = pool.take(1)
    assert fresh == b
    assert pool.lookup_all((b"a", b"b")) == [a, None]


def test_what_is_forgotten_while_it_is_in_use_is_free_afterwards():
    pool = BlockPool(3)
    pool.news = {}
    a, b = pool.take(2)
    pool.publish([a, b], 0, [b"a", b"b"])
    pool.drop([b])
    version = pool.version
    assert pool.forget_all() == 1 and pool.lookup_all((b"a", b"b")) == [None, None]
    assert pool.version > version and pool.news == {b"a": False, b"b": False}
    pool.publish([a], 0, [b"a"])  # by a request that goes on
    assert pool.lookup_all((b"a",)) == [a]
    assert pool.forget_all() == 0
    pool.drop([a])
    assert (pool.n_available, pool.n_cached) == (3, 0)
    pool.check(())


def test_only_the_last_holder_frees_a_block():
    pool = BlockPool(1)
    (block,) = pool.take(1)
    pool.share(block)
    pool.drop([block])
    assert pool.n_available == 0
    pool.drop([block])
    assert pool.n_available == 1
    with pytest.raises(AssertionError):
        pool.drop([block])


def test_specs_size_their_blocks():
    assert KV.block_bytes == 2 * 2 * 4 * 2 * 4 * 4
    assert EMBED.block_bytes == 8 * 8 * 2
    assert [KV.blocks_for(n) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_a_request_that_goes_on_after_a_reset_leaves_no_hole_in_its_chain():
    caches, chain = CacheSet({KV: 12}), CHAINS[0]
    lease = caches.reserve("a", {"kv": range(4)})
    caches.commit(lease, "kv", 0, chain[:4])
    caches.forget()
    caches.grow(lease, {"kv": 4})
    caches.commit(lease, "kv", 4, chain[4:8])
    assert caches.find("kv", chain[:8]) == []
    other = caches.reserve("b", {"kv": range(1)})
    caches.commit(other, "kv", 0, chain[:1])
    assert caches.find("kv", chain[:8]) == other.blocks["kv"]
    caches.release(lease)
    caches.release(other)
    caches.check(idle=True)
