"""Caches of recurrent states, which sum up all tokens before them: matrices of linear attention, tails of
convolutions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from hydrainfer.cache.spec import GROUP_TOKENS, USUAL_TOKENS, CacheSpec, Found, Part, Scan, Wishes
from hydrainfer.core import Request, answer_keys, split_chain

_SNAPSHOTS = 2  # of a usual request, worth keeping: at the end of its prompt and of its answer


class StateLayout(NamedTuple):
    """The recurrent layers and the state of each: `conv`, the last inputs of a convolution (how many, how wide), and
    `matrix` (heads, key_dim, value_dim), in float32 whatever the model's dtype; (): none."""

    layers: tuple[int, ...]
    conv: tuple[int, int]
    matrix: tuple[int, ...] = ()


class StateSpec(CacheSpec, frozen=True):
    """The recurrent state after a number of tokens. Block number `i` is the state after `i * block_tokens` tokens, at a
    *boundary*.

    A request with n computed tokens holds the block of its last boundary, b = n // block_tokens, and one block for the
    state after it; while it is prefilled, two.

        number    b             b + 1                           b + 2
                  after b * B   after n tokens, if n > b * B    free

        a chunk   reads b where n is a boundary, else b + 1; writes, if it passes boundaries, the last of them to b + 1
                  and what is behind that to b + 2; else b + 1

    A decode with drafts has a block more for each of them, so that every token's state is there until it is known which
    of them are right (`after_drafts`). Once a boundary is passed, block b is given back and the others are renumbered
    by the state they hold (`jumps`). So a block that others may hold or find is never written: a request that continues
    from it writes elsewhere. Blocks are published, and a chunk ends, where a request may be resumed (`stops`). The last
    boundary of a prompt, of an answer, and of the tokens computed before a preemption or a move is published, too.
    """

    slides: ClassVar[bool] = True
    jumps: ClassVar[bool] = True
    paged: ClassVar[bool] = False

    @classmethod
    def of(cls, layout: StateLayout, dtype: str, block_tokens: int = 16) -> StateSpec:
        matrix = (Part("matrix", layout.matrix, "float32"),) if layout.matrix else ()
        return cls("state", block_tokens, (*matrix, Part("conv", layout.conv, dtype)), layout.layers)

    def scan(self, blocks: Sequence[int], start: int, count: int, each: bool = False) -> Scan:
        size, stop = self.block_tokens, start + count
        source, boundary = blocks[start % size > 0] if start else -1, stop // size * size
        if each:
            return Scan(source, tuple((start + i, blocks[i]) for i in range(1, count + 1)))
        if start < boundary < stop:
            return Scan(source, ((boundary, blocks[1]), (stop, blocks[2])))
        return Scan(source, ((stop, blocks[1]),))

    def with_drafts(self, n_drafts: int) -> int:
        return 2 + n_drafts

    def after_drafts(self, n_before: int, n_computed: int) -> list[int]:
        last = n_computed // self.block_tokens * self.block_tokens
        kept = {0, n_computed - n_before}
        if last > n_before:
            kept.add(last - n_before)
        return sorted(kept)

    # ---- how many blocks

    def stale(self, n_computed: int) -> int:
        return n_computed // self.block_tokens

    def due(self, request: Request, n_computed: int) -> float:
        return (self.stale(n_computed) + 1) * self.block_tokens

    def most(self, n_left: int) -> int:
        return 3 if n_left > 1 else 2

    def span(self, n_computed: int, n_tokens: int, headroom: int = 0) -> range:
        first = self.stale(n_computed)
        return range(first, first + self.most(n_tokens - n_computed))

    def capacity(self, stop: int) -> float:
        return math.inf

    def held_by(self, n_tokens: int) -> int:
        return self.most(1)

    def least(self, wishes: Wishes) -> int:
        return self.most(2)

    def wanted(self, wishes: Wishes) -> int | None:
        if wishes.n_tokens is None:
            return None
        return max(self.least(wishes), -(-wishes.n_tokens // USUAL_TOKENS) * (self.most(1) + _SNAPSHOTS))

    def tokens_in(self, n_blocks: int) -> float:
        return math.inf

    # ---- reuse

    def keys(self, request: Request) -> list[bytes]:
        """One key per boundary. The start of the prompt is a boundary, too, but is never published."""
        return split_chain(request.keys)

    def more_keys(self, request: Request, tokens: Sequence[int], keys: Sequence[bytes]) -> list[bytes]:
        return answer_keys(request, tokens, keys[1:], self.block_tokens) if request.keys else []

    def group(self, keys: Sequence[bytes], number: int) -> bytes:
        """See `CacheSpec.group`: that of the block of tokens before the boundary. The start has none."""
        n = max(1, GROUP_TOKENS // self.block_tokens)
        return keys[min(number, 1 if number <= n else n)]

    def safe(self, found: Found, n_most: int) -> int | None:
        """The furthest boundary whose state is cached."""
        last = min(len(found) - 1, n_most // self.block_tokens)
        return next((i for i in range(last, 0, -1) if found[i] is not None), 0) * self.block_tokens

    def reusable(self, request: Request, found: Found, n_tokens: int) -> Found:
        kept: list[int | None] = [None] * len(found)
        boundary = self.stale(n_tokens)
        if boundary < len(found):
            kept[boundary] = found[boundary]
        return kept

    def stops(self, request: Request) -> list[int]:
        """The boundary before the end of the last picture. If the prompt ends at a boundary, also the one before its
        last token, which is always computed; otherwise the chunk that passes the prompt's last boundary leaves its
        state."""
        points = [m.end for m in request.media[-1:]]
        if request.n_prompt % self.block_tokens == 0:
            points.append(request.n_prompt - 1)
        return [self.stale(point) * self.block_tokens for point in points]

    def written(
        self, request: Request, n_before: int, n_computed: int, leaves: bool = False, stops: Sequence[int] = ()
    ) -> list[range]:
        last = self.stale(n_computed)
        ends = {self.stale(request.n_prompt), *(self.stale(stop) for stop in stops)}
        passed = self.stale(n_before) < last and last in ends
        return [range(last, last + 1)] if last and (passed or leaves) else []

    def will_share(self, other: Request, its: Sequence[bytes], mine: Sequence[bytes], tokens: range) -> bool | None:
        ends = {self.stale(other.n_prompt), *(self.stale(stop) for stop in self.stops(other))}
        both = range(1, min(len(its), len(mine)))
        return any(end in both and end * self.block_tokens in tokens and its[end] == mine[end] for end in ends)

    def complete(self, request: Request, n_computed: int) -> range:
        last = self.stale(n_computed)
        return range(max(1, last), last + 1)

    # ---- migration

    def contents(self, request: Request) -> list[bytes]:
        """No names: two copies of a state may be on their way at the same time, and the second to land is dropped."""
        return []

    def moved(self, request: Request, n_computed: int) -> range:
        """The state at the last boundary, and the state after it if there are further tokens."""
        last = self.stale(n_computed)
        return range(max(1, last), last + 1 + (n_computed % self.block_tokens > 0))

    def left_behind(self, moved: range) -> range:
        """The state at the last boundary, if there is a later one."""
        return moved[:-1]
