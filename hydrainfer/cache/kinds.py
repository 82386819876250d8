"""The kinds of state that a model keeps of a request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import msgspec

from hydrainfer.cache.spec import GROUP_TOKENS, USUAL_TOKENS, CacheSpec, Found, Part, Wishes
from hydrainfer.cache.state import StateLayout, StateSpec
from hydrainfer.core import InvalidRequest, Request, Role, Stage, answer_keys, split_chain

_PUBLISHED_TOKENS = 256  # published together: a key costs less beside others
_AHEAD_TOKENS = 1024  # the tokens of the longest chunk, unless a picture has more
_PICTURES = 64
_PICTURE_TOKENS = 1024  # the tokens of a usual picture; the largest may have more


class FullSpec(CacheSpec, frozen=True):
    """Keys and values of every token. Whole blocks are shared with requests that have the same prefix. The parts "keys"
    and "values" are `(block_tokens, kv_heads, dim)`."""

    chained: ClassVar[bool] = True

    @classmethod
    def of(
        cls, *, layers: int, kv_heads: int, head_dim: int, dtype: str, block_tokens: int = 16, value_dim: int = 0
    ) -> FullSpec:
        """The spec for layers `0 .. layers-1`. `value_dim`: the width of values, if it is not that of keys."""
        dims = {"keys": head_dim, "values": value_dim or head_dim}
        parts = tuple(Part(name, (block_tokens, kv_heads, dim), dtype) for name, dim in dims.items())
        return cls("kv", block_tokens, parts, tuple(range(layers)))

    def due(self, request: Request, n_computed: int) -> float:
        return n_computed + _PUBLISHED_TOKENS if request.keys else math.inf

    def keys(self, request: Request) -> list[bytes]:
        if not request.keys:
            return []
        keys = split_chain(request.keys)[1:]
        assert len(keys) == request.n_prompt // self.block_tokens, "a request whose keys are of other blocks"
        return keys

    def more_keys(self, request: Request, tokens: Sequence[int], keys: Sequence[bytes]) -> list[bytes]:
        return answer_keys(request, tokens, keys, self.block_tokens) if request.keys else []

    def group(self, keys: Sequence[bytes], number: int) -> bytes:
        """See `CacheSpec.group`. The first tokens are in one group, by their first block, and all others in another."""
        n = max(1, GROUP_TOKENS // self.block_tokens)
        return keys[0 if number < n else n - 1]

    def safe(self, found: Found, n_most: int) -> int | None:
        return min(len(found), n_most // self.block_tokens) * self.block_tokens

    def reusable(self, request: Request, found: Found, n_tokens: int) -> Found:
        return found[: n_tokens // self.block_tokens]

    def will_share(self, other: Request, its: Sequence[bytes], mine: Sequence[bytes], tokens: range) -> bool | None:
        return self._alike_at(self.blocks_for(tokens.start), its, mine, tokens)

    def _alike_at(self, end: int, its: Sequence[bytes], mine: Sequence[bytes], tokens: range) -> bool:
        """Whether both requests have equal blocks before number `end`: equal keys mean that all is equal up to
        there."""
        fits = 0 < end <= min(len(its), len(mine)) and end * self.block_tokens in tokens
        return fits and its[end - 1] == mine[end - 1]

    def contents(self, request: Request) -> list[bytes]:
        """No names: two copies of a prefix may be on their way at the same time, and the second to land is dropped."""
        return []


class WindowSpec(FullSpec, frozen=True):
    """Keys and values of the last `window` tokens, for layers that see no more. Blocks that left the window are given
    back while the request runs, so it holds at most `most` blocks, whatever its length.

    Blocks can be reused only where a whole window is cached: at the end of a prompt, of its last picture, of an answer,
    and of the tokens computed before a preemption or a move. The other blocks of a request are not published, because
    nobody could use them. `ahead`: the tokens that one chunk may compute.
    """

    ahead: int = _AHEAD_TOKENS

    chained: ClassVar[bool] = False
    slides: ClassVar[bool] = True

    @classmethod
    def over(cls, full: FullSpec, window: int, layers: tuple[int, ...], least_ahead: int = 0) -> WindowSpec:
        """The spec for these layers, with blocks like those of `full`. `least_ahead`: the tokens of the longest span
        that a chunk must not cut."""
        ahead = max(_AHEAD_TOKENS, least_ahead)
        return cls(f"{full.name}.{window}", full.block_tokens, full.parts, layers, window, ahead=ahead)

    def stale(self, n_computed: int) -> int:
        """See `CacheSpec.stale`. Blocks that tokens after the last whole block see are kept, so that a request can
        resume there."""
        whole = n_computed // self.block_tokens * self.block_tokens
        return max(0, whole - self.window + 1) // self.block_tokens

    def due(self, request: Request, n_computed: int) -> float:
        return (n_computed // self.block_tokens + 1) * self.block_tokens

    def span(self, n_computed: int, n_tokens: int, headroom: int = 0) -> range:
        first = self.stale(n_computed)
        return range(first, min(self.blocks_for(n_tokens + headroom), first + self.most(n_tokens - n_computed)))

    def most(self, n_left: int) -> int:
        """The blocks of the window before a block, that block, and those that a chunk fills."""
        chunk = self.blocks_for(min(n_left, self.ahead)) if n_left > 1 else 0
        return self.blocks_for(self.window - 1) + 1 + chunk

    def least(self, wishes: Wishes) -> int:
        return self.most(self.ahead) if wishes.n_longest is None else len(self.span(0, wishes.n_longest))

    def wanted(self, wishes: Wishes) -> int | None:
        if wishes.n_tokens is None:
            return None
        usual = -(-wishes.n_tokens // USUAL_TOKENS) * self.held_by(USUAL_TOKENS)
        return max(self.least(wishes), usual)

    def tokens_in(self, n_blocks: int) -> float:
        return math.inf if n_blocks >= self.most(self.ahead) else n_blocks * self.block_tokens

    def safe(self, found: Found, n_most: int) -> int | None:
        """The furthest end of a block before which a whole window of blocks is cached."""
        stop = min(len(found), n_most // self.block_tokens)
        first = self.stale(stop * self.block_tokens)
        for i in range(stop - 1, -1, -1):
            if i < first:
                break
            if found[i] is None:
                stop = i
                first = self.stale(stop * self.block_tokens)
        return stop * self.block_tokens

    @property
    def resume_blocks(self) -> int | None:
        return self.blocks_for(self.window - 1)

    def reusable(self, request: Request, found: Found, n_tokens: int) -> Found:
        first, stop = self.stale(n_tokens), min(len(found), n_tokens // self.block_tokens)
        return [*[None] * min(first, stop), *found[first:stop], *[None] * (len(found) - stop)]

    def written(
        self, request: Request, n_before: int, n_computed: int, leaves: bool = False, stops: Sequence[int] = ()
    ) -> list[range]:
        """The windows before those points, passed by these tokens, from which a request may be resumed."""
        ends = self._ends(request).union(stop // self.block_tokens for stop in stops)
        passed = {e for e in ends if n_before < e * self.block_tokens <= n_computed}
        if leaves:
            passed.add(n_computed // self.block_tokens)
        return [range(self.stale(e * self.block_tokens), e) for e in sorted(passed)]

    def will_share(self, other: Request, its: Sequence[bytes], mine: Sequence[bytes], tokens: range) -> bool | None:
        return any(self._alike_at(end, its, mine, tokens) for end in self._ends(other))

    def _ends(self, request: Request) -> set[int]:
        """The ends, in blocks, of the published windows of a prompt."""
        points = (request.n_prompt - 1, request.n_prompt, *(m.end for m in request.media[-1:]))
        return {point // self.block_tokens for point in points}


class EmbedSpec(CacheSpec, frozen=True):
    """One row of image embedding per placeholder token, read only by the prefill of that token. The part "rows" is
    `(block_tokens, width)`. A picture starts on a block boundary, so that its blocks can be shared with other
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

    def span(self, n_computed: int, n_tokens: int, headroom: int = 0) -> range:
        return range(0)

    def need(self, request: Request, n_computed: int, n_tokens: int, headroom: int = 0) -> range:
        """The numbers of the blocks of pictures that end after token `n_computed`."""
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
        """Blocks for 64 usual pictures, or as many as a request may have if that is more, but at least for the largest
        picture."""
        usual = min(self.least(wishes), self.blocks_for(_PICTURE_TOKENS))
        return max(self.least(wishes), usual * max(_PICTURES, wishes.n_images))

    def tokens_in(self, n_blocks: int) -> float:
        return math.inf

    def keys(self, request: Request) -> list[bytes]:
        """The keys of the blocks: the picture's content key and the number of the block in the picture."""
        return [m.key + i.to_bytes(4, "little") for m in request.media for i in range(self.blocks_for(m.n_tokens))]

    def group(self, keys: Sequence[bytes], number: int) -> bytes:
        return keys[number][:-4]

    def safe(self, found: Found, n_most: int) -> int | None:
        return None

    @property
    def resume_blocks(self) -> int | None:
        return None

    def will_share(self, other: Request, its: Sequence[bytes], mine: Sequence[bytes], tokens: range) -> bool | None:
        return None

    def reusable(self, request: Request, found: Found, n_tokens: int) -> Found:
        """The found blocks of complete pictures. A picture counts as absent if any of its blocks was evicted."""
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

    def written(
        self, request: Request, n_before: int, n_computed: int, leaves: bool = False, stops: Sequence[int] = ()
    ) -> list[range]:
        return []

    def complete(self, request: Request, n_computed: int) -> range:
        return self.need(request, n_computed, 0)

    def moved(self, request: Request, n_computed: int) -> range:
        return self.need(request, n_computed, 0)


