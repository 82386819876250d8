"""Caches that share one range of memory, under random histories: no byte is two blocks', floors hold, and what can be
found is all there."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hydrainfer.cache import (
    CacheSet,
    EmbedSpec,
    FullSpec,
    Hit,
    Part,
    StateLayout,
    StateSpec,
    Wishes,
    padded,
    share_memory,
)
from tests.cache.other_kinds import STATE, WINDOW

pytestmark = pytest.mark.unit

KV = FullSpec.of(layers=1, kv_heads=1, head_dim=1, dtype="float32", block_tokens=4)
EMBED = EmbedSpec.of(width=1, dtype="float32", block_tokens=4)
KINDS = (KV, WINDOW, STATE)
WISHES = Wishes(n_longest=24)


def chain(text):
    """The keys of a text's beginnings, one per letter."""
    return [text[: i + 1].encode() for i in range(len(text))]


class Lending(RuleBasedStateMachine):
    """Random reserve / grow / slide / commit / release over few blocks, of texts that begin alike."""

    @initialize(kinds=st.sets(st.sampled_from(KINDS), min_size=2), extra=st.lists(st.integers(0, 20), min_size=3))
    def start(self, kinds, extra):
        kinds = [spec for spec in KINDS if spec in kinds]
        sizes = {spec: spec.least(WISHES) + n for spec, n in zip(kinds, extra)}
        sizes, split = share_memory(sizes | {EMBED: 4}, WISHES)
        self.owner_of, self.split = {}, split
        self.caches = CacheSet(sizes, split, lambda extent: self.owner_of.__setitem__(extent, None))
        self.leases, self.texts, self.n = {}, {}, 0

    def _names(self, lease):
        return [name for name in lease.blocks if name != "embed"]

    @rule(text=st.text("ab", max_size=9), n_more=st.integers(0, 6))
    def reserve(self, text, n_more):
        keys = {name: chain(text) for name in self.caches.pools if name != "embed"}
        found = {name: self.caches.find(name, of) for name, of in keys.items()}
        hit = Hit(keys, {name: of if name == "kv" else of[:1] for name, of in found.items()})
        need = {name: range(len(text) + n_more if name == "kv" else 3) for name in keys}
        owner = f"r{self.n}"
        self.n += 1
        lease = self.caches.reserve(owner, need, hit)
        if lease is None:
            return
        for name, blocks in hit.blocks.items():
            for number, block in enumerate(blocks[: len(need[name])]):
                assert block is None or lease.blocks[name][number] == block, "what was found has been lent"
        self.leases[owner], self.texts[owner] = lease, text

    @rule(data=st.data(), n=st.integers(1, 5))
    def grow(self, data, n):
        if self.leases:
            lease = self.leases[data.draw(st.sampled_from(sorted(self.leases)))]
            name = data.draw(st.sampled_from(self._names(lease)))
            before = len(lease.blocks[name])
            grown = self.caches.grow(lease, {name: n})
            assert len(lease.blocks[name]) == before + n * grown

    @rule(data=st.data())
    def slide(self, data):
        if self.leases:
            lease = self.leases[data.draw(st.sampled_from(sorted(self.leases)))]
            for name in self._names(lease):
                if self.caches.specs[name].slides:
                    self.caches.slide(lease, name, lease.first[name] + 1, 3)

    @rule(data=st.data())
    def commit(self, data):
        if self.leases:
            owner = data.draw(st.sampled_from(sorted(self.leases)))
            lease, keys = self.leases[owner], chain(self.texts[owner])
            for name in self._names(lease):
                if lease.first[name] == 0:
                    self.caches.commit(lease, name, 0, keys[: len(lease.blocks[name])])

    @rule(data=st.data())
    def release(self, data):
        if self.leases:
            owner = data.draw(st.sampled_from(sorted(self.leases)))
            self.caches.release(self.leases.pop(owner))

    @rule(text=st.text("ab", min_size=9, max_size=9))
    def whoever_is_alone_finds_room(self, text):
        """All but the floors of the others, whatever is found and wherever it lies."""
        for lease in self.leases.values():
            self.caches.release(lease)
        self.leases.clear()
        need = {name: range(self.caches.most(name) if name == "kv" else 3) for name in self.caches.pools}
        del need["embed"]
        keys = {name: chain(text) for name in need}
        found = {name: self.caches.find(name, of)[: len(need[name])] for name, of in keys.items()}
        owner = f"r{self.n}"
        self.n += 1
        lease = self.caches.reserve(owner, need, Hit(keys, found))
        if lease is None:
            assert self.caches.free_shared()
            lease = self.caches.reserve(owner, need)
        assert lease is not None
        self.leases[owner], self.texts[owner] = lease, text

    @invariant()
    def whole(self):
        if hasattr(self, "caches"):
            self.caches.check(idle=not self.leases)
            taken = {}
            for lease in self.leases.values() if self.split is not None else ():
                for name in self._names(lease):
                    size = self.caches.specs[name].block_bytes
                    for block in lease.blocks[name]:
                        for at in range(block * size, (block + 1) * size, 4):
                            assert taken.setdefault(at, name) == name, "two caches have the same byte"
            if "kv" in self.caches.pools:
                pool = self.caches.pools["kv"]
                for text in self.texts.values():
                    there = [key in pool for key in chain(text)]
                    assert there == sorted(there, reverse=True), "a block is found that continues none"

    def teardown(self):
        if hasattr(self, "caches"):
            for lease in self.leases.values():
                self.caches.release(lease)
            self.caches.check(idle=True)


