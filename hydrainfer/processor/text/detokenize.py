"""Incremental detokenisation. It never emits half a character or part of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hydrainfer.core import SamplingParams
from hydrainfer.processor.text.vocabulary import REPLACEMENT, Vocabulary


class Detokenizer:
    """The detokenizer of one choice. The results of `push` and `flush`, joined, are what the tokenizer makes of all ids
    at once.

    `continues=True` is for completions: the text continues a prompt, so its leading space stays. `continues=False` is
    for chat answers, whose text stands alone. The time per token is constant, amortised.
    """

    def __init__(self, vocabulary: Vocabulary, *, skip_special: bool = True, continues: bool = False) -> None:
        self._vocabulary = vocabulary
        self._skipped = vocabulary.special_ids if skip_special else frozenset()
        self._strip = 0 if continues else vocabulary.n_strip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace") if vocabulary.byte_level else None
        self._run = bytearray()  # the bytes of a run of byte-fallback tokens that has not ended

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids complete."""
        vocabulary, skipped = self._vocabulary, self._skipped
        if self._utf8 is not None:
            return self._utf8.decode(b"".join(vocabulary.spell(i) for i in ids if i not in skipped))
        texts: list[str] = []
        for i in ids:
            if i in skipped or (piece := vocabulary.pieces.get(i)) is None:
                continue
            if i in vocabulary.byte_ids:
                self._run += piece
                continue
            if self._run:
                texts.append(self._end_run())
            texts.append(piece.decode("utf-8", "replace"))
        return self._stripped("".join(texts))

    def flush(self) -> str:
        """The text that was held back. Call this once, at the end."""
        if self._utf8 is not None:
            return self._utf8.decode(b"", final=True)
        return self._stripped(self._end_run())

    def _end_run(self) -> str:
        run, self._run = bytes(self._run), bytearray()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
                break
            text = text[1:]
            self._strip -= 1
        return text


class StopStrings:
    """A search for the stop string that is completed first, independent of token and chunk boundaries."""

    def __init__(self, stop: Sequence[str], *, include: bool = False) -> None:
        self._stop = stop
        self._include = include
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """The text that may be sent now. After the call that sets `found` no more text is returned."""
        if not self._stop or self.found is not None:
            return text if self.found is None else ""
        text = self._held + text
        hits = [(at + len(s), at, s) for s in self._stop if (at := text.find(s)) >= 0]
        if hits:
            end, start, self.found = min(hits)
            self._held = ""
            return text[: end if self._include else start]
        n = self._n_held(text)
        self._held = text[len(text) - n :]
        return text[: len(text) - n]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _n_held(self, text: str) -> int:
        """The length of the longest suffix of `text` that is a proper prefix of a stop string."""
        longest = min(len(text), max(map(len, self._stop)) - 1)
        return next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in self._stop)), 0)


class Piece(NamedTuple):
    """A part of the answer. `text` may be sent. `n_tokens`: the tokens that count, which excludes those after a stop
    string. `stop`: the stop string that was found."""

    text: str
    n_tokens: int
    stop: str | None


class TextStream:
    """The stream of one choice, from token ids to text that may be sent. Stop strings are searched for in the
    detokenised text after `min_tokens`."""

    def __init__(self, vocabulary: Vocabulary, sampling: SamplingParams, *, continues: bool = False) -> None:
        self._text = Detokenizer(vocabulary, skip_special=sampling.skip_special_tokens, continues=continues)
        self._stop = StopStrings(sampling.stop, include=sampling.include_stop_str_in_output)
        self._has_stop = bool(sampling.stop)
        self._min_tokens = sampling.min_tokens
        self._include_stop = sampling.include_stop_str_in_output
        self._n_tokens = 0

    def push(self, ids: Sequence[int], *, ended_by_token: bool = False, last: bool = False) -> Piece:
        """The text of these ids that may be sent. `ended_by_token`: the last id is an end or stop token; its text is
        left out unless stop strings are included in the output. `last`: no more ids will come."""
        n = len(ids)
        if not self._has_stop:
            text = self._text.push(ids[:-1] if ended_by_token and not self._include_stop else ids)
            return Piece(text + self._text.flush() if last else text, n, None)
        sent: list[str] = []
        for i, token in enumerate(ids):
            self._n_tokens += 1
            silent = ended_by_token and not self._include_stop and i == n - 1
            text = "" if silent else self._text.push((token,))
            if last and i == n - 1:
                text += self._text.flush()
            if self._n_tokens <= self._min_tokens:
                sent.append(text)
                continue
            sent.append(self._stop.push(text))
            if self._stop.found is not None:
                return Piece("".join(sent), i + 1, self._stop.found)
        if last:
            sent.append((self._text.flush() if not n else "") + self._stop.flush())
        return Piece("".join(sent), n, None)
