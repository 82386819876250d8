"""Room for sequences in the caches of one instance: how much they need, how it is reserved, grown and given back."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from hydrainfer.cache import DEVICE, CacheSet, CacheSpec, Fetch, Found, Hit, HostTier, Lease, Pulls
from hydrainfer.core import PEER, LiveSequence, Request, Stage
from hydrainfer.scheduler.finding import Finder, Visit
from hydrainfer.scheduler.saving import Saving


class SequenceRoom:
    """Translates sequences (tokens, pictures) to leases (blocks per spec). `finder`: finds what the caches and other
    tiers have."""

    def __init__(self, caches: CacheSet, headroom_tokens: int, finder: Finder | None = None) -> None:
        self.caches = caches
        self.finder = finder or Finder(caches)
        self.saving = Saving(caches)
        self.host: HostTier | None = None
        caches.keep_evicted([*self.finder.tiers.values()])
        self._headroom = headroom_tokens
        self._leases: dict[str, Lease] = {}
        self._specs = list(caches.specs.values())
        self._chains = [spec.name for spec in self._specs if spec.chained]
        self._states = [spec for spec in self._specs if not spec.paged]
        self._windows = [spec for spec in self._specs if spec.paged and spec.slides]
        self.n_pictures_wanted = 0  # by requests that came to be encoded, and how many of them were in the cache
        self.n_pictures_found = 0
        self.n_tokens_wanted = 0  # by requests that came to be prefilled, and how many of them were computed already
        self.n_tokens_found = 0
        self.n_tokens_asked = 0  # not on the device, and asked of other tiers
        self.n_tokens_from = Counter[str](dict.fromkeys(self.finder.tiers, 0))  # found elsewhere: by tier, or `PEER`
        self.n_tokens_missed = 0  # found in the caches of all tokens, but not usable by another cache

    def check_fits_empty(self, request: Request, visit: Visit) -> None:
        """Check that the request could pass these steps if it were alone here. Raises `InvalidRequest`."""
        for spec in self.finder.specs_of(request, visit):
            error = spec.refusal(request, self.caches.most(spec.name))
            if error is not None:
                raise error

    # ---- reserving

    def enter(self, seq: LiveSequence, visit: Visit, tiers: bool = True) -> Hit | None:
        """Reserve room for this visit, in addition to the blocks found here; None if there is not enough. A request
        that is alone finds enough, if necessary by evicting what it has found. Blocks that other tiers have, which are
        found only with `tiers`, are held there until `drop`."""
        while True:
            hit = self.finder.match(seq, visit, tiers)
            for fetch in hit.fetches:  # first: what is evicted for this request may need their place
                self.finder.tiers[fetch.tier].hold(fetch.spec, fetch.blocks)
            if self.reserve(seq, hit, visit):
                return hit._replace(fetches=self._needed(seq, hit.fetches)) if hit.fetches else hit
            self.drop(hit.fetches)
            if not self.caches.free_shared():
                return None

    def _needed(self, seq: LiveSequence, fetches: Iterable[Fetch]) -> list[Fetch]:
        """Those of the found blocks that the sequence has room for; it needs no others, as the embeddings of pictures
        that are computed. The others are dropped."""
        needed: list[Fetch] = []
        for fetch in fetches:
            first = seq.hold.first_block[fetch.spec]
            held = range(first, first + len(seq.hold.blocks[fetch.spec]))
            pairs = list(zip(fetch.numbers, fetch.blocks, strict=True))
            kept = [(number, block) for number, block in pairs if number in held]
            self.drop([fetch._replace(blocks=[block for number, block in pairs if number not in held])])
            if kept:
                needed.append(fetch._replace(numbers=[n for n, _ in kept], blocks=[b for _, b in kept]))
        return needed

    def drop(self, fetches: Iterable[Fetch]) -> None:
        """Let other tiers evict these blocks again."""
        for fetch in fetches:
            self.finder.tiers[fetch.tier].drop(fetch.spec, fetch.blocks)

    def reserve(self, seq: LiveSequence, hit: Hit, visit: Visit) -> bool:
        """Reserve room for this whole visit: embeddings, prompt, produced tokens and, if it decodes, a headroom. All or
        nothing. Tokens in `hit` are not computed again."""
        if not seq.n_computed:
            seq.hold.absent.clear()
        n_tokens, headroom = len(seq.tokens), 0
        if Stage.DECODE in visit:
            headroom = min(self._headroom, seq.request.max_tokens - seq.n_produced)
        n_brought, n_computed = seq.n_computed, max(seq.n_computed, hit.n_tokens)
        specs = self.finder.specs_of(seq.request, visit)
        need = {spec.name: spec.need(seq.request, n_computed, n_tokens, headroom) for spec in specs}
        lease = self.caches.reserve(seq.id, need, hit)
        if lease is None:
            return False
        self._hold(seq, lease)
        past_prefill = Stage.PREFILL not in visit and Stage.ENCODE not in visit
        seq.have(n_computed, () if past_prefill else hit.missing)
        seq.hold.stops = self._stops(seq, hit, specs)
        self._set_capacity(seq)
        self._set_due(seq)
        self._count(seq, visit, hit, n_brought)
        if self.saving.on:
            self._note_found(hit)
        return True

    def _note_found(self, hit: Hit) -> None:
        """Keep what was found here young in the store."""
        fetched = _fetched(hit)
        for spec, found in hit.blocks.items():
            there = [i for i, block in enumerate(found) if block is not None or (spec, i) in fetched]
            self.saving.found(spec, hit.keys[spec], there)

    @staticmethod
    def _stops(seq: LiveSequence, hit: Hit, specs: Iterable[CacheSpec]) -> tuple[int, ...]:
        """The numbers of tokens at which its chunks end, so that a request can be resumed there. One of them is where
        it leaves the cached prefix, if it must compute some of that again: then the next request with this prefix finds
        it."""
        points = {hit.n_chained, *(stop for spec in specs for stop in spec.stops(seq.request))}
        return tuple(sorted(point for point in points if point > seq.n_computed))

    def _count(self, seq: LiveSequence, visit: Visit, hit: Hit, n_brought: int) -> None:
        """Count what the sequence wanted and what of it was cached. `n_brought`: the computed tokens that it brings."""
        if Stage.ENCODE in visit:
            self.n_pictures_wanted += len(seq.request.media)
            self.n_pictures_found += len(seq.request.media) - len(seq.pending_media)
        if Stage.PREFILL in visit and seq.request.keys:
            self.n_tokens_wanted += len(seq.tokens)
            self.n_tokens_found += seq.n_computed
            self.n_tokens_missed += max(0, hit.n_chained - seq.n_computed)
            if n_brought > hit.n_here:
                self.n_tokens_from[PEER] += n_brought - hit.n_here
            if hit.n_away is not None:
                self.n_tokens_asked += len(seq.tokens) - max(n_brought, hit.n_here)
                self.n_tokens_from.update(hit.n_away)
            if seq.n_cached < 0:  # a request that has produced tokens finds what it has computed itself
                seq.n_cached = 0 if seq.n_produced else seq.n_computed

    def grow(self, seq: LiveSequence, n_tokens: int = 0) -> bool:
        """Add one block in every cache that has no room for its last token, or for `n_tokens`. Returns False, with
        nothing changed, if there is no room."""
        n_tokens = n_tokens or len(seq.tokens)
        short = [s.name for s in self._held(seq) if self._capacity(seq, s) < n_tokens]
        if not self.caches.grow(self._leases[seq.id], dict.fromkeys(short, 1)):
            return False
        self._set_capacity(seq, n_tokens)
        return True

    def room_for_drafts(self, seq: LiveSequence, n: int) -> int:
        """For how many of `n` drafts behind its last token there is room, with blocks that are free without evicting:
        one more where tokens have slots, and a state for each. What only drafts need goes back in `drafted`."""
        for spec in self._states:
            n = min(n, len(seq.hold.blocks[spec.name]) + self._n_free(spec) - spec.with_drafts(0))
        n_tokens = len(seq.tokens) + n
        if n > 0 and seq.hold.capacity < n_tokens:
            if all(self._n_free(spec) for spec in self._held(seq) if self._capacity(seq, spec) < n_tokens):
                self.grow(seq, n_tokens)
            n = min(n, seq.hold.capacity - len(seq.tokens))
        n = max(n, 0)
        for spec in self._states:
            n_more = max(spec.with_drafts(n) - len(seq.hold.blocks[spec.name]), 0)  # none without drafts
            self.caches.grow(self._leases[seq.id], {spec.name: n_more})
        return n

    def drafted(self, seq: LiveSequence, n_before: int, n_computed: int) -> None:
        """Note that of the tokens behind `n_before`, which were computed with drafts, those up to `n_computed` are
        right: give back what drafts alone needed."""
        lease = self._leases[seq.id]
        for spec in self._states:
            self.caches.keep(lease, spec.name, spec.after_drafts(n_before, n_computed))
        if n_computed < seq.hold.due:  # otherwise windows slide now
            for spec in [s for s in self._windows if len(lease.blocks[s.name]) > s.most(1)]:
                self.caches.slide(lease, spec.name, lease.first[spec.name], spec.most(1))
                seq.hold.remapped += 1
                self._set_capacity(seq)

    def _n_free(self, spec: CacheSpec) -> int:
        """The blocks that can be taken without evicting."""
        pool = self.caches.pools[spec.name]
        return pool.n_available - pool.n_cached

    def can_grow(self, seqs: Sequence[LiveSequence], n_tokens: int, evicting: bool = True) -> bool:
        """Whether all of these sequences have room for `n_tokens` more tokens each; unless `evicting`, without evicting
        cached blocks."""
        for spec in self._specs:
            name, need, pool = spec.name, spec.need, self.caches.pools[spec.name]
            left = pool.n_available if evicting else pool.n_available - pool.n_cached
            for seq in seqs:
                if (held := seq.hold.blocks.get(name)) is not None:
                    n = len(need(seq.request, seq.n_computed + n_tokens, len(seq.tokens) + n_tokens)) - len(held)
                    left -= n if n > 0 else 0
            if left < 0:
                return False
        return True

    def _held(self, seq: LiveSequence) -> list[CacheSpec]:
        return [self.caches.specs[name] for name in seq.hold.blocks]

    def _set_capacity(self, seq: LiveSequence, n_tokens: int = 0) -> None:
        capacity = math.inf
        for spec in self._held(seq):
            capacity = min(capacity, self._capacity(seq, spec))
        seq.hold.capacity = (n_tokens or len(seq.tokens)) if capacity == math.inf else int(capacity)

    def _set_due(self, seq: LiveSequence) -> None:
        n_computed = seq.hold.n_settled = seq.n_computed
        seq.hold.due = math.inf
        for name in seq.hold.blocks:
            seq.hold.due = min(seq.hold.due, self.caches.specs[name].due(seq.request, n_computed))

    @staticmethod
    def _capacity(seq: LiveSequence, spec: CacheSpec) -> float:
        return spec.capacity(seq.hold.first_block[spec.name] + len(seq.hold.blocks[spec.name]))

    def _hold(self, seq: LiveSequence, lease: Lease) -> None:
        self._leases[seq.id] = lease
        seq.hold.blocks, seq.hold.first_block = lease.blocks, lease.first

    # ---- progress

    def settle(self, seq: LiveSequence) -> None:
        """Publish the blocks that became complete since the last call, and give back those that are not read any more.
        Called once `due` tokens are computed, and when a sequence leaves its stage or this instance."""
        if seq.hold.n_settled == seq.n_computed:
            return
        held = self._held(seq)
        slid = self._slide(seq, [spec for spec in held if spec.jumps])  # so that blocks have the numbers to publish
        self._publish_written(seq)
        if self._slide(seq, [spec for spec in held if spec.slides and not spec.jumps]) or slid:
            self._set_capacity(seq)
        self._set_due(seq)

    def _slide(self, seq: LiveSequence, specs: list[CacheSpec]) -> bool:
        """Give back blocks that are not read any more, and take as many at the end. Returns whether there were any."""
        lease, n_left, slid = self._leases[seq.id], len(seq.tokens) - seq.n_computed, False
        for spec in specs:
            stale, most = spec.stale(seq.n_computed), spec.most(n_left)
            wide = len(lease.blocks[spec.name]) > most
            if stale > lease.first[spec.name] or wide:
                seq.hold.remapped += wide  # another block may come in the place of what goes
                self.caches.slide(lease, spec.name, stale, most)
                slid = True
        return slid

    def _publish_written(self, seq: LiveSequence, *, leaves: bool = False) -> None:
        """Publish the blocks that became complete."""
        for spec in self._held(seq):
            for numbers in spec.written(seq.request, seq.hold.n_settled, seq.n_computed, leaves, seq.hold.stops):
                if numbers:
                    self._publish(seq, spec, numbers)

    def _publish(self, seq: LiveSequence, spec: CacheSpec, numbers: range, *, computed: bool = True) -> None:
        """Let others find those of these blocks that have keys. `computed`: here, so that they are saved from here."""
        lease = self._leases[seq.id]
        unknown = spec.chained and not seq.request.keys
        if lease.private or unknown or numbers.start in seq.hold.absent.get(spec.name, ()):
            return
        known = self.finder.keys_of(seq)[spec.name]
        if keys := known[numbers.start : numbers.stop]:
            seq.hold.remapped += self.caches.commit(lease, spec.name, numbers.start, keys)
            published = range(numbers.start, numbers.start + len(keys))
            if computed:
                self.saving.published(spec.name, known, published)
            if computed and self.host is not None:
                self.host.published(spec.name, known, published)

    def encoded(self, seq: LiveSequence, index: int) -> None:
        """Note that the embeddings of picture `index` are written, so that others may find them."""
        for spec in self._held(seq):
            pictures = spec.pictures(seq.request)
            if pictures:
                self._publish(seq, spec, pictures[index])

    def leave_stage(self, seq: LiveSequence) -> None:
        """End the sequence's present step: give back what no later step reads. It stays findable until evicted."""
        self.settle(seq)
        left = seq.plan[seq.cursor + 1 :]
        for spec in self._held(seq):
            if spec.stages.isdisjoint(left):
                self.caches.release(self._leases[seq.id], spec.name)

    # ---- between instances

    def offered(self, seq: LiveSequence, *, abroad: bool = False) -> dict[str, tuple[int, ...]]:
        """The blocks that the sequence's next instance has to copy. `abroad`: it is in another cluster."""
        blocks: dict[str, tuple[int, ...]] = {}
        for spec in self._held(seq):
            first, moved = seq.hold.first_block[spec.name], spec.moved(seq.request, seq.n_computed)
            if abroad or moved.start in seq.hold.absent.get(spec.name, ()):
                moved = moved[len(spec.left_behind(moved)) :]
            blocks[spec.name] = tuple(seq.hold.blocks[spec.name][moved.start - first : moved.stop - first])
        return blocks

    def pulls(self, seq: LiveSequence, blocks: Mapping[str, Sequence[int]], n_computed: int, hit: Hit) -> Pulls:
        """The copies from `blocks`, which hold by spec what the sequence needs of `n_computed` tokens, into those just
        reserved. Blocks that the cache already has or that are fetched are left out, and none is copied twice. Of
        what is left behind on the way, `blocks` lacks the first ones."""
        pulls, fetched = Pulls(DEVICE, {}), _fetched(hit)
        for spec in self._held(seq):
            source = blocks.get(spec.name)
            if source is None:
                continue
            targets, first = seq.hold.blocks[spec.name], seq.hold.first_block[spec.name]
            found = hit.blocks.get(spec.name, ())
            numbers = self.arriving(seq, spec, n_computed, len(source), found)
            pairs = {
                targets[i - first]: block
                for i, block in zip(numbers, source, strict=True)
                if i >= first and (i >= len(found) or found[i] is None) and (spec.name, i) not in fetched
            }
            if pairs:
                pulls.blocks[spec.name] = (list(pairs.values()), list(pairs))
        return pulls

    def arriving(self, seq: LiveSequence, spec: CacheSpec, n_computed: int, n_sent: int, found: Found = ()) -> range:
        """The numbers of the last `n_sent` blocks that a sequence needs of `n_computed` tokens. The others are left
        behind, and absent unless they are `found` here."""
        moved = spec.moved(seq.request, n_computed)
        absent = moved[: len(moved) - n_sent]
        assert len(absent) <= len(spec.left_behind(moved)), f"{seq} lacks blocks of {spec.name}"
        if any(i >= len(found) or found[i] is None for i in absent):
            seq.hold.absent[spec.name] = absent
        return moved[len(absent) :]

    def tokens_of(self, pulls: Pulls) -> int:
        """The number of tokens whose KV is copied."""
        copied = {spec: len(ids) for spec, (ids, _) in pulls.blocks.items()}
        return max((copied[s] * self.caches.specs[s].block_tokens for s in self._chains if s in copied), default=0)

    def recall(self, seq: LiveSequence, visit: Visit) -> bool:
        """Lease what the caches of `visit` keep of the sequence's beginning, so that another instance prefills only the
        rest. Returns False if that is nothing, or does not contain all its pictures."""
        hit = self.finder.match(seq, visit, tiers=False)
        if hit.n_tokens < max((m.end for m in seq.request.media), default=1):
            return False
        need = {s.name: s.moved(seq.request, hit.n_tokens) for s in self.finder.specs_of(seq.request, visit)}
        lease = self.caches.reserve(seq.id, need, hit)
        if lease is None:
            return False
        self._hold(seq, lease)
        seq.have(hit.n_tokens, seq.pending_media)
        seq.hold.n_settled = hit.n_tokens
        return True

    def blocks_of(self, seq: LiveSequence, fetch: Fetch) -> list[int]:
        """The sequence's blocks that are to be fetched."""
        first = seq.hold.first_block[fetch.spec]
        return [seq.hold.blocks[fetch.spec][number - first] for number in fetch.numbers]

    def fetched(self, seq: LiveSequence, fetches: Iterable[Fetch]) -> None:
        """Note that these blocks have been copied, so that others may find those that it still has."""
        for fetch in fetches:
            first = seq.hold.first_block[fetch.spec]
            held = range(first, first + len(seq.hold.blocks[fetch.spec]))
            for number in [number for number in fetch.numbers if number in held]:
                self._publish(seq, self.caches.specs[fetch.spec], range(number, number + 1), computed=False)

    def lease_of(self, seq: LiveSequence) -> Lease:
        return self._leases[seq.id]

    def hold_fetched(self, seq: LiveSequence, fetches: Sequence[Fetch], owner: str) -> Lease | None:
        """Hold the blocks that are being copied for `owner`, too; None if there is no room for that."""
        blocks = [(fetch.spec, self.blocks_of(seq, fetch)) for fetch in fetches]
        pools = self.caches.pools
        if any(pools[spec].n_shared_of(held) > pools[spec].n_available for spec, held in blocks):
            return None
        return [self.caches.hold(owner, spec, held) for spec, held in blocks][-1]

    def remap(self, seq: LiveSequence) -> None:
        """Note that a sequence has other blocks than before."""
        seq.hold.remapped += 1

    def landed(self, seq: LiveSequence) -> None:
        """Note that all that the sequence brought has been copied, so that others may find it."""
        for spec in self._held(seq):
            self._publish(seq, spec, spec.complete(seq.request, seq.n_computed), computed=False)
        seq.have(seq.n_computed, ())

    def detach(self, seq: LiveSequence, owner: str) -> Lease | None:
        """Pass the sequence's blocks to `owner`, which will release them; None if it holds none."""
        if seq.id in self._leases:
            self._publish_written(seq, leaves=True)
        self.finder.forget(seq.id)
        lease = self._leases.pop(seq.id, None)
        if lease is not None:
            self.caches.rename(lease, owner)
        return lease

    # ---- giving back

    def forget(self, request_id: str) -> None:
        """Forget a request that asked for room, got none and asks no more."""
        if request_id not in self._leases:
            self.finder.forget(request_id)

    def holds(self, request_id: str) -> bool:
        """Whether a request has blocks here, perhaps only until a batch in flight has landed."""
        return request_id in self._leases

    def release(self, seq: LiveSequence, *, landed: bool = True) -> None:
        """Give all blocks of a sequence back. What it computed stays findable, unless its blocks have not `landed`.
        Safe if it holds nothing."""
        if seq.id in self._leases and landed:
            self._publish_written(seq, leaves=True)
        self.finder.forget(seq.id)
        lease = self._leases.pop(seq.id, None)
        if lease is not None:
            self.caches.release(lease)
        self.let_go(seq)

    def let_go(self, seq: LiveSequence) -> None:
        """Note that a sequence has no blocks any more."""
        seq.hold.blocks = {}
        seq.hold.capacity = 0


def _fetched(hit: Hit) -> set[tuple[str, int]]:
    """The blocks, by cache and number, that come from other tiers."""
    return {(fetch.spec, number) for fetch in hit.fetches for number in fetch.numbers}
