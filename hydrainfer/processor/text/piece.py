"""The parts of an answer, as it comes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec


class CallDelta(msgspec.Struct):
    """The new part of call number `index`; `id` and `name` come once, with its first."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


class AnswerPiece(msgspec.Struct):
    """A piece of an answer: the model's reasoning, its text, its calls, in this order."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = []

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


class PieceList(list[AnswerPiece]):
    """The pieces that a text adds, one after the other. A new one is begun where the order asks for it."""

    def think(self, text: str) -> None:
        if not self or self[-1].content or self[-1].calls:
            self.append(AnswerPiece())
        self[-1].reasoning += text

    def say(self, text: str) -> None:
        if not self or self[-1].calls:
            self.append(AnswerPiece())
        self[-1].content += text

    def call(self, delta: CallDelta) -> None:
        if not self:
            self.append(AnswerPiece())
        self[-1].calls.append(delta)


class AnswerStream(ABC):
    """The reader of one choice's text, which tells reasoning, text and calls apart."""

    @property
    @abstractmethod
    def n_calls(self) -> int:
        """The calls found so far, those that are left out among them."""

    @abstractmethod
    def push(self, text: str, *, last: bool = False) -> Sequence[AnswerPiece]:
        """Read the next piece of text; the parts are in order. `last`: no more will come."""


def together(pieces: Sequence[AnswerPiece]) -> AnswerPiece:
    """One piece of all, for readers that are not told the order of texts and calls."""
    if len(pieces) == 1:
        return pieces[0]
    calls = [call for piece in pieces for call in piece.calls]
    return AnswerPiece("".join(p.reasoning for p in pieces), "".join(p.content for p in pieces), calls)
