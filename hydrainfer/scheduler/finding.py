"""What of a request the caches have: how many tokens, which pictures, and which blocks only other tiers have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from hydrainfer.cache import BlockRef, CacheSet, CacheSpec, Fetch, Found, Hit, Tier, refs_of
from hydrainfer.core import Handoff, LiveSequence, Request, Stage

Visit = tuple[Stage, ...]
"""The steps of a request that follow each other at one instance."""
_AWAY = -1  # in the place of a block that another tier has
_MOST_LOST = 2  # copies of a sequence that may fail before it is computed without other tiers


class Finder:
    """The keys of sequences, and what the caches and the other `tiers`, which are asked in this order, have under them.
    `work_s(tokens, pictures)`: how long computing so much takes here."""

    def __init__(
        self,
        caches: CacheSet,
        tiers: Sequence[Tier] = (),
        work_s: Callable[[int, int], float] = lambda *_: float("inf"),
    ) -> None:
        self.tiers = {tier.name: tier for tier in tiers}
        self.lost: dict[str, int] = {}  # by sequence id: how often what other tiers seemed to have did not come
        self._caches, self._work_s = caches, work_s
        self._keys: dict[str, tuple[int, dict[str, list[bytes]]]] = {}  # by sequence id: n tokens, keys by spec
        self._hits: dict[tuple[str, bool], tuple[tuple, Hit]] = {}  # by sequence id: what it depends on, and the hit
        self._specs = list(caches.specs.values())
        self._of_visit: dict[Visit, list[CacheSpec]] = {}
        self._chains = [spec.name for spec in self._specs if spec.chained]

    def specs_of(self, request: Request, visit: Visit) -> list[CacheSpec]:
        """The caches that these steps read or write."""
        specs = self._of_visit.get(visit)
        if specs is None:
            specs = self._of_visit[visit] = [s for s in self._specs if not s.stages.isdisjoint(visit)]
        return [s for s in specs if s.used_by(request)]

    def match(self, seq: LiveSequence, visit: Visit, tiers: bool = True) -> Hit:
        """Find the cached blocks that these steps need and may share; with `tiers`, also those that other tiers have.
        The result is kept while the caches' keys do not change, because it is asked for in every step until there is
        room."""
        version, tiers = self._caches.version, tiers and self.lost.get(seq.id, 0) < _MOST_LOST
        if self.tiers:  # asked so often that an empty sum would show
            version += sum(tier.version for tier in self.tiers.values())
        state = (visit, len(seq.tokens), seq.n_computed, version)
        known = self._hits.get((seq.id, tiers))
        if known is None or known[0] != state:
            known = self._hits[seq.id, tiers] = state, self._match(seq, visit, tiers)
        return known[1]

    def _match(self, seq: LiveSequence, visit: Visit, tiers: bool) -> Hit:
        if not self.tiers or not tiers:
            return self._found(seq, visit, ())
        hit = self._found(seq, visit, self.tiers.values())
        if not hit.fetches:
            return hit._replace(n_away={})
        here, specs = self._found(seq, visit, ()), self._caches.specs
        n_more = max(0, hit.n_tokens - max(here.n_tokens, seq.n_computed))
        worth_s = self._work_s(n_more, len(here.missing) - len(hit.missing))
        n_bytes: Counter[str] = Counter()
        for fetch in hit.fetches:
            n_bytes[fetch.tier] += len(fetch.blocks) * specs[fetch.spec].block_bytes
        fetch_s = sum(self.tiers[tier].load_s(n) for tier, n in n_bytes.items())
        if fetch_s >= worth_s:
            return here._replace(n_away={})
        return hit._replace(worth_s=worth_s, n_here=here.n_tokens, n_away=self._by_tier(seq, visit, here, hit))

    def _by_tier(self, seq: LiveSequence, visit: Visit, here: Hit, hit: Hit) -> dict[str, int]:
        """The tokens that each tier adds to what is here, comes with an arrival, or is in those before it."""
        n_away: dict[str, int] = {}
        n_known, tiers = max(here.n_tokens, seq.n_computed), [*self.tiers.values()]
        last = max(i for i, tier in enumerate(tiers) if any(fetch.tier == tier.name for fetch in hit.fetches))
        for i in range(last + 1):
            n_tokens = hit.n_tokens if i == last else self._found(seq, visit, tiers[: i + 1]).n_tokens
            n_away[tiers[i].name] = max(0, n_tokens - n_known)
            n_known = max(n_known, n_tokens)
        return n_away

    def _found(self, seq: LiveSequence, visit: Visit, asked: Iterable[Tier]) -> Hit:
        request, specs = seq.request, self.specs_of(seq.request, visit)
        keys = self.keys_of(seq)
        found = {spec.name: self._caches.find(spec.name, keys[spec.name]) for spec in specs}
        away = {s.name: find_away(asked, s, keys[s.name], found[s.name]) for s in specs} if asked else {}
        n_most = len(seq.tokens) - 1  # the last one is always computed
        n_tokens = safe_tokens(specs, found, n_most)
        chained = [spec.safe(found[spec.name], n_most) or 0 for spec in specs if spec.chained]
        n_brought = max(n_tokens, seq.n_computed)  # earlier tokens are here, or come with an arrival
        blocks = {spec.name: spec.reusable(request, found[spec.name], n_brought) for spec in specs}
        missing = missing_pictures(request, specs, blocks, n_tokens) if request.media else ()
        fetches = fetches_of(blocks, away) if away else ()
        return Hit(keys, blocks, n_tokens, min(chained, default=0), missing, fetches, n_here=n_tokens)

    def lacking(self, seq: LiveSequence, visit: Visit) -> dict[str, list[BlockRef]]:
        """The blocks, by cache, that a store might have of a sequence and that are not here."""
        keys, lacking = self.keys_of(seq), dict[str, list[BlockRef]]()
        for spec in self.specs_of(seq.request, visit):
            found = self._caches.find(spec.name, keys[spec.name])
            numbers = range(len(found), len(keys[spec.name]))
            missing = numbers if spec.chained else [i for i, block in enumerate(found) if block is None]
            if refs := refs_of(spec, keys[spec.name], missing):
                lacking[spec.name] = refs
        return lacking

    def computed_by(
        self, other: LiveSequence, seq: LiveSequence, visit: Visit, n_tokens: int, *, fetches: bool = False
    ) -> bool:
        """Whether `other`, which computes its prompt here, or `fetches` it from another tier, will publish enough
        tokens that `seq` could share and has not found here: at least `n_tokens`, or half of what `seq` would compute
        itself."""
        if other.id not in self._keys:
            return False
        theirs, own = self._keys[other.id][1], self.keys_of(seq)
        if not any(own.get(name, [])[:1] == theirs.get(name, [])[:1] for name in self._chains):
            return False  # not even the first block
        hit = self.match(seq, visit, tiers=not fetches)
        n_tokens = min(n_tokens, (len(seq.tokens) - hit.n_tokens + 1) // 2)
        wanted, shared = range(hit.n_tokens + n_tokens, len(seq.tokens)), False  # the last one is always computed
        for spec in self.specs_of(seq.request, visit):
            its = theirs.get(spec.name, ())
            will = spec.will_share(other.request, its, hit.keys[spec.name], wanted)
            if will is False:
                return False
            shared = shared or will is True
        return shared

    def needs_encode(self, seq: LiveSequence, visit: Visit) -> bool:
        """Whether some picture of the sequence must be encoded: its tokens are not all computed, and its embeddings are
        not in the cache now."""
        return bool(seq.request.media) and bool(self.match(seq, visit).missing)

    def uncached(self, seq: LiveSequence, visit: Visit) -> tuple[int, int]:
        """How many of the sequence's tokens and pictures are in no cache here now."""
        hit = self.match(seq, visit)
        return len(seq.tokens) - max(seq.n_computed, hit.n_tokens), len(hit.missing)

    def keys_of(self, seq: LiveSequence) -> dict[str, list[bytes]]:
        """The keys, by spec, of the blocks that the sequence's tokens fill."""
        n_tokens, keys = self._keys.get(seq.id, (0, {}))
        if n_tokens == len(seq.tokens):
            return keys
        if not n_tokens:
            keys = {spec.name: spec.keys(seq.request) for spec in self._specs if spec.used_by(seq.request)}
        self._keys[seq.id] = len(seq.tokens), keys
        for name, known in keys.items():
            known += self._caches.specs[name].more_keys(seq.request, seq.tokens, known)
        return keys

    def brought(self, handoff: Handoff) -> set[bytes]:
        """The names of the shared contents that come with an offered request."""
        specs = (self._caches.specs.get(name) for name in handoff.blocks)
        return {name for spec in specs if spec is not None for name in spec.contents(handoff.request)}

    def forget(self, request_id: str) -> None:
        self._keys.pop(request_id, None)
        self._hits.pop((request_id, True), None)
        self._hits.pop((request_id, False), None)


