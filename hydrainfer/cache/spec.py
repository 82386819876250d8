"""The contract of a kind of cache: how its blocks relate to the tokens and pictures of a request."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple

import msgspec

from hydrainfer.core import InvalidRequest, LiveSequence, Request, Stage

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
GROUP_TOKENS = 1024
"""The tokens at the start of prompts that lie in the same place of a store for all that begin alike."""
Found = Sequence[int | None]
"""For each block of a request, by number: the cached block with the same content, or None."""


TOKENS_PER_RUNNING, USUAL_TOKENS = 704, 1024
"""The tokens for each running request in the automatic KV cache of a CPU, where most requests are far from their last
token; and the tokens of a usual request at its end."""


class Wishes(NamedTuple):
    """The facts that determine the sizes of an instance's caches. `picture_tokens`: the tokens of the largest picture;
    `n_images`: the most pictures of one request; `n_tokens`: the number of tokens whose state must fit, None: as many
    as possible; `n_longest`: the tokens of the longest request, None if that is not known."""

    picture_tokens: int = 0
    n_images: int = 0
    n_tokens: int | None = None
    n_longest: int | None = None


class Part(msgspec.Struct, frozen=True):
    """One array of a block, for one layer of the model."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class Scan(NamedTuple):
    """The blocks of recurrent state that a chunk reads and writes. `source`: the block it continues from, -1 if it is
    the first chunk. `writes`: (tokens, block) pairs; the state after that many of the request's tokens is written to
    that block."""

    source: int
    writes: tuple[tuple[int, int], ...]


