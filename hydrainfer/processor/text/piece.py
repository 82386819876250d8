"""What an answer says, as it comes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from hydrainfer.processor.text.tool_calls import CallDelta


class AnswerPiece(NamedTuple):
    """What a piece of an answer adds: what the model thinks, what it says, what it calls."""

    reasoning: str
    content: str
    calls: Sequence[CallDelta] = ()


class AnswerStream(ABC):
    """One choice's text, told apart."""

    @property
    @abstractmethod
    def n_calls(self) -> int:
        """The calls found so far, those that are left out among them."""

    @abstractmethod
    def push(self, text: str, *, last: bool = False) -> AnswerPiece:
        """What this piece adds; `last`: no more will come."""
