"""Parts of grammars in the Lark syntax of llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from hydrainfer.core import Grammar, InvalidRequest
from hydrainfer.grammar import JSON_STYLE, choice_rules, without_unknown_formats

_TOLD = re.compile(r"\\.|/|\n", re.DOTALL)  # in a regular expression: escapes, and what Lark writes differently
_WRITTEN = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}


def literal(text: str) -> str:
    """A string literal; empty for an empty string."""
    return json.dumps(text) if text else ""


def json_of(schema: object) -> str:
    """The rule for JSON that follows a schema, in the JSON style of this engine. The schema stays the root for its own
    references. Raises `InvalidRequest`."""
    if isinstance(schema, Mapping):
        schema = {**schema, "x-guidance": JSON_STYLE}
    try:
        return f"%json {json.dumps(without_unknown_formats(schema))}"
    except (ValueError, RecursionError):
        raise InvalidRequest("a schema is nested too deeply", param="tools") from None


def rules_of(name: str, grammar: Grammar) -> list[str]:
    """The rules of a grammar of any kind. The first rule is called `name`. Raises `InvalidRequest`."""
    text = grammar.text
    if grammar.kind == "json":
        return [f"{name}: {json_of(json.loads(text))}"]
    if grammar.kind == "choice":
        return choice_rules(name, text)
    if grammar.kind == "regex":
        pattern = _TOLD.sub(lambda found: _WRITTEN.get(found[0], found[0]), text)
        return [f"{name}: {name.upper()}", f"{name.upper()}: /{pattern}/"]
    if "::=" in text:
        raise InvalidRequest("with this model a grammar is written in Lark, not in GBNF", code="invalid_grammar")
    return [f"{name}: %lark {{\n{text}\n}}"]
