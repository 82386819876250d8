"""The positions of live requests in their grammars.

A position follows from the grammar and the tokens produced so far, so it is never transferred: after a preemption, a
migration or the loss of an instance, it is computed again from the tokens.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from itertools import takewhile
from threading import Lock
from typing import NamedTuple

import numpy as np

from hydrainfer.core import Grammar, HydraError, InternalError, InvalidRequest, LiveSequence, Reasoning
from hydrainfer.grammar.bounds import KEPT_BYTES
from hydrainfer.grammar.compile import CompiledGrammar, Grammars
from hydrainfer.grammar.library import plain

_log = logging.getLogger(__name__)
_KEPT = 256
_SOON_S = 0.1  # a grammar that takes longer is not compiled again between two tokens, while all requests wait


class Guided(NamedTuple):
    """Rows of logits, from `row` on, whose tokens must follow `grammar`: one behind the tokens `produced`, and one
    behind each of the `drafts`. `reasoning`: how the answer's reasoning, which the grammar does not cover, begins and
    ends. `id`: the request's id."""

    row: int
    id: str
    grammar: Grammar
    produced: Sequence[int]
    reasoning: Reasoning | None = None
    drafts: Sequence[int] = ()

    @property
    def n_rows(self) -> int:
        return 1 + len(self.drafts)


class Failure(NamedTuple):
    """A request that cannot go on, if its first `n_drafts` drafts are right."""

    n_drafts: int
    error: HydraError


class _MatcherState:
    """A matcher of `grammar` that has read `n_read` tokens of the answer, of which it was given `_n_given`."""

    __slots__ = ("_eos_ids", "_n_given", "grammar", "matcher", "n_read")

    def __init__(self, grammar: CompiledGrammar, eos_ids: Collection[int]) -> None:
        self.grammar = grammar
        self.matcher = grammar.matcher.deep_copy()
        self.n_read, self._n_given, self._eos_ids = 0, 0, eos_ids

    def read(self, token: int) -> bool:
        """Go on by a token. Returns False, and stays, if the grammar forbids it or has become too complex."""
        if token not in self._eos_ids:  # behind a draft that ends the answer, the matcher stays at the end
            if not self.matcher.try_consume_tokens([token]):
                return False
            self._n_given += 1
        self.n_read += 1
        return True

    def back_to(self, before: tuple[int, int]) -> None:
        """Go back to where `place` was `before`."""
        self.matcher.rollback(self._n_given - before[1])
        self.n_read, self._n_given = before

    @property
    def place(self) -> tuple[int, int]:
        return self.n_read, self._n_given


