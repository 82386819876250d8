"""Drafts from the text itself: what followed the last tokens where they stood before, in the prompt or the answer
(prompt look-up). Answers that copy, edit or quote repeat much of their prompt."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from typing import ClassVar

import numpy as np

from hydrainfer.core import LiveSequence
from hydrainfer.scheduler.drafting.drafter import Guess

_SIZES = (3, 2)
"""The numbers of last tokens that are looked up, the first that is found counts."""
_LONG = (2, 3, 4, 6)
"""Numbers of last tokens that agree, which are told apart."""
_FACTOR = 0x9E3779B1
_FEW = 64
"""Tokens that are entered one by one; more at once are entered by numpy."""


class TextDrafter:
    """A look-up and a new token take a few microseconds, whatever the length of the text, and 16 to 64 bytes per
    token."""

    name: ClassVar[str] = "ngram"

    def __init__(self) -> None:
        self._known: dict[str, _Text] = {}

    def guess(self, seq: LiveSequence, n: int) -> Guess:
        text = self._known.get(seq.id)
        if text is None or text.tokens is not seq.tokens:
            text = self._known[seq.id] = _Text(seq.tokens)
        return text.after(n)

    def keep(self, seqs: Collection[LiveSequence]) -> None:
        self._known = {seq.id: self._known[seq.id] for seq in seqs if seq.id in self._known}


class _Text:
    """Where each pair and each triple of `tokens`, which only grow, stood last. There is one place per hash value: of
    two triples with the same one the later counts. What is found is compared, so that a hash value alone misleads
    nobody."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self._n_known = 0  # tokens: all but the last, behind which nothing stands yet
        self._places = {size: array("i") for size in _SIZES}  # by hash value: the index behind the last token, or 0

    def after(self, n: int) -> Guess:
        """`n` tokens that may follow, none if the last ones have not stood together before. Where they reach the end of
        the text, its end repeats itself. The kind is the number of last tokens that agree: the more, the oftener what
        followed them follows again."""
        tokens = self.tokens
        self._know(len(tokens) - 1)
        for size in _SIZES:
            if len(tokens) <= size:
                continue
            last = tokens[-size:]
            at = self._places[size][_hash(last) & (len(self._places[size]) - 1)]
            if at and tokens[at - size : at] == last:
                follow = tokens[at : at + n]
                while len(follow) < n:
                    follow += follow[: n - len(follow)]
                return Guess(follow, self._agree(at, size))
        return Guess()

    def _agree(self, at: int, size: int) -> int:
        """How many tokens before token `at`, at least `size`, are those at the end; of many, the least of `_LONG`."""
        tokens, most = self.tokens, min(_LONG[-1], at)
        while size < most and tokens[at - size - 1] == tokens[-size - 1]:
            size += 1
        return max(size_ for size_ in _LONG if size_ <= size)

    def _know(self, stop: int) -> None:
        """Enter what ends before token `stop`."""
        first = self._n_known
        self._n_known = max(first, stop)
        if 2 * stop > len(self._places[_SIZES[0]]):
            room = 1 << (4 * stop).bit_length()
            self._places = {size: array("i", bytes(4 * room)) for size in _SIZES}
            first = 0
        for size, places in self._places.items():
            begin = max(first + 1, size)
            if stop - begin > _FEW:
                self._know_many(size, begin, stop)
                continue
            mask = len(places) - 1
            for end in range(begin, stop + 1):
                places[_hash(self.tokens[end - size : end]) & mask] = end

    def _know_many(self, size: int, begin: int, stop: int) -> None:
        ids = np.array(self.tokens[begin - size : stop], dtype=np.uint32)
        values = np.zeros(stop - begin + 1, dtype=np.uint32)
        for i in range(size):
            values = (values ^ (values >> np.uint32(15)) ^ ids[i : i + len(values)]) * np.uint32(_FACTOR)
        places = np.frombuffer(self._places[size], dtype=np.int32)
        places[(values ^ (values >> np.uint32(15))) & np.uint32(len(places) - 1)] = np.arange(begin, stop + 1)


def _hash(tokens: Sequence[int]) -> int:
    value = 0
    for token in tokens:
        value = (value ^ (value >> 15) ^ token) * _FACTOR & 0xFFFFFFFF
    return value ^ (value >> 15)
