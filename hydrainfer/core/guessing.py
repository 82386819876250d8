"""Guesses that are right with a given chance: the drafts of emulated devices and of the simulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from hydrainfer.core.errors import ConfigError
from hydrainfer.core.random import draw_key
from hydrainfer.core.request import Request

_PREFIX = "right="
MAX_DRAFTS = 63
"""The most drafts of a sequence in one step."""


class Guessing(NamedTuple):
    """Up to `most` guesses of the tokens that follow, each of which is right with the chance `right`. Which of them are
    is a function of the request and the position."""

    right: float
    most: int

    @classmethod
    def of(cls, text: str, most: int) -> Guessing | None:
        """The guesses that `--drafts right=SHARE` asks for; None for anything else. Raises `ConfigError`."""
        if not text.startswith(_PREFIX):
            return None
        try:
            right = float(text.removeprefix(_PREFIX))
        except ValueError:
            right = -1.0
        if not 0.0 <= right <= 1.0:
            raise ConfigError(f"--drafts {text}: right= takes a share from 0 to 1", param="drafts")
        return cls(right, most)

    @property
    def tokens_per_step(self) -> float:
        """The mean number of tokens of a step that verifies all guesses."""
        return sum(self.right**i for i in range(self.most + 1))

    def after(self, request: Request, n_tokens: int, answer: Callable[[int], int]) -> tuple[int, ...]:
        """The guesses behind the first `n_tokens` tokens. `answer(i)`: the request's token at position i."""
        limit, seed, choice = self.right * 2.0**64, request.seed, request.choice
        places = range(n_tokens, n_tokens + self.most)
        return tuple(answer(at) ^ (draw_key(seed, choice, at) >= limit) for at in places)
