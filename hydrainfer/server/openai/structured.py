"""Structured output: OpenAI's and vLLM's fields that constrain an answer, turned into one `Grammar`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from hydrainfer.core import Grammar, InvalidRequest

_ANY_OBJECT = Grammar("json", '{"type":"object"}')
_KINDS: Mapping[str, str] = {"json": "json", "regex": "regex", "choice": "choice", "grammar": "lark"}
"""vLLM's names (`guided_NAME`, a key of `structured_outputs`) → `Grammar.kind`."""
FORMS = (*_KINDS, "json_object")
"""The names in `structured_outputs` of which a request has one."""
HARMLESS = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties")


def grammar_of(
    response_format: Mapping[str, Any] | None, structured_outputs: Mapping[str, Any] | None, guided: Mapping[str, Any]
) -> Grammar | None:
    """The grammar that these fields ask for, or None. `guided`: the `guided_*` fields, by the rest of their names; None
    if not sent. Raises `InvalidRequest` naming the field, also if there are several."""
    found: dict[str, Grammar] = {}
    if response_format is not None:
        formatted = _of_format(response_format)
        if formatted is not None:
            found["response_format"] = formatted
    if structured_outputs is not None:
        found |= _of_outputs(structured_outputs)
    for name, value in guided.items():
        if value is not None:
            found[f"guided_{name}"] = _grammar(_KINDS[name], value, f"guided_{name}")
    if len(found) > 1:
        raise InvalidRequest(f"an answer has one form; send one of {', '.join(found)}", param=list(found)[1])
    return next(iter(found.values()), None)


def json_grammar(schema: object, where: str) -> Grammar:
    """The grammar of a JSON schema. Raises `InvalidRequest` naming `where`."""
    if not isinstance(schema, Mapping | bool):
        raise InvalidRequest(f"{where} must be a JSON schema", param=where)
    try:
        text = orjson.dumps(schema).decode()
    except orjson.JSONEncodeError:
        raise InvalidRequest(f"{where} is nested too deeply", param=where) from None
    return _made("json", text, where)


def _of_outputs(outputs: Mapping[str, Any]) -> dict[str, Grammar]:
    """The grammars of `structured_outputs`, by field. `json_object: false` is none, but says so."""
    found: dict[str, Grammar] = {}
    for name, value in outputs.items():
        where = f"structured_outputs.{name}"
        if name == "json_object" and value:
            found[where] = _ANY_OBJECT
        elif name in _KINDS and value is not None:
            found[where] = _grammar(_KINDS[name], value, where)
        elif value and name not in (*HARMLESS, *FORMS):
            raise InvalidRequest(f"{where} is not supported by this server", param=where, code="unsupported_parameter")
    if all(outputs.get(name) is None for name in FORMS):
        message = f"structured_outputs has no form; send one of {', '.join(FORMS)}"
        raise InvalidRequest(message, param="structured_outputs")
    return found


def _of_format(response_format: Mapping[str, Any]) -> Grammar | None:
    kind = response_format.get("type")
    if kind is None:
        message = "response_format.type is missing; it must be text, json_object or json_schema"
        raise InvalidRequest(message, param="response_format.type")
    if kind in ("text", "json_object") and response_format.get("json_schema") is not None:
        raise InvalidRequest(
            "response_format.json_schema is for the type json_schema", param="response_format.json_schema"
        )
    if kind == "text":
        return None
    if kind == "json_object":
        schema = response_format.get("schema")  # a form of llama.cpp
        return _ANY_OBJECT if schema is None else json_grammar(schema, "response_format")
    if kind != "json_schema":
        raise InvalidRequest(
            "response_format.type must be text, json_object or json_schema",
            param="response_format",
            code="unsupported_parameter",
        )
    named = response_format.get("json_schema")
    schema = named.get("schema") if isinstance(named, Mapping) else None
    if schema is None:
        raise InvalidRequest(
            "response_format.json_schema must be an object with name and schema", param="response_format"
        )
    return json_grammar(schema, "response_format")


def _grammar(kind: str, value: object, where: str) -> Grammar:
    if kind == "json":
        try:
            return json_grammar(orjson.loads(value) if isinstance(value, str) else value, where)
        except orjson.JSONDecodeError:
            raise InvalidRequest(f"{where} must be a JSON schema", param=where) from None
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(v, str) and v for v in value):
            raise InvalidRequest(f"{where} must be a list of texts, none empty", param=where)
        return _made(kind, orjson.dumps(value).decode(), where)
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{where} must be a text, not empty", param=where)
    return _made(kind, value, where)


def _made(kind: Any, text: str, where: str) -> Grammar:
    try:
        return Grammar(kind, text)
    except InvalidRequest as e:
        raise InvalidRequest(e.message.replace("grammar", where, 1), param=where) from None
