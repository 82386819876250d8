"""What a batch takes of each sequence, within the budgets."""

from __future__ import annotations

from collections.abc import Iterable

from hydrainfer.core import EncodeWork, Sequence, TokenWork


def decodes(seqs: Iterable[Sequence]) -> list[TokenWork]:
    """One token of each sequence that has room for it."""
    return [TokenWork(s, s.n_computed, 1, True) for s in seqs if len(s.tokens) <= s.capacity]


def add_chunk(work: list[TokenWork], seq: Sequence, budget: int) -> int:
    """Add the sequence's next prefill chunk; returns its tokens, at most `budget`."""
    left = len(seq.tokens) - seq.n_computed
    count = min(left, budget, seq.capacity - seq.n_computed)
    if count > 0:
        work.append(TokenWork(seq, seq.n_computed, count, count == left))
    return count


def add_pictures(work: list[EncodeWork], seq: Sequence, left: int, most: int) -> int:
    """Add the sequence's pictures, in order, until there are `most` or one does not fit the `left` tokens; a batch
    takes at least one. Returns what is then left."""
    for i in seq.pending_media[: max(most - len(work), 0)]:
        n = seq.request.media[i].n_tokens
        if work and n > left:
            return 0
        work.append(EncodeWork(seq, i))
        left -= n
    return left
