"""Drafts: guesses of a sequence's next tokens, verified beside its decode step (speculative decoding).

    tokens     … x   drafts   a  b  c        one work item of 1 + 3 rows, each of which samples its own token
    sampled          a  b  d  e              a and b are as drafted, d is what follows, e is not used

Whatever is drafted, the answer has the same tokens as without drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hydrainfer.core import LiveSequence, TokenWork

Drafter = Callable[[LiveSequence, int], tuple[int, ...]]
"""Guesses of a sequence's next tokens, at most as many as the second argument; or none."""


def drafted(seqs: Iterable[LiveSequence], budget: int, draft: Drafter) -> list[TokenWork]:
    """One token of each sequence that has room for it, and its drafts. Drafts take no room and no part of the `budget`
    that another decode needs. Answers that must match a grammar get no drafts."""
    ready = [seq for seq in seqs if len(seq.tokens) <= seq.hold.capacity]
    left, work = budget - len(ready), []
    for seq in ready:
        most = min(left, seq.hold.capacity - len(seq.tokens), seq.request.max_tokens - seq.n_produced - 1)
        drafts = draft(seq, most) if most > 0 and seq.request.sampling.grammar is None else ()
        left -= len(drafts)
        work.append(TokenWork(seq, seq.n_computed, 1 + len(drafts), True, drafts))
    return work


def verified(seq: LiveSequence, drafts: tuple[int, ...], sampled: list[int]) -> tuple[int, ...]:
    """The new tokens of `seq` among `sampled`, which has one more than `drafts`: up to the first that differs from its
    draft or ends the choice. All but the last are appended to `seq.tokens`."""
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
