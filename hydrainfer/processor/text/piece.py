"""The parts of an answer, as it comes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from hydrainfer.processor.text.tool_calls import CallDelta


class AnswerPiece(NamedTuple):
    """The parts of a piece of an answer: the model's reasoning, its text, its calls."""

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
        """Read the next piece of text; `last`: no more will come."""