class CacheSpec(msgspec.Struct, frozen=True):
    """One cache: the layout of its blocks and, by its class, the kind of state that it keeps.

    Each kind is a subclass (`kinds.py`). All other code asks the spec and never which kind it is. A request numbers its
    blocks from its start: block number `i` keeps the i-th part of its state, even after earlier blocks were dropped.
    The defaults are those of a cache that keeps every token's state until the request ends and shares nothing.
    A block holds the `parts` of each model layer in `layers`, one after the other, so that one copy moves it.
    """

    name: str
    block_tokens: int
    parts: tuple[Part, ...]
    layers: tuple[int, ...] = (0,)
    window: int = 0
    """How many tokens a token sees in these layers, itself included; 0: all before it."""
    padded_bytes: int = 0
    """The bytes from one block to the next, if that is more than its parts need; else 0."""

    stages: ClassVar[frozenset[Stage]] = frozenset({Stage.PREFILL, Stage.DECODE})
    """The stages that read or write the cache. Blocks are given back when no remaining stage does."""
    chained: ClassVar[bool] = False
    """Whether a key also depends on everything before its block, so that it is found only if the keys before it are."""
    size_option: ClassVar[str] = "kv_cache_gib"
    """The option that sets the cache's size."""
    size_noun: ClassVar[str] = "a KV block"
    takes_the_rest: ClassVar[bool] = True
    """Whether the cache is given the memory that other caches leave."""
    slides: ClassVar[bool] = False
    """Whether blocks are given back at the front while a request runs, and others taken in their place."""
    jumps: ClassVar[bool] = False
    """Whether, when blocks are given back, only the first one goes, however many tokens were computed, and the later
    ones are renumbered by the state they hold."""
    paged: ClassVar[bool] = True
    """Whether each token has a slot in a block. Otherwise a block holds a recurrent state of all tokens before it, see
    `scan`."""

    @property
    def offsets(self) -> tuple[int, ...]:
        """The byte at which each part begins within a layer's share of a block, and the one at which the next layer
        begins. Each is aligned to the size of its dtype."""
        found, at = [], 0
        for part in self.parts:
            at = _aligned(at, DTYPE_BYTES[part.dtype])
            found.append(at)
            at += part.n_bytes
        return (*found, _aligned(at, max(DTYPE_BYTES[part.dtype] for part in self.parts)))

    @property
    def block_bytes(self) -> int:
        return self.padded_bytes or len(self.layers) * self.offsets[-1]

    def blocks_for(self, n_tokens: int) -> int:
        """The number of blocks that hold the state of `n_tokens` consecutive tokens."""
        return -(-n_tokens // self.block_tokens)

    def scan(self, blocks: Sequence[int], start: int, count: int, each: bool = False) -> Scan:
        """The blocks that computing tokens `start .. start+count-1` reads and writes, in a cache that is not `paged`,
        for a request that holds `blocks`. `each`: the state after each of these tokens is written."""
        raise AssertionError(f"{self.name} is paged")

    def with_drafts(self, n_drafts: int) -> int:
        """The blocks that a decode with so many drafts needs, in a cache that is not `paged`."""
        raise AssertionError(f"{self.name} is paged")

    def after_drafts(self, n_before: int, n_computed: int) -> list[int]:
        """Which of those blocks, by index and in order, are still needed once it is known that of the tokens behind
        `n_before` those up to `n_computed` are right, in a cache that is not `paged`."""
        raise AssertionError(f"{self.name} is paged")

    # ---- how many blocks

    def used_by(self, request: Request) -> bool:
        """Whether the request has any state of this kind."""
        return True

    def span(self, n_computed: int, n_tokens: int, headroom: int = 0) -> range:
        """The numbers of the blocks that a sequence holds to compute its tokens `n_computed .. n_tokens-1` and then,
        one by one, `headroom` more. It may get them a few at a time, as `capacity` allows."""
        return range(self.stale(n_computed), self.blocks_for(n_tokens + headroom))

    def need(self, request: Request, n_computed: int, n_tokens: int, headroom: int = 0) -> range:
        """`span` for a given request."""
        return self.span(n_computed, n_tokens, headroom)

    def most(self, n_left: int) -> float:
        """The most blocks that a sequence of any length holds while it has `n_left` tokens to compute."""
        return math.inf

    def capacity(self, stop: int) -> float:
        """The number of tokens that can be computed with the blocks below number `stop`; infinite if tokens need no
        blocks."""
        return stop * self.block_tokens

    def stale(self, n_computed: int) -> int:
        """The number of the first block that is still read once `n_computed` tokens are computed."""
        return 0

    def due(self, request: Request, n_computed: int) -> float:
        """The number of computed tokens at which complete blocks must be published and stale ones given back; infinite
        if that may wait until the request leaves its stage."""
        return math.inf

    def refusal(self, request: Request, n_blocks: int) -> InvalidRequest | None:
        """The reason why the request could not run even if it had all `n_blocks` blocks for itself; None if it
        could."""
        n_tokens = request.n_prompt + request.max_tokens
        if len(self.span(0, n_tokens)) <= n_blocks:
            return None
        return InvalidRequest(
            f"prompt ({request.n_prompt} tokens) plus max_tokens ({request.max_tokens}) needs {n_tokens} tokens of KV "
            f"cache, but this server's whole cache holds {n_blocks * self.block_tokens}; lower max_tokens or shorten "
            "the prompt",
            param="max_tokens",
            code="context_length_exceeded",
        )

    # ---- how large a cache

    def held_by(self, n_tokens: int) -> int:
        """The number of blocks that a decoding request of `n_tokens` tokens holds."""
        return int(min(self.blocks_for(n_tokens), self.most(1)))

    def least(self, wishes: Wishes) -> int:
        """The least number of blocks with which anything can run."""
        return 1

    def wanted(self, wishes: Wishes) -> int | None:
        """The number of blocks that is enough; None: as many as possible."""
        return None if wishes.n_tokens is None else self.blocks_for(wishes.n_tokens)

    def tokens_in(self, n_blocks: int) -> float:
        """The most tokens, of all requests together, whose state fits `n_blocks` blocks."""
        return n_blocks * self.block_tokens

    # ---- reuse

    def keys(self, request: Request) -> list[bytes]:
        """The keys under which the request's first blocks can be found, by number. Blocks without a key are not
        shared."""
        return []

    def more_keys(self, request: Request, tokens: Sequence[int], keys: Sequence[bytes]) -> list[bytes]:
        """The keys that follow `keys`, by number, now that the request has `tokens`."""
        return []

    def group(self, keys: Sequence[bytes], number: int) -> bytes:
        """The name of the group of blocks that belong together in a store of several places (`BlockName`). `keys`:
        those of a request's blocks; `number`: of one of them."""
        return keys[number]

    def safe(self, found: Found, n_most: int) -> int | None:
        """The largest number of tokens, at most `n_most`, that need not be computed, given the cached blocks; None if
        this kind does not limit them."""
        return 0

    @property
    def resume_blocks(self) -> int | None:
        """The number of blocks before a point that must be cached so that a request can go on from there; None if this
        kind does not limit that. With `chained`, the other blocks before the point are then there, too."""
        return 1

    def reusable(self, request: Request, found: Found, n_tokens: int) -> Found:
        """The found blocks that may be shared if `n_tokens` tokens are not computed again. No others may be shared,
        because a shared block is never written."""
        return [None] * len(found)

    def will_share(self, other: Request, its: Sequence[bytes], mine: Sequence[bytes], tokens: range) -> bool | None:
        """Whether, once `other` has computed its prompt, a request can share a number of tokens that is in `tokens`;
        None if this kind does not limit that. `its`: the keys of the other's blocks; `mine`: those of the request's
        blocks."""
        return False

    def stops(self, request: Request) -> list[int]:
        """The numbers of tokens at which a chunk of the request must end, so that its state there can be found
        again."""
        return []

    def written(
        self, request: Request, n_before: int, n_computed: int, leaves: bool = False, stops: Sequence[int] = ()
    ) -> list[range]:
        """The numbers of the blocks to publish after tokens `n_before .. n_computed-1` were computed. `leaves`: the
        request computes no more here for now. `stops`: where its chunks end, whatever the budget."""
        return [range(n_before // self.block_tokens, n_computed // self.block_tokens)]

    def complete(self, request: Request, n_computed: int) -> range:
        """The numbers of the blocks that are complete when `n_computed` tokens are computed and all pictures are
        encoded."""
        return range(self.stale(n_computed), n_computed // self.block_tokens)

    def held(self, seq: LiveSequence, numbers: range) -> list[int]:
        """The sequence's blocks with these numbers."""
        first = seq.hold.first_block.get(self.name, 0)
        return seq.hold.blocks[self.name][numbers.start - first : numbers.stop - first]

    def pictures(self, request: Request) -> list[range]:
        """The numbers of the blocks that the embeddings of each picture of the request fill."""
        return []

    # ---- migration

    def contents(self, request: Request) -> list[bytes]:
        """The names of the contents of the request's shared blocks. Requests with a name in common need the same
        blocks."""
        return self.keys(request)

    def moved(self, request: Request, n_computed: int) -> range:
        """The numbers of the blocks that the next instance needs once `n_computed` tokens are computed."""
        return range(self.stale(n_computed), self.blocks_for(n_computed))

    def left_behind(self, moved: range) -> range:
        """Those of the `moved` blocks that only other requests would read, and that do not cross a link between
        clusters."""
        return moved[:0]


def _aligned(n: int, size: int) -> int:
    return -(-n // size) * size


def for_stage(specs: Iterable[CacheSpec], stage: Stage) -> CacheSpec | None:
    """The first of an instance's caches that this stage uses; None if there is none."""
    return next((spec for spec in specs if stage in spec.stages), None)
