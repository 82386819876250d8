"""Drafts from grammars: the tokens that a grammar leaves no choice about. They are always right."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

from hydrainfer.core import LiveSequence
from hydrainfer.scheduler.drafting.drafter import Guess, Guide


class GrammarDrafter:
    """Names and punctuation of JSON by a schema, for instance."""

    name: ClassVar[str] = "grammar"

    def __init__(self, guide: Guide) -> None:
        self._guide = guide

    def guess(self, seq: LiveSequence, n: int) -> Guess:
        return Guess(self._guide.forced(seq)[:n] if seq.request.sampling.grammar is not None else ())

    def keep(self, seqs: Collection[LiveSequence]) -> None:
        pass
