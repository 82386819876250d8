"""Drafts that come with a batch's result: the device has guessed them behind the tokens that it sampled."""

from __future__ import annotations

from collections.abc import Collection

from hydrainfer.core import LiveSequence
from hydrainfer.scheduler.drafting.drafter import Guess


class BroughtDrafter:
    """`name`: the one that its drafts are counted by."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._guesses: dict[str, tuple[int, tuple[int, ...]]] = {}  # by sequence: the tokens before them, the guesses

    def bring(self, seq: LiveSequence, guesses: tuple[int, ...]) -> None:
        """Guesses of what follows the tokens that the sequence has now."""
        self._guesses[seq.id] = len(seq.tokens), guesses

    def guess(self, seq: LiveSequence, n: int) -> Guess:
        n_before, guesses = self._guesses.get(seq.id, (0, ()))
        return Guess(guesses[:n] if n_before == len(seq.tokens) else ())  # a step launched ahead may overtake them

    def keep(self, seqs: Collection[LiveSequence]) -> None:
        self._guesses = {seq.id: self._guesses[seq.id] for seq in seqs if seq.id in self._guesses}

    def clear(self) -> None:
        self._guesses.clear()

    def __len__(self) -> int:
        return len(self._guesses)
