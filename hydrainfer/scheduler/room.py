"""Room for sequences in the caches of one instance: how much they need, reserving, growing and giving it back."""

from __future__ import annotations

from collections.abc import Iterable

from hydrainfer.cache import NO_HIT, CacheKind, CacheSet, CacheSpec, Hit, Lease, embed_keys, embed_ranges
from hydrainfer.core import Handoff, InvalidRequest, Request, Sequence, Stage

Visit = tuple[Stage, ...]
"""The steps of a request that follow each other at one instance."""
Pulls = dict[str, tuple[list[int], list[int]]]
"""Per spec: the source's blocks and, one by one, the target's that take their bytes."""


class SequenceRoom:
    """Translates sequences (tokens, pictures) to leases (blocks per spec)."""

    def __init__(self, caches: CacheSet, headroom_tokens: int) -> None:
        self.caches = caches
        self._headroom = headroom_tokens
        self._leases: dict[str, Lease] = {}
        self._keys: dict[str, list[bytes]] = {}  # by sequence id: its `embed_keys`, needed each step
        self.n_embed_queries = 0  # pictures wanted, and of them found in the cache
        self.n_embed_hits = 0
        self.token_specs = [s for s in caches.specs.values() if s.kind is CacheKind.FULL]
        self.embed_spec: CacheSpec | None = next((s for s in caches.specs.values() if s.kind is CacheKind.EMBED), None)

    def specs_of(self, request: Request, visit: Visit) -> list[CacheSpec]:
        """The caches that these steps read or write."""
        speaks = Stage.PREFILL in visit or Stage.DECODE in visit
        specs = self.token_specs if speaks else []
        if self.embed_spec and request.media and (Stage.ENCODE in visit or Stage.PREFILL in visit):
            specs = [*specs, self.embed_spec]
        return specs

    def check_fits_empty(self, request: Request, visit: Visit) -> None:
        """Raises `InvalidRequest` if the request could not pass these steps even if it were alone here."""
        n = request.n_prompt + request.max_tokens
        specs = self.specs_of(request, visit)
        for spec in specs:
            if spec is self.embed_spec:
                continue
            if not self.caches.fits_empty({spec.name: spec.blocks_for(n)}):
                held = self.caches.pools[spec.name].n_blocks * spec.block_tokens
                raise InvalidRequest(
                    f"prompt ({request.n_prompt} tokens) plus max_tokens ({request.max_tokens}) needs {n} tokens of KV "
                    f"cache, but this server's whole cache holds {held}; lower max_tokens or shorten the prompt",
                    param="max_tokens",
                    code="context_length_exceeded",
                )
        if self.embed_spec in specs and self.embed_spec:
            need = len(set(embed_keys(request, self.embed_spec)))
            if not self.caches.fits_empty({self.embed_spec.name: need}):
                held = self.caches.pools[self.embed_spec.name].n_blocks * self.embed_spec.block_tokens
                wanted = sum(m.n_tokens for m in request.media)
                raise InvalidRequest(
                    f"the request's pictures need {wanted} tokens of image cache, but this server's whole cache holds "
                    f"{held}; send fewer or smaller pictures",
                    param="messages",
                )

    def match(self, seq: Sequence) -> Hit:
        """Which of the embeddings it needs are in the cache now. A picture of which some blocks were evicted counts as
        absent, so that no shared block is ever written again."""
        if self.embed_spec is None or not seq.request.media:
            return NO_HIT
        name = self.embed_spec.name
        hit = self.caches.match({name: self._keys_of(seq, self.embed_spec)})
        found = list(hit.blocks[name])
        for blocks in embed_ranges(seq.request, self.embed_spec):
            if any(found[b] is None for b in blocks):
                found[blocks.start : blocks.stop] = [None] * len(blocks)
        return Hit(hit.keys, {name: found})

    def needs_encode(self, seq: Sequence) -> bool:
        """Whether the embeddings of some picture of it are not in the cache now."""
        return self.embed_spec is not None and not self.match(seq).complete(self.embed_spec.name)

    def _keys_of(self, seq: Sequence, spec: CacheSpec) -> list[bytes]:
        keys = self._keys.get(seq.id)
        if keys is None:
            keys = self._keys[seq.id] = embed_keys(seq.request, spec)
        return keys

    def reserve(self, seq: Sequence, hit: Hit, visit: Visit) -> bool:
        """Room for this whole visit: embeddings, prompt, what it has produced and, where it decodes, a headroom. All or
        nothing."""
        n_tokens = len(seq.tokens)
        if Stage.DECODE in visit:
            n_tokens += min(self._headroom, seq.request.max_tokens - seq.n_produced)
        need = {
            spec.name: len(hit.blocks[spec.name]) if spec is self.embed_spec else spec.blocks_for(n_tokens)
            for spec in self.specs_of(seq.request, visit)
        }
        lease = self.caches.reserve(seq.id, need, hit)
        if lease is None:
            return False
        self._leases[seq.id] = lease
        seq.blocks = lease.blocks
        self._set_capacity(seq)
        seq.pending_media = self._missing(seq, hit) if Stage.PREFILL in visit or Stage.ENCODE in visit else []
        if Stage.ENCODE in visit:
            self.n_embed_queries += len(seq.request.media)
            self.n_embed_hits += len(seq.request.media) - len(seq.pending_media)
        return True

    def _missing(self, seq: Sequence, hit: Hit) -> list[int]:
        """Pictures to encode: not in the cache, and not the same as an earlier one of this request."""
        if self.embed_spec is None:
            return []
        found, seen, missing = hit.blocks.get(self.embed_spec.name, ()), set(), []
        for i, blocks in enumerate(embed_ranges(seq.request, self.embed_spec)):
            key = seq.request.media[i].key
            if key not in seen and any(found[b] is None for b in blocks):
                missing.append(i)
            seen.add(key)
        return missing

    def pulls(self, seq: Sequence, handoff: Handoff, hit: Hit) -> Pulls:
        """What has to be copied into the blocks just reserved: not what the cache already has, nothing twice."""
        pulls: Pulls = {}
        for spec in self.caches.specs.values():
            source = handoff.blocks.get(spec.name)
            if source is None or spec.name not in seq.blocks:
                continue
            if spec is self.embed_spec:
                found = hit.blocks[spec.name]
            else:
                source, found = source[: spec.blocks_for(seq.n_computed)], ()
            targets = seq.blocks[spec.name]
            pairs = {targets[i]: b for i, b in enumerate(source) if i >= len(found) or found[i] is None}
            if pairs:
                pulls[spec.name] = (list(pairs.values()), list(pairs))
        return pulls

    def publish_all(self, seq: Sequence) -> None:
        """All its embeddings have been pulled: others may find them."""
        if self.embed_spec is not None and self.embed_spec.name in seq.blocks:
            for index in range(len(seq.request.media)):
                self.publish(seq, index)
        seq.pending_media = []

    def forget(self, request_id: str) -> None:
        """It asked for room, got none and asks no more."""
        if request_id not in self._leases:
            self._keys.pop(request_id, None)

    def holds(self, request_id: str) -> bool:
        """Whether it has blocks here, perhaps only until a batch in flight has landed."""
        return request_id in self._leases

    def detach(self, seq: Sequence, owner: str) -> Lease | None:
        """Its blocks belong to `owner` from now on, who releases them; None if it holds none."""
        self._keys.pop(seq.id, None)
        lease = self._leases.pop(seq.id, None)
        if lease is not None:
            self.caches.rename(lease, owner)
        return lease

    def grow(self, seq: Sequence) -> bool:
        """Room for one more block of every token cache, or False and nothing changed."""
        lease = self._leases[seq.id]
        if any(self.caches.pools[s.name].n_available < 1 for s in self.token_specs):
            return False
        for spec in self.token_specs:
            self.caches.grow(lease, spec.name, 1)
        self._set_capacity(seq)
        return True

    def can_grow(self, seqs: Iterable[Sequence], n_tokens: int) -> bool:
        """Whether all of them have room for so many tokens more."""
        for spec in self.token_specs:
            wanted = sum(max(0, spec.blocks_for(len(s.tokens) + n_tokens) - len(s.blocks[spec.name])) for s in seqs)
            if wanted > self.caches.pools[spec.name].n_available:
                return False
        return True

    def _set_capacity(self, seq: Sequence) -> None:
        held = (len(seq.blocks[s.name]) * s.block_tokens for s in self.token_specs if s.name in seq.blocks)
        seq.capacity = min(held, default=len(seq.tokens))

    def publish(self, seq: Sequence, index: int) -> None:
        """The embeddings of picture `index` are written: others may find them."""
        assert self.embed_spec is not None
        blocks = embed_ranges(seq.request, self.embed_spec)[index]
        keys = self._keys_of(seq, self.embed_spec)[blocks.start : blocks.stop]
        self.caches.commit(self._leases[seq.id], self.embed_spec.name, blocks.start, keys)

    def release_embeddings(self, seq: Sequence) -> None:
        """After prefill nothing reads them any more; they stay findable until evicted."""
        if self.embed_spec is not None and seq.request.media:
            self.caches.release(self._leases[seq.id], self.embed_spec.name)

    def release(self, seq: Sequence) -> None:
        """Give everything back. Safe if it holds nothing."""
        self._keys.pop(seq.id, None)
        lease = self._leases.pop(seq.id, None)
        if lease is not None:
            self.caches.release(lease)
        seq.blocks = {}
