"""Grammars and tokenizers handed to llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from hydrainfer.core import Grammar
from hydrainfer.grammar.bounds import LIBRARY_LIMITS, MAX_GBNF_CHARS
from hydrainfer.grammar.choice import choice_rules
from hydrainfer.grammar.schema import JSON_STYLE, without_unknown_formats

_NO_TEXT = "NoExtensionBias"
_NOT_FOR_CLIENTS = re.compile(r"<non-verbose/>|; consider making your grammar left-recursive[^\n]*")


def load_tokenizer(path: Path, n_vocab: int, eos_ids: Sequence[int]) -> Any:
    """The `LLTokenizer` of a checkpoint, from its tokenizer.json; takes 2 s and 100 MB for 150,000 tokens. Raises what
    reading or the library raises."""
    from llguidance import LLTokenizer

    if not eos_ids:
        raise ValueError("the model has no token that ends an answer")
    text = (path / "tokenizer.json").read_text("utf-8")
    if any(token.id >= n_vocab for token in _added(text).added_tokens or ()):
        text = _without_tokens_from(text, n_vocab)
    return LLTokenizer(text, n_vocab=n_vocab, eos_token=list(eos_ids))


def compiled(tokenizer: Any, grammar: Grammar) -> Any:
    """The `LLMatcher` of a grammar at its start. Raises `ValueError` with a message for the client."""
    from llguidance import LLMatcher, LLParserLimits

    try:
        limits = LLParserLimits(**LIBRARY_LIMITS)
        matcher = LLMatcher(tokenizer, _source(grammar), log_level=0, limits=limits)
        error = matcher.get_error()
        for _ in range(2):  # all copies share their tables, which the first may already have filled
            copy = matcher.deep_copy()
            copy.compute_bitmask()
            error = error or copy.get_error()
    except Exception as e:
        raise ValueError(_complaint(str(e))) from None
    if error:
        raise ValueError(_complaint(error))
    return matcher


def _source(grammar: Grammar) -> str:
    from llguidance import LLMatcher, grammar_from

    text = grammar.text
    if grammar.kind == "json":
        if '"format"' in text:
            text = json.dumps(without_unknown_formats(json.loads(text)))
        return LLMatcher.grammar_from_json_schema(text, overrides=JSON_STYLE)
    if grammar.kind == "lark" and "::=" in text:  # GBNF, llama.cpp's format, which users of vLLM send
        if len(text) > MAX_GBNF_CHARS:
            raise ValueError(f"a GBNF grammar takes at most {MAX_GBNF_CHARS} characters; write it in Lark")
        return grammar_from("gbnf", text)
    if grammar.kind == "choice":
        return LLMatcher.grammar_from_lark("\n".join(choice_rules("start", text)))
    return grammar_from(grammar.kind, text)


def plain(message: str) -> str:
    """The library's error message on one line, without its marks and its advice on how to write a grammar: most
    grammars are made here, not by the client."""
    return " ".join(_NOT_FOR_CLIENTS.sub("", message).split())


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
    text = text.replace(_NO_TEXT, "no text matches it")
    return f"the grammar or schema cannot be used: {plain(text)[:300]}"
