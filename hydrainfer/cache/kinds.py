"""The kinds of state that a model keeps of a request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from hydrainfer.cache.spec import CacheSpec, Found, Part, Wishes
from hydrainfer.core import InvalidRequest, Request, Role, Stage, chain_keys, split_chain

_PUBLISHED_TOKENS = 256  # at once: a block's key costs less beside others
_PICTURES = 64
_PICTURE_TOKENS = 1024  # of a usual picture; the largest may have more


class FullSpec(CacheSpec, frozen=True):
    """Keys and values of every token, shared by whole blocks with requests that begin alike. The part "kv" is `(2,
    block_tokens, kv_heads, head_dim)`."""

    chained: ClassVar[bool] = True

    @classmethod
    def of(cls, *, layers: int, kv_heads: int, head_dim: int, dtype: str, block_tokens: int = 16) -> FullSpec:
        part = Part("kv", (2, block_tokens, kv_heads, head_dim), dtype)
        return cls("kv", block_tokens, (part,), tuple(range(layers)))

    def due(self, request: Request, n_computed: int) -> float:
        return n_computed + _PUBLISHED_TOKENS if request.keys else math.inf

    def keys(self, request: Request) -> list[bytes]:
        if not request.keys:
            return []
        keys = split_chain(request.keys)[1:]
        assert len(keys) == request.n_prompt // self.block_tokens, "a request whose keys are of other blocks"
        return keys

    def more_keys(self, request: Request, tokens: Sequence[int], keys: Sequence[bytes]) -> list[bytes]:
        """None behind a video: where the positions of an answer count on from the highest of the prompt, those of the
        same text in the next prompt may be others."""
        n = len(keys)
        if not request.keys or len(tokens) < (n + 1) * self.block_tokens or any(m.timed for m in request.media):
            return []
        return chain_keys(keys[-1] if keys else request.keys, tokens, self.block_tokens, request.media, n)

    def safe(self, found: Found, n_most: int) -> int | None:
        return min(len(found), n_most // self.block_tokens) * self.block_tokens

    def reusable(self, request: Request, found: Found, n_tokens: int) -> Found:
        return found[: n_tokens // self.block_tokens]

    def contents(self, request: Request) -> list[bytes]:
        """None: two copies of a prefix may be on their way at once; the second to land is dropped."""
        return []


class EmbedSpec(CacheSpec, frozen=True):
    """One row of image embedding per placeholder token; only the prefill of that token reads it. The part
    "rows" is `(block_tokens, width)`. A picture starts on a block boundary, so that its blocks can be shared with other
    requests."""

    stages: ClassVar[frozenset[Stage]] = frozenset({Stage.ENCODE, Stage.PREFILL})
    size_option: ClassVar[str] = "image_cache_gib"
    size_noun: ClassVar[str] = "a picture"
    takes_the_rest: ClassVar[bool] = False

    @classmethod
    def of(cls, *, width: int, dtype: str, block_tokens: int = 64) -> EmbedSpec:
        return cls("embed", block_tokens, (Part("rows", (block_tokens, width), dtype),))

    def used_by(self, request: Request) -> bool:
        return bool(request.media)

    def span(self, n_computed: int, n_tokens: int) -> range:
        return range(0)

    def need(self, request: Request, n_computed: int, n_tokens: int) -> range:
        """Those of the pictures that do not end before token `n_computed`."""
        done = sum(self.blocks_for(m.n_tokens) for m in request.media if m.end <= n_computed)
        return range(done, sum(self.blocks_for(m.n_tokens) for m in request.media))

    def capacity(self, stop: int) -> float:
        return math.inf

    def refusal(self, request: Request, n_blocks: int) -> InvalidRequest | None:
        if len(set(self.keys(request))) <= n_blocks:
            return None
        wanted = sum(m.n_tokens for m in request.media)
        return InvalidRequest(
            f"the request's pictures need {wanted} tokens of image cache, but this server's whole cache holds "
            f"{n_blocks * self.block_tokens}; send fewer or smaller pictures",
            param="messages",
        )

    def least(self, wishes: Wishes) -> int:
        return self.blocks_for(wishes.picture_tokens)

    def wanted(self, wishes: Wishes) -> int | None:
        """64 usual pictures, or as many as a request may have, and the largest at least."""
        usual = min(self.least(wishes), self.blocks_for(_PICTURE_TOKENS))
        return max(self.least(wishes), usual * max(_PICTURES, wishes.n_images))

    def tokens_in(self, n_blocks: int) -> float:
        return math.inf

    def keys(self, request: Request) -> list[bytes]:
        """For each block the picture's content key and the block's number in it."""
        return [m.key + i.to_bytes(4, "little") for m in request.media for i in range(self.blocks_for(m.n_tokens))]

    def safe(self, found: Found, n_most: int) -> int | None:
        return None

    def reusable(self, request: Request, found: Found, n_tokens: int) -> Found:
        """A picture of which some blocks were evicted counts as absent."""
        kept = list(found)
        for blocks in self.pictures(request):
            if any(found[b] is None for b in blocks):
                kept[blocks.start : blocks.stop] = [None] * len(blocks)
        return kept

    def pictures(self, request: Request) -> list[range]:
        ranges, first = [], 0
        for span in request.media:
            n = self.blocks_for(span.n_tokens)
            ranges.append(range(first, first + n))
            first += n
        return ranges

    def contents(self, request: Request) -> list[bytes]:
        return [m.key for m in request.media]

    def written(self, n_before: int, n_computed: int) -> range:
        return range(0)

    def complete(self, request: Request, n_computed: int) -> range:
        return self.need(request, n_computed, 0)

    def moved(self, request: Request, n_computed: int) -> range:
        return self.need(request, n_computed, 0)


def specs_of(
    role: Role,
    *,
    layers: int,
    kv_heads: int,
    head_dim: int,
    embed_width: int | None,
    dtype: str,
    kv_block_tokens: int = 16,
    embed_block_tokens: int = 64,
) -> tuple[CacheSpec, ...]:
    """The caches of an instance of this role that some stage of it uses. `embed_width`: None if the model does not
    see."""
    specs: list[CacheSpec] = []
    if embed_width is not None:
        specs.append(EmbedSpec.of(width=embed_width, dtype=dtype, block_tokens=embed_block_tokens))
    heads = {"kv_heads": kv_heads, "head_dim": head_dim}
    specs.append(FullSpec.of(layers=layers, **heads, dtype=dtype, block_tokens=kv_block_tokens))
    return tuple(spec for spec in specs if any(role.runs(stage) for stage in spec.stages))