def find_away(
    tiers: Iterable[Tier], spec: CacheSpec, keys: Sequence[bytes], found: list[int | None]
) -> dict[int, tuple[str, int]]:
    """The tier and block, by number, of the blocks that only other tiers have. They count as `found`, which is
    changed."""
    away: dict[int, tuple[str, int]] = {}
    for tier in tiers:
        lacking = [*range(len(found), len(keys))]
        if not spec.chained:
            lacking = [i for i, block in enumerate(found) if block is None]
        blocks = tier.find(spec.name, [keys[i] for i in lacking])
        for i, block in zip(lacking, blocks, strict=True):
            if block is not None:
                away[i] = tier.name, block
                found[i:] = [_AWAY, *found[i + 1 :]]
            elif spec.chained:
                break
    return away


def fetches_of(blocks: dict[str, Found], away: Mapping[str, Mapping[int, tuple[str, int]]]) -> list[Fetch]:
    """The copies that bring found blocks from other tiers. Only those on the device are left in `blocks`."""
    fetches: dict[tuple[str, str], Fetch] = {}
    for spec, there in away.items():
        for i, block in enumerate(blocks[spec]):
            if block == _AWAY:
                tier, source = there[i]
                fetch = fetches.setdefault((tier, spec), Fetch(tier, spec, [], []))
                fetch.numbers.append(i)
                fetch.blocks.append(source)
        blocks[spec] = [None if block == _AWAY else block for block in blocks[spec]]
    return list(fetches.values())


def safe_tokens(specs: list[CacheSpec], found: Mapping[str, Found], n_most: int) -> int:
    """The largest number of tokens, at most `n_most`, that no kind of cache has to compute again."""
    n_tokens: int | None = None
    while True:
        before = n_tokens
        for spec in specs:
            n_safe = spec.safe(found[spec.name], n_most if n_tokens is None else n_tokens)
            n_tokens = n_tokens if n_safe is None else n_safe
        if not n_tokens or n_tokens == before:
            return n_tokens or 0


def missing_pictures(request: Request, specs: list[CacheSpec], there: Mapping[str, Found], n_tokens: int) -> list[int]:
    """The pictures to encode: not computed, not in the cache, and not equal to an earlier one of this request."""
    seen, missing = set(), []
    for spec in specs:
        found = there[spec.name]
        for i, blocks in enumerate(spec.pictures(request)):
            span = request.media[i]
            if span.end <= n_tokens:
                continue
            if span.key not in seen and any(found[b] is None for b in blocks):
                missing.append(i)
            seen.add(span.key)
    return missing
