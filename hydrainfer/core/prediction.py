"""A predicted answer beside the true one: where the two agree, and what the prediction says comes next.

    predicted    a b c d e f g h i          the answer leaves it at d, and is found again at f g
    answer       a b c X f g h i            right are a, b, c, h, i

The place is a function of the two texts alone, so that all who follow an answer know the same.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

_SIZES = (3, 2)  # last tokens by which the answer is found again, the first that are found count
_UTF32 = f"utf-32-{sys.byteorder[0]}e"
_REACH = 4096  # tokens before and behind the place where it was lost, among which they are looked for


class Prediction:
    """A place in a predicted answer of these token `ids`, which `follow` moves. `n_right`: the tokens of the answer
    that it has predicted; `run`: those of them since it was last wrong. A token of the answer takes a few microseconds,
    whatever the lengths."""

    __slots__ = ("_at", "_ids", "_last", "_lost", "_text", "n_right", "run")

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = ids
        self._text = array("I", ids).tobytes().decode(_UTF32, "surrogatepass")  # a character per token; `str` searches
        self._at, self._lost = 0, False
        self._last = ""  # the latest tokens of the answer
        self.n_right = self.run = 0

    def __len__(self) -> int:
        return len(self._ids)

    def next(self, n: int) -> Sequence[int]:
        """Up to `n` tokens that come next; none while the answer is elsewhere."""
        return () if self._lost else self._ids[self._at : self._at + n]

    def follow(self, tokens: Sequence[int]) -> None:
        """The answer goes on with these tokens."""
        for token in tokens:
            self._last = self._last[1 - max(_SIZES) :] + chr(token)
            at = self._at
            if self._ids[at : at + 1] == (token,):
                self.n_right += not self._lost
                self.run += not self._lost
                self._at, self._lost = at + 1, False
            elif not self._lost:
                self._lost, self.run = True, 0
            elif self._ids[at + 1 : at + 2] == (token,):
                self._at, self._lost = at + 2, False
            else:
                self._find()

    def _find(self) -> None:
        """Go to where the last tokens stand, first ahead, then behind."""
        at = self._at
        for size in _SIZES:
            last = self._last[-size:]
            if len(last) < size:
                continue
            found = self._text.find(last, at, at + _REACH)
            if found < 0:
                found = self._text.rfind(last, max(at - _REACH, 0), at)
            if found >= 0:
                self._at, self._lost = found + size, False
                return