class Follower:
    """The positions of the requests seen last. For a request that comes back later, all tokens are read again. Threads
    take turns."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._places: dict[str, _MatcherState] = {}  # by request, the last used last
        self._n_kept = 0  # of them when there was last made room
        self._turn = Lock()

    def blocked(self, guided: Sequence[Guided], n_columns: int) -> tuple[np.ndarray, dict[str, Failure]]:
        """The tokens that may not come next, bool [rows, n_columns], and by id the requests that cannot go on. Rows
        behind a draft that is forbidden may have any token."""
        n_bytes = (n_columns + 7) // 8
        allowed = np.zeros((sum(one.n_rows for one in guided), n_bytes), dtype=np.uint8)
        failed: dict[str, Failure] = {}
        row = 0
        with self._turn:
            for one in guided:
                failure = self._allow(one, allowed[row : row + one.n_rows])
                if failure is not None:
                    failed[one.id] = failure
                row += one.n_rows
            if len(self._places) > self._n_kept:  # also those that only drafters have asked about
                self._make_room(len(guided))
            self._n_kept = len(self._places)
        return np.unpackbits(~allowed, axis=1, bitorder="little", count=n_columns).view(bool), failed

    def forced(self, seq: LiveSequence) -> Sequence[int]:
        """The tokens that the grammar of `seq` leaves no choice about, which come next."""
        return self._of(seq, lambda place: place.matcher.compute_ff_tokens())

    def allowed(self, seq: LiveSequence, guesses: Sequence[int]) -> Sequence[int]:
        """The first of these guesses, up to one that the grammar of `seq` forbids or that ends it. Within a reasoning,
        all."""
        more = list(takewhile(lambda token: token not in self._grammars.eos_ids, guesses))
        return self._of(seq, lambda place: more[: place.matcher.validate_tokens(more)], guesses)

    def _of(
        self, seq: LiveSequence, ask: Callable[[_MatcherState], Sequence[int]], thinking: Sequence[int] = ()
    ) -> Sequence[int]:
        """What `ask` says of a sequence's position; `thinking` while it reasons. An error, which `blocked` will report,
        says nothing."""
        sampling = seq.request.sampling
        assert sampling.grammar is not None, "a sequence without a grammar"
        guided = Guided(0, seq.id, sampling.grammar, seq.tokens[seq.n_prompt :], sampling.reasoning)
        begin = _answer_begins(guided.reasoning, guided.produced)
        if begin is None:
            return thinking
        with self._turn:
            try:
                place = self._advance(guided, begin)
                found = ask(place)
                if not place.matcher.is_error():
                    return found
            except HydraError:
                pass
            self._places.pop(seq.id, None)
            return ()

    def _allow(self, guided: Guided, allowed: np.ndarray) -> Failure | None:
        """Set the bits of the tokens that may come, [n_rows, bytes]. Returns why the request cannot go on, if so. A
        grammar's tables are shared and have limits, so others may have filled them: a failure of one request counts
        only with tables of its own."""
        failure, full = self._set(guided, allowed)
        if full is not None:
            self._grammars.forget(guided.grammar, full)
            if full.took_s < _SOON_S:
                allowed[:] = 0
                failure, full = self._set(guided, allowed)
                if full is not None:
                    self._grammars.forget(guided.grammar, full)
        if failure is not None and isinstance(failure.error, InternalError):
            _log.error("%s: token %d of the answer is not of its grammar", guided.id, len(guided.produced))
        return failure

    def _set(self, guided: Guided, allowed: np.ndarray) -> tuple[Failure | None, CompiledGrammar | None]:
        """As `_allow`, but with the tables as they are. Returns with a failure the grammar that has failed."""
        place, before = None, (0, 0)
        for n, bits in enumerate(allowed):
            produced = guided.produced
            if n:
                produced = [*produced, *guided.drafts[:n]]
            begin = _answer_begins(guided.reasoning, produced)
            if begin is None:
                bits[:] = self._thinking(len(bits))
                continue
            try:
                if place is None:
                    place = self._advance(guided._replace(produced=produced), begin)
                    if n == 0:
                        before = place.place
                elif not place.read(guided.drafts[n - 1]):
                    why = place.matcher.get_error()
                    if why or _has(allowed[n - 1], guided.drafts[n - 1]):
                        raise _too_complex(why)
                    allowed[n:] = 0xFF
                    break
                found = place.matcher.compute_bitmask()[: len(bits)]
                bits[: len(found)] = np.frombuffer(found, dtype=np.uint8)
                if place.matcher.is_error() or not found.strip(b"\0"):  # after an error, it has the token of the end
                    raise _too_complex(place.matcher.get_error())
                if guided.reasoning is not None and not produced:
                    opens = guided.reasoning.opens
                    bits[opens >> 3] |= 1 << (opens & 7)
            except HydraError as e:
                failed = self._places.pop(guided.id, None)
                allowed[n:] = 0xFF
                return Failure(n, e), None if failed is None else failed.grammar
        if place is not None and guided.drafts:
            place.back_to(before)
        return None, None

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
            place = _MatcherState(self._grammars.compiled(guided.grammar), self._grammars.eos_ids)
        self._places[guided.id] = place
        for token in guided.produced[begin + place.n_read :]:
            if not place.read(token):
                raise _too_complex(place.matcher.get_error())
        return place


def _answer_begins(reasoning: Reasoning | None, produced: Sequence[int]) -> int | None:
    """The number of produced tokens that belong to the reasoning, or None if it has not ended."""
    if reasoning is None or not (reasoning.begun or (produced and produced[0] == reasoning.opens)):
        return 0
    return produced.index(reasoning.closes) + 1 if reasoning.closes in produced else None


def _has(bits: np.ndarray, token: int) -> bool:
    return bool(bits[token >> 3] >> (token & 7) & 1)


def _too_complex(why: str) -> HydraError:
    if not why:
        return InternalError("the answer left its grammar; see the server's log")
    return InvalidRequest(
        f"the grammar became too complex within the answer: {plain(why)[:200]}", code="invalid_grammar"
    )