def specs_of(
    role: Role,
    *,
    windows: Sequence[int],
    kv_heads: int,
    local_kv_heads: int,
    head_dim: int,
    value_dim: int,
    embed_width: int | None,
    dtype: str,
    kv_block_tokens: int = 16,
    embed_block_tokens: int = 64,
    longest_span: int = 0,
    state: StateLayout | None = None,
    local_head_dim: int = 0,
    n_own: int | None = None,
) -> tuple[CacheSpec, ...]:
    """The caches that the stages of this role use. `windows`: for each layer, how many tokens a token sees, 0 for all;
    `local_kv_heads`: the KV heads of layers with a window. `embed_width`: None if the model takes no pictures.
    `longest_span`: the tokens of the largest picture, if its tokens see each other. `state`: the recurrent layers,
    which have no window. `local_head_dim`: the width of heads in layers with a window, unless 0. `n_own`: the number of
    layers with a cache; those behind them use theirs."""
    specs: list[CacheSpec] = []
    if embed_width is not None:
        specs.append(EmbedSpec.of(width=embed_width, dtype=dtype, block_tokens=embed_block_tokens))
    layers: dict[int, tuple[int, ...]] = {}
    for i, window in enumerate(windows[:n_own]):
        if state is not None and i in state.layers:
            continue
        layers[window] = (*layers.get(window, ()), i)
    full, local = (
        FullSpec.of(
            layers=1,
            kv_heads=n,
            head_dim=key_dim,
            dtype=dtype,
            block_tokens=kv_block_tokens,
            value_dim=dim,
        )
        for n, key_dim, dim in (
            (kv_heads, head_dim, value_dim),
            (local_kv_heads, local_head_dim or head_dim, local_head_dim or value_dim),
        )
    )
    if 0 in layers:
        specs.append(msgspec.structs.replace(full, layers=layers[0]))
    specs += (WindowSpec.over(local, w, layers[w], longest_span) for w in sorted(layers) if w)
    if state is not None:
        specs.append(StateSpec.of(state, dtype, kv_block_tokens))
    return tuple(spec for spec in specs if any(role.runs(stage) for stage in spec.stages))
