"""The port of those who guess."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from hydrainfer.core import LiveSequence


class Guess(NamedTuple):
    """Token ids that may come next; none if there is no idea. `kind`: guesses of one kind are right about equally
    often, which is learnt."""

    tokens: Sequence[int] = ()
    kind: int = 0


class Drafter(Protocol):
    """Guesses what follows a sequence's tokens. It decides nothing else and changes no token: what it is wrong about is
    thrown away. It is asked on the engine's thread, between two steps, so an answer may take a few microseconds."""

    @property
    def name(self) -> str: ...

    def guess(self, seq: LiveSequence, n: int) -> Guess:
        """Up to `n` tokens that may follow `seq.tokens`. Between two calls a sequence only gets more tokens."""
        ...

    def keep(self, seqs: Collection[LiveSequence]) -> None:
        """Forget what is known of all sequences but these."""
        ...


class Guide(Protocol):
    """What the grammar of a sequence, which has one, says of its next tokens."""

    def forced(self, seq: LiveSequence) -> Sequence[int]:
        """The tokens that come next whatever the model says; none if there is a choice."""
        ...

    def allowed(self, seq: LiveSequence, guesses: Sequence[int]) -> Sequence[int]:
        """The first of these guesses, up to one that may not come or that ends the answer."""
        ...