TestLending = Lending.TestCase
TestLending.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def of_bytes(name, n_bytes):
    return FullSpec(name, 1, (Part("numbers", (n_bytes // 4,), "float32"),))


@given(sizes=st.lists(st.integers(1, 4000).map(lambda n: 16 * n), min_size=2, max_size=4))
def test_extents_hold_whole_numbers_of_all_blocks(sizes):
    specs = [of_bytes(str(i), n) for i, n in enumerate(sizes)]
    wide = [spec.block_bytes for spec in padded([*specs, EMBED])]
    assert wide.pop() == EMBED.block_bytes and all(n % 16 == 0 and n >= old for n, old in zip(wide, sizes))


def test_little_is_lost_to_blocks_of_many_sizes():
    """Those of Qwen3.5-9B, of which one extent holds 98 and 1, and of models of windows."""
    for sizes in ((524_288, 51_511_296), (393_216, 79_872 * 8), (327_680, 1_900_544)):
        specs = [of_bytes(str(i), n) for i, n in enumerate(sizes)]
        assert all(new.block_bytes <= 1.03 * old.block_bytes for new, old in zip(padded(specs), specs))


def test_all_blocks_of_an_extent_are_evicted_together_with_what_is_older():
    state = msgspec.structs.replace(StateSpec.of(StateLayout((0,), (4, 8)), "float32", 4))
    sizes, split = share_memory({KV: 12, state: 6}, Wishes())
    moved = []
    caches = CacheSet(sizes, split, moved.append)
    assert split.blocks == {"kv": 4, "state": 1} and split.owned == {"kv": 3, "state": 6}
    first, second = (caches.reserve(name, {"kv": range(4)}) for name in "ab")
    for lease, text in ((first, "aaaa"), (second, "bbbb")):
        caches.commit(lease, "kv", 0, chain(text))
    caches.release(first)
    many = caches.reserve("many", {"state": range(7)})
    assert many is not None and moved == [2], "the extent that nobody uses"
    assert caches.find("kv", chain("aaaa")) == first_blocks(caches, "aaaa")
    assert caches.grow(many, {"state": 1}) and moved == [2, 0]
    assert caches.find("kv", chain("aaaa")) == [] and caches.find("kv", chain("bbbb")) == second.blocks["kv"]
    assert not caches.grow(many, {"state": 1}), "the last one is in use, and the floor"
    assert caches.usage()["kv"] == (4, 4, 0) and caches.usage()["state"][:2] == (8, 8)
    caches.release(many)
    assert caches.grow(second, {"kv": 8}) and len(moved) == 4
    caches.release(second)
    caches.check(idle=True)


def first_blocks(caches, text):
    return caches.pools["kv"].lookup_all(chain(text))


def test_too_little_memory_is_not_shared():
    sizes, split = share_memory({KV: 1, STATE: 2}, WISHES)
    assert split is None and {spec.name: n for spec, n in sizes.items()} == {"kv": 1, "state": 2}
    assert share_memory({KV: 40, EMBED: 9}, WISHES).split is None, "there is nothing to share with"
