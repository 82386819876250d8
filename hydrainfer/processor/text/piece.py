"""The parts of an answer, in the order in which they arrive."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec


class CallDelta(msgspec.Struct):
    """The new part of call number `index`. `id` and `name` are set only in the first part of a call."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


class AnswerPiece(msgspec.Struct):
    """A piece of an answer: reasoning, then text, then calls."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = []

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


class PieceList(list[AnswerPiece]):
    """The pieces that a part of the text adds, in order. A new piece is begun when the current one cannot keep the
    order of its parts."""

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
    """The reader of one choice's text. It separates reasoning, text and calls."""

    @property
    @abstractmethod
    def n_calls(self) -> int:
        """The number of calls found so far, including those that are left out."""

    @abstractmethod
    def push(self, text: str, *, last: bool = False, cut: bool = False) -> Sequence[AnswerPiece]:
        """Read the next piece of text and return its parts in order. `last`: no more text will come. `cut`: because the
        answer has reached its length, so that marks may be incomplete."""


def together(pieces: Sequence[AnswerPiece]) -> AnswerPiece:
    """All pieces merged into one, for API responses that do not give the order of text and calls."""
    if len(pieces) == 1:
        return pieces[0]
    calls = [call for piece in pieces for call in piece.calls]
    return AnswerPiece("".join(p.reasoning for p in pieces), "".join(p.content for p in pieces), calls)
