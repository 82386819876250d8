"""The reader that separates a model's reasoning from its answer as the text arrives."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from hydrainfer.processor.text.tool_calls import overlap
from hydrainfer.processor.text.tool_format import HARMONY
from hydrainfer.processor.text.vocabulary import Vocabulary

_OTHER_CHANNEL = rb"(?=<\|channel\|>(?!analysis))|(?=<\|start\|>assistant to=)"


class ReasoningFormat(NamedTuple):
    """The marks around the reasoning."""

    name: str
    opening: str
    closing: str


REASONING: Mapping[str, ReasoningFormat] = {
    f.name: f
    for f in (
        ReasoningFormat("think", "<think>", "</think>"),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
        ReasoningFormat("kimi", "◁think▷", "◁/think▷"),
        ReasoningFormat(HARMONY, "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
    )
}


class Thinking(NamedTuple):
    """The way an answer reasons. `begun`: the prompt has opened the reasoning; otherwise the answer may open it."""

    how: ReasoningFormat
    begun: bool

    @classmethod
    def after(cls, prompt: str, how: ReasoningFormat) -> Thinking | None:
        """The way the answer to this prompt reasons. None if the prompt has closed the reasoning already, as templates
        do when thinking is turned off."""
        end = prompt[-64:].rstrip()
        return None if end.endswith(how.closing) else cls(how, end.endswith(how.opening))

    def n_tokens(self, ids: Sequence[int], words: Vocabulary) -> int:
        """The number of an answer's tokens that belong to the reasoning, including its marks."""
        pieces = [words.spell(i) for i in ids]
        text, how = b"".join(pieces), self.how
        closing = _OTHER_CHANNEL if how.name == HARMONY else re.escape(how.closing.encode())
        found = re.search(closing, text)
        if not (self.begun or text.lstrip().startswith(how.opening.encode())):
            return 0
        return len(ids) if found is None else sum(end <= found.end() for end in accumulate(map(len, pieces)))


class Thought(NamedTuple):
    """A piece of text, separated into reasoning and answer."""

    reasoning: str
    content: str


class ReasoningStream:
    """The separation of one choice's text into reasoning and answer. White space around the reasoning is in neither
    part.

    before ──opening──> inside ──closing──> behind       (`begun`: from inside; anything but an opening: behind)
    """

    def __init__(self, thinking: Thinking) -> None:
        self._how = thinking.how
        self._inside = thinking.begun
        self._behind = False
        self._opened = False  # by an opening mark in the answer
        self._held = ""
        self._said = False  # some text of the current part was returned

    def push(self, text: str, *, last: bool = False) -> Thought:
        """Separate the next piece of text. `last`: no more text will come."""
        if self._behind and self._said:
            return Thought("", text)
        self._held += text
        reasoning = ""
        if not self._behind:
            self._open(last)
        if self._inside:
            reasoning = self._think(last)
        return Thought(reasoning, self._answer() if self._behind else "")

    def _open(self, last: bool) -> None:
        """Look for the opening mark. The answer may repeat it even if the prompt has opened the reasoning."""
        if self._said or self._opened:
            return
        head, opening = self._held.lstrip(), self._how.opening
        if head.startswith(opening):
            self._inside = self._opened = True
            self._held = head[len(opening) :]
        elif not self._inside and (last or not opening.startswith(head)):
            self._behind = self._said = True  # an answer that does not reason is left as it is

    def _think(self, last: bool) -> str:
        text, closing = self._held, self._how.closing
        if not self._said:
            text = text.lstrip()
            if not (last or self._opened) and text and self._how.opening.startswith(text):
                return ""  # may become an opening mark
        at = text.find(closing)
        if at >= 0:
            self._inside, self._behind, self._said = False, True, False
            self._held = text[at + len(closing) :]
            return text[:at].rstrip()
        kept = text if last else text[: len(text) - overlap(text, closing)].rstrip()
        self._said = self._said or bool(kept)
        self._held = text[len(kept) :]
        return kept.rstrip() if last else kept

    def _answer(self) -> str:
        text = self._held if self._said else self._held.lstrip()
        self._said, self._held = self._said or bool(text), ""
        return text
