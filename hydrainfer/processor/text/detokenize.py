"""Token ids to text, as they come: never half a character, never part of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hydrainfer.core import SamplingParams
from hydrainfer.processor.text.vocabulary import REPLACEMENT, Vocabulary


class Detokenizer:
    """The text of one choice. The joined results of `push` and `flush` are what the tokenizer makes of all ids at once.

    `continues=True`: the text goes on after a prompt, so that its first space stays (completions); False: it stands
    alone, as a chat answer does. Time per token is constant, amortised.
    """

    def __init__(self, vocabulary: Vocabulary, *, skip_special: bool = True, continues: bool = False) -> None:
        self._vocabulary = vocabulary
        self._skipped = vocabulary.special_ids if skip_special else frozenset()
        self._strip = 0 if continues else vocabulary.n_strip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace") if vocabulary.byte_level else None
        self._run = bytearray()  # byte-fallback tokens whose run has not ended

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
        """The text that was held back; call once, at the end."""
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
    """A search for the stop string that is complete first, wherever token and chunk boundaries fall."""

    def __init__(self, stop: Sequence[str], *, include: bool = False) -> None:
        self._stop = stop
        self._include = include
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """The text that is safe to send. The calls after `found` is set return none."""
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
        """The length of the longest end of `text` with which a stop string begins."""
        longest = min(len(text), max(map(len, self._stop)) - 1)
        return next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in self._stop)), 0)


class Piece(NamedTuple):
    """A part of the answer: `text` may be sent, `n_tokens` count (those after a stop string do not), `stop` was
    found."""

    text: str
    n_tokens: int
    stop: str | None


class TextStream:
    """The stream of one choice, from ids to text that may be sent: detokeniser, then stop strings after
    `min_tokens`."""

    def __init__(self, vocabulary: Vocabulary, sampling: SamplingParams, *, continues: bool = False) -> None:
        self._text = Detokenizer(vocabulary, skip_special=sampling.skip_special_tokens, continues=continues)
        self._stop = StopStrings(sampling.stop, include=sampling.include_stop_str_in_output)
        self._has_stop = bool(sampling.stop)
        self._min_tokens = sampling.min_tokens
        self._include_stop = sampling.include_stop_str_in_output
        self._n_tokens = 0

    def push(self, ids: Sequence[int], *, ended_by_token: bool = False, last: bool = False) -> Piece:
        """The text of these ids that may be sent. `ended_by_token`: the last id is an end or stop token, whose spelling
        is not part of the text unless stop strings are. `last`: no more will come."""
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
