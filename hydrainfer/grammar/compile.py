"""Grammars compiled by llguidance, within limits of size and work, and cached for requests with the same grammar."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from hydrainfer.core import Grammar, InvalidRequest
from hydrainfer.grammar.schema import JSON_STYLE, without_unknown_formats

logger = logging.getLogger(__name__)

_KEPT = 64
_LIMITS: dict[str, Any] = {
    "max_items_in_row": 1000,
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 10_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
"""Much lower limits than the library's defaults. With them and `MAX_GRAMMAR_CHARS`, the worst grammars we know take
well under a second to compile, and to compute the next tokens (tests/grammar/test_hostile.py)."""
_MAX_GBNF_CHARS = 8192  # GBNF is translated in Python, which is slow


class Grammars:
    """The compiler and cache of grammars for one tokenizer. Thread-safe. The library releases the GIL to compile."""

    def __init__(self, tokenizer: Any, eos_ids: Sequence[int]) -> None:
        """`tokenizer`: an `llguidance.LLTokenizer`. `eos_ids` end an answer."""
        import llguidance

        self.n_vocab: int = tokenizer.vocab_size
        self.eos_ids = frozenset(eos_ids)
        self._tokenizer = tokenizer
        self._limits = llguidance.LLParserLimits(**_LIMITS)
        self._lock = threading.Lock()
        self._kept: dict[Grammar, Future[Any]] = {}  # a matcher or an error message; the last used last
        self._worker = ThreadPoolExecutor(1, "hydra-grammar")

    def compiled(self, grammar: Grammar) -> Any:
        """The `LLMatcher` at its start. It is shared, so copy it before use. Raises `InvalidRequest` if the grammar
        cannot be compiled."""
        future, mine = self._entry(grammar)
        if mine:
            self._compile(grammar, future)
        found = future.result()
        if isinstance(found, str):
            raise InvalidRequest(found, code="invalid_grammar")
        return found

    def expect(self, grammar: Grammar) -> None:
        """Begin to compile a grammar in the background, and return at once."""
        future, mine = self._entry(grammar)
        if mine:
            self._worker.submit(self._compile, grammar, future)

    def close(self) -> None:
        self._worker.shutdown(cancel_futures=True)

    def _entry(self, grammar: Grammar) -> tuple[Future[Any], bool]:
        """The future of a grammar, and whether the caller must set its result."""
        with self._lock:
            found = self._kept.pop(grammar, None)
            future = self._kept[grammar] = found or Future()
            if len(self._kept) > _KEPT:
                del self._kept[next(iter(self._kept))]
            return future, found is None

    def _compile(self, grammar: Grammar, future: Future[Any]) -> None:
        try:
            matcher = self._matcher(grammar)
            first = matcher.deep_copy()
            first.compute_bitmask()  # the tables that this builds are shared by all copies
            error = matcher.get_error() or first.get_error()
            future.set_result(_complaint(error) if error else matcher)
        except Exception as e:
            future.set_result(_complaint(str(e)))

    def _matcher(self, grammar: Grammar) -> Any:
        from llguidance import LLMatcher, grammar_from

        if grammar.kind == "json":
            text = grammar.text
            if '"format"' in text:
                text = json.dumps(without_unknown_formats(json.loads(text)))
            source = LLMatcher.grammar_from_json_schema(text, overrides=JSON_STYLE)
        elif grammar.kind == "lark" and "::=" in grammar.text:  # GBNF, llama.cpp's format, which users of vLLM send
            if len(grammar.text) > _MAX_GBNF_CHARS:
                raise ValueError(f"a GBNF grammar takes at most {_MAX_GBNF_CHARS} characters; write it in Lark")
            source = grammar_from("gbnf", grammar.text)
        else:
            source = grammar_from(grammar.kind, grammar.text)
        return LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)


def load_grammars(path: Path, n_vocab: int, eos_ids: Sequence[int]) -> Grammars | None:
    """The `Grammars` of a checkpoint, from its tokenizer.json; takes 2 s and 100 MB for 150,000 tokens. `n_vocab`:
    columns of the logits. Returns None, and logs why, if that fails: then no request may have a grammar."""
    try:
        from llguidance import LLTokenizer

        if not eos_ids:
            raise ValueError("the model has no token that ends an answer")
        text = (path / "tokenizer.json").read_text("utf-8")
        if any(token.id >= n_vocab for token in _added(text).added_tokens or ()):
            text = _without_tokens_from(text, n_vocab)
        return Grammars(LLTokenizer(text, n_vocab=n_vocab, eos_token=list(eos_ids)), eos_ids)
    except Exception as e:
        logger.warning("structured output is not available: %s", str(e)[:300])
        return None


class _AddedToken(msgspec.Struct):
    id: int


class _Tokenizer(msgspec.Struct):
    """The part of a tokenizer.json that is looked at. The rest of its many megabytes is skipped."""

    added_tokens: list[_AddedToken] | None = None


_added = msgspec.json.Decoder(_Tokenizer).decode


def _without_tokens_from(text: str, n_vocab: int) -> str:
    """A tokenizer.json without the added tokens that the model lacks, which some published ones have."""
    whole = json.loads(text)
    known = [token for token in whole["added_tokens"] if token["id"] < n_vocab]
    return json.dumps(whole | {"added_tokens": known})


def _complaint(text: str) -> str:
    """The error message for the client, with the library's message shortened. Of a schema inside a grammar (that of
    tools, which is made here) the library also lists the lines of the grammar, which say nothing about the schema."""
    if inside := re.search(r"failed to compile JSON schema: (.*?)\s*(?:\n\s*\d+ \||\Z)", text, re.DOTALL):
        text = inside[1]
    return f"the grammar or schema cannot be used: {' '.join(text.split())[:300]}"
