"""A store of blocks that instances share and that outlives them, as the bookkeeping of one instance sees it.

    arrival ─asked─> what the store has of its prompt ─loaded, if that is sooner than computing─> device
    device ─published─> saved ─> store

A stored block has the key under which the caches find it, which depends on all that its bytes depend on: the model's
weights and configuration, the dtype, everything before it. Where it is kept depends on its cache's layout, too
(`layout_digest`). The store is asked about each request as it comes (`StoreTier`), because its answers take time; an
answer may be outdated at once, so whoever loads takes a block that does not come for a miss.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Literal, NamedTuple

from hydrainfer.cache.spec import CacheSpec

STORE = "store"
_MOST_KNOWN = 1 << 16  # blocks that the store is remembered to have
_FIRST_S, _LONGEST_S = 1.0, 30.0  # for which a store that failed is left alone: doubled each time


class BlockName(NamedTuple):
    """The name of a block in a store. `key`: 16 bytes, different for different contents. `kind`: the cache's name.
    `number`: the block's place in its chain: of blocks of the same age, those with higher numbers are evicted first.
    `group`: where a store has several places, the blocks of a group lie in the same one."""

    key: bytes
    kind: str
    number: int
    group: bytes


def layout_digest(spec: CacheSpec) -> bytes:
    """What the bytes of a block with a given key depend on besides: the layout of the cache's blocks."""
    facts = (spec.name, spec.block_tokens, spec.window, spec.layers, *((p.name, p.shape, p.dtype) for p in spec.parts))
    return blake2b(repr(facts).encode(), digest_size=16).digest()


def stored_bytes(spec: CacheSpec) -> int:
    """The bytes of a block in a store, which does not keep the padding behind the last layer."""
    return len(spec.layers) * spec.offsets[-1]


class BlockRef(NamedTuple):
    """A block by its key in the caches. `number`, `group`: see `BlockName`."""

    key: bytes
    number: int
    group: bytes


def name_of(layout: bytes, spec: str, ref: BlockRef) -> BlockName:
    """The name in a store of a block of a cache whose `layout_digest` is `layout`."""
    return BlockName(blake2b(ref.key + layout, digest_size=16).digest(), spec, ref.number, ref.group)


class StoreJob(NamedTuple):
    """Work for a store. `blocks`: by cache, the blocks it is about; for `load` and `save` also our blocks, in the same
    order, that they are copied to or from."""

    what: Literal["ask", "load", "save", "touch"]
    blocks: Mapping[str, tuple[Sequence[BlockRef], Sequence[int]]]

    @property
    def n_blocks(self) -> int:
        return sum(len(refs) for refs, _ in self.blocks.values())


class StoreResult(NamedTuple):
    """The result of a job: by cache, which of its blocks are in the store now, or came. `seconds`: what it took by
    itself. `error`: the store could not be used, in one line; if `full`, only not written to."""

    there: Mapping[str, Sequence[bool]]
    error: str = ""
    full: bool = False
    seconds: float = 0.0


def refs_of(spec: CacheSpec, keys: Sequence[bytes], numbers: Iterable[int]) -> list[BlockRef]:
    """The blocks of a request with these numbers. `keys`: those of all its blocks, by number."""
    return [BlockRef(keys[i], i, spec.group(keys, i)) for i in numbers]


class StoreTier:
    """A `Tier`: the blocks that the store has said it has. `open`: whether it is used now. After a load that failed,
    one is tried at a time until one has worked: the other requests do not wait for what may fail again."""

    name = STORE

    def __init__(self, specs: Mapping[str, CacheSpec]) -> None:
        self.specs = specs
        self.version = 0
        self.byte_s = 0.0  # of a load, as measured
        self._n_failures: Counter[str] = Counter()  # in a row, by job
        self._n_bytes_held = 0
        self._trying = False
        self._known: OrderedDict[tuple[str, bytes], int] = OrderedDict()
        self._refs: dict[int, tuple[str, BlockRef]] = {}
        self._n_made = 0
        self._shut_until = 0.0
        self._open = True

    # ---- as a tier

    def evicted(self, spec: str, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Nothing: blocks are saved when they are published."""

    def find(self, spec: str, keys: Sequence[bytes]) -> list[int | None]:
        if not self._open or not self._known or (self._trying and self._n_bytes_held):
            return [None] * len(keys)
        known = self._known
        return [known.get((spec, key)) for key in keys]

    def hold(self, spec: str, blocks: Sequence[int]) -> None:
        """Note that blocks are to be loaded. The store may lose them all the same."""
        self._held(len(blocks) * self.specs[spec].block_bytes)

    def drop(self, spec: str, blocks: Sequence[int]) -> None:
        self._held(-len(blocks) * self.specs[spec].block_bytes)

    def _held(self, n_bytes: int) -> None:
        self._n_bytes_held += n_bytes
        self.version += self._trying  # what was found before is found no longer, or again

    def ref(self, block: int) -> BlockRef | None:
        """The block of this number; None if it is not known any more."""
        entry = self._refs.get(block)
        return None if entry is None else entry[1]

    # ---- what it has

    def heard(self, spec: str, refs: Sequence[BlockRef], there: Sequence[bool]) -> None:
        """Note which of these blocks the store has."""
        for ref, has in zip(refs, there, strict=True):
            entry = spec, ref.key
            if has:
                if entry not in self._known:
                    self._n_made += 1
                    self._known[entry] = self._n_made
                    self._refs[self._n_made] = spec, ref
                    self.version += 1
                self._known.move_to_end(entry)
            elif (number := self._known.pop(entry, None)) is not None:
                del self._refs[number]
                self.version += 1
        while len(self._known) > _MOST_KNOWN:
            del self._refs[self._known.popitem(last=False)[1]]
            self.version += 1

    # ---- whether it is used

    @property
    def open(self) -> bool:
        return self._open

    def turn(self, now: float) -> bool:
        """Use the store again when it has been left alone for long enough. Returns whether it is used."""
        if not self._open and now >= self._shut_until:
            self._open = True
            self.version += 1
        return self._open

    def failed(self, what: str, now: float) -> int:
        """Leave the store alone for a while, which is longer each time that jobs of this kind fail in a row. Returns
        how often they did."""
        self._n_failures[what] += 1
        self._trying = self._trying or what == "load"
        n_failures = self._n_failures[what]
        self._shut_until = max(self._shut_until, now + min(_LONGEST_S, _FIRST_S * 2 ** min(n_failures - 1, 10)))
        if self._open:
            self._open = False
            self.version += 1
        return n_failures

    def worked(self, what: str) -> None:
        self._n_failures[what] = 0
        if what == "load" and self._trying:
            self._trying = False
            self.version += 1

    def opens_at(self) -> float:
        """The time at which it is used again; infinity if it is used."""
        return float("inf") if self._open else self._shut_until

    def loaded(self, n_bytes: int, seconds: float) -> None:
        """Nothing: the time includes waiting for other loads, see `measured`."""

    def measured(self, n_bytes: int, seconds: float) -> None:
        """Note how long a load took by itself."""
        each_s = seconds / n_bytes
        self.byte_s = each_s if not self.byte_s else self.byte_s + 0.2 * (each_s - self.byte_s)

    def load_s(self, n_bytes: int) -> float:
        """How long it takes to load so much, and all that is to be loaded before."""
        return (n_bytes + self._n_bytes_held) * self.byte_s
