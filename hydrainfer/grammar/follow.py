"""The positions of live requests in their grammars.

A position follows from the grammar and the tokens produced so far, so it is never transferred: after a preemption, a
migration or the loss of an instance, it is computed again from the tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hydrainfer.core import Grammar, HydraError, InternalError, InvalidRequest, Reasoning
from hydrainfer.grammar.bounds import KEPT_BYTES
from hydrainfer.grammar.compile import CompiledGrammar, Grammars

_KEPT = 256


class Guided(NamedTuple):
    """A row of logits whose token must follow `grammar`, after the tokens `produced`. `reasoning`: how the answer's
    reasoning, which the grammar does not cover, begins and ends. `id`: the request's id."""

    row: int
    id: str
    grammar: Grammar
    produced: Sequence[int]
    reasoning: Reasoning | None = None


class _MatcherState:
    """A matcher of `grammar` that has read `n_read` tokens of the answer."""

    __slots__ = ("grammar", "matcher", "n_read")

    def __init__(self, grammar: CompiledGrammar) -> None:
        self.grammar = grammar
        self.matcher = grammar.matcher.deep_copy()
        self.n_read = 0


class Follower:
    """The positions of the requests seen last. For a request that comes back later, all tokens are read again. Used on
    one thread."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._places: dict[str, _MatcherState] = {}  # by request, the last used last

    def blocked(self, rows: Sequence[Guided], n_columns: int) -> tuple[np.ndarray, dict[str, HydraError]]:
        """The tokens that may not come next, bool [rows, n_columns], and the errors of requests that cannot go on, by
        id."""
        n_bytes = (n_columns + 7) // 8
        allowed = np.zeros((len(rows), n_bytes), dtype=np.uint8)
        failed: dict[str, HydraError] = {}
        n_before = len(self._places)
        for i, guided in enumerate(rows):
            begin = _answer_begins(guided)
            if begin is None:
                allowed[i] = self._thinking(n_bytes)
                continue
            try:
                bits = self._advance(guided, begin).matcher.compute_bitmask()[:n_bytes]
                allowed[i, : len(bits)] = np.frombuffer(bits, dtype=np.uint8)
                if not bits.strip(b"\0"):
                    raise _too_complex(self._places.pop(guided.id).matcher.get_error())
                if guided.reasoning is not None and not guided.produced:
                    opens = guided.reasoning.opens
                    allowed[i, opens >> 3] |= 1 << (opens & 7)
            except HydraError as e:
                failed[guided.id] = e
                allowed[i] = 0xFF
        if len(self._places) > n_before:
            self._make_room(len(rows))
        return np.unpackbits(~allowed, axis=1, bitorder="little", count=n_columns).view(bool), failed

    def _make_room(self, n_rows: int) -> None:
        """Forget the positions used longest ago if there are too many or their grammars take too much memory, but not
        those of the last `n_rows` requests."""
        grammars = Counter(id(place.grammar) for place in self._places.values())
        n_bytes = sum({id(place.grammar): place.grammar.n_bytes for place in self._places.values()}.values())
        while len(self._places) > n_rows and (len(self._places) > _KEPT or n_bytes > KEPT_BYTES):
            grammar = self._places.pop(next(iter(self._places))).grammar
            grammars[id(grammar)] -= 1
            if not grammars[id(grammar)]:
                n_bytes -= grammar.n_bytes

    def _thinking(self, n_bytes: int) -> np.ndarray:
        """The tokens that may come within a reasoning, as a bit mask: all but those that end the answer."""
        bits = np.full(n_bytes, 0xFF, dtype=np.uint8)
        for token in self._grammars.eos_ids:
            if token >> 3 < n_bytes:
                bits[token >> 3] &= 0xFF ^ (1 << (token & 7))
        return bits

    def _advance(self, guided: Guided, begin: int) -> _MatcherState:
        """The request's position after the tokens that it has produced from `begin` on. Raises `HydraError`."""
        place = self._places.pop(guided.id, None)
        n_answer = len(guided.produced) - begin
        if place is None or place.n_read > n_answer:
            place = _MatcherState(self._grammars.compiled(guided.grammar))
        for token in guided.produced[begin + place.n_read :]:
            ended = token in self._grammars.eos_ids  # with `ignore_eos`, the matcher stays at the end
            if not ended and not place.matcher.consume_token(token):
                raise _too_complex(place.matcher.get_error())
        place.n_read = n_answer
        self._places[guided.id] = place
        return place


def _answer_begins(guided: Guided) -> int | None:
    """The number of produced tokens that belong to the reasoning, or None if it has not ended."""
    reasoning, produced = guided.reasoning, guided.produced
    if reasoning is None or not (reasoning.begun or (produced and produced[0] == reasoning.opens)):
        return 0
    return produced.index(reasoning.closes) + 1 if reasoning.closes in produced else None


def _too_complex(why: str) -> HydraError:
    if not why:
        return InternalError("the answer left its grammar; see the server's log")
    return InvalidRequest(f"the grammar became too complex within the answer: {why[:200]}", code="invalid_grammar")
