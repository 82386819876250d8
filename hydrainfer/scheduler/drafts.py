"""Drafts: guesses of a sequence's next tokens, verified beside its decode step (speculative decoding).

    tokens     … x   drafts   a  b  c        one work item of 1 + 3 rows, each of which samples its own token
    sampled          a  b  d  e              a and b are as drafted, d is what follows, e is not used

Guesses come with the result that they follow (`StepResult.drafts`), so whoever executes batches can make them.
Whatever is drafted, the answer has the same tokens as without drafts.
"""

from __future__ import annotations

from hydrainfer.core import LiveSequence, TokenWork


class Drafts:
    """The guesses that came with the latest results. `usable`: not beside recurrent states, which cannot forget a
    token."""

    def __init__(self, usable: bool) -> None:
        self._usable = usable
        self.kept: dict[str, tuple[int, tuple[int, ...]]] = {}  # by sequence: the tokens before them, the guesses

    def keep(self, seq: LiveSequence, guesses: tuple[int, ...]) -> None:
        """Keep guesses of what follows the tokens that the sequence has now."""
        if self._usable and guesses:
            self.kept[seq.id] = len(seq.tokens), guesses

    def extend(self, ready: list[TokenWork], budget: int) -> list[TokenWork]:
        """These decodes, with the drafts of their sequences. Drafts take no room and no part of the `budget` that
        another decode needs. Answers that must match a grammar get no drafts."""
        left, work = budget - len(ready), []
        self.kept = {item.seq.id: self.kept[item.seq.id] for item in ready if self._is_fresh(item.seq)}
        for item in ready:
            seq = item.seq
            drafts: tuple[int, ...] = ()
            most = min(left, seq.hold.capacity - len(seq.tokens), seq.request.max_tokens - seq.n_produced - 1)
            if most > 0 and seq.id in self.kept and seq.request.sampling.grammar is None:
                drafts = self.kept[seq.id][1][:most]
            left -= len(drafts)
            work.append(TokenWork(seq, item.start, 1 + len(drafts), True, drafts) if drafts else item)
        return work

    def _is_fresh(self, seq: LiveSequence) -> bool:
        """Whether the guesses follow the sequence's last token; a step launched ahead may have overtaken them."""
        return seq.id in self.kept and self.kept[seq.id][0] == len(seq.tokens)


def verified(seq: LiveSequence, drafts: tuple[int, ...], sampled: list[int]) -> tuple[int, ...]:
    """The new tokens of `seq` among `sampled`, which has one more than `drafts`: up to the first that differs from its
    draft or ends the choice. All but the last are appended to `seq.tokens`."""
    taken: list[int] = []
    for draft, token in zip(drafts, sampled):
        taken.append(token)
        if token != draft:
            return tuple(taken)
        seq.extend((token,))
        if seq.finish_reason(token) is not None:
            seq.retract()
            return tuple(taken)
    return *taken, sampled[-1]
