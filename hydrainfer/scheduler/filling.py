"""What a batch takes of each sequence, within the budgets."""

from __future__ import annotations

from collections.abc import Iterable

from hydrainfer.core import EncodeWork, Sequence, TokenWork


def decodes(seqs: Iterable[Sequence]) -> list[TokenWork]:
    """One token of each sequence that has room for it."""
    return [TokenWork(s, s.n_computed, 1, True) for s in seqs if len(s.tokens) <= s.capacity]


def add_chunk(work: list[TokenWork], seq: Sequence, budget: int, *, first: bool) -> int:
    """Add the sequence's next prefill chunk; returns its tokens. They are at most `budget`, but where it is the `first`
    chunk of a batch and begins with a picture that must not be cut."""
    left = len(seq.tokens) - seq.n_computed
    count = min(left, budget, seq.capacity - seq.n_computed)
    if seq.request.media and count < left:
        count = _uncut(seq, count, first=first)
    if count > 0:
        work.append(TokenWork(seq, seq.n_computed, count, count == left))
    return count


def _uncut(seq: Sequence, count: int, *, first: bool) -> int:
    """`count` tokens, or as many fewer as it takes to end before a picture that would be cut."""
    start, stop = seq.n_computed, seq.n_computed + count
    cut = next((m for m in seq.request.media if m.whole and m.start < stop < m.end), None)
    if cut is None:
        return count
    if cut.start > start:
        return cut.start - start
    return cut.end - start if first and cut.end <= seq.capacity else 0


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
