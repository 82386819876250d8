"""Drafts: tokens that a sequence may go on with, guessed, and verified beside its decode step (speculative decoding).

    tokens     … x   drafts   a  b  c        one work item of 1 + 3 rows, each of which samples its own token
    sampled          a  b  d  e              a and b are as drafted, d is what follows, e is of no use

Whatever is drafted, the answer has the tokens that it would have without drafts, one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hydrainfer.core import LiveSequence, TokenWork

Drafter = Callable[[LiveSequence, int], tuple[int, ...]]
"""At most so many tokens that a sequence may go on with, or none."""


def drafted(seqs: Iterable[LiveSequence], budget: int, draft: Drafter) -> list[TokenWork]:
    """A token of each sequence that has room for it, and its drafts. These take no room and no part of the `budget`
    that another decode wants; answers that must match a grammar have none."""
    ready = [seq for seq in seqs if len(seq.tokens) <= seq.capacity]
    left, work = budget - len(ready), []
    for seq in ready:
        most = min(left, seq.capacity - len(seq.tokens), seq.request.max_tokens - seq.n_produced - 1)
        drafts = draft(seq, most) if most > 0 and seq.request.sampling.grammar is None else ()
        left -= len(drafts)
        work.append(TokenWork(seq, seq.n_computed, 1 + len(drafts), True, drafts))
    return work


def verified(seq: LiveSequence, drafts: tuple[int, ...], sampled: list[int]) -> tuple[int, ...]:
    """The tokens of `seq` among those `sampled`, one more than drafts: up to the first that is not as drafted or ends
    the choice. All of them but the last are appended."""
    taken: list[int] = []
    for draft, token in zip(drafts, sampled):
        taken.append(token)
        if token != draft:
            return tuple(taken)
        seq.tokens.append(token)
        if seq.finish_reason(token) is not None:
            seq.tokens.pop()
            return tuple(taken)
    return *taken, sampled[-1]
