"""Tool calls in formats other than JSON objects. Each block is parsed once it is complete.

TEXT ──trigger──> BLOCK ──its end──> calls, or text if it has none ──> TEXT
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import orjson

from hydrainfer.processor.text.piece import CallDelta
from hydrainfer.processor.text.tool_calls import ToolCallStream, dumped
from hydrainfer.processor.text.tool_format import ToolFormat

Call = tuple[str, dict[str, Any]]
Schemas = Mapping[str, Mapping[str, Any]]
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>\s*)?\Z", re.DOTALL)
_PARAMETER, _PARAMETER_END = re.compile(r"<parameter=([^>\n]{1,256})>\n?"), "</parameter>"
_GEMMA = re.compile(r"\s*call:([\w.:-]+)(\{.*\})\s*\Z", re.DOTALL)
_BARE_KEY = re.compile(r"([{,]\s*)([\w.-]+)\s*:")
_ARGS = "[ARGS]"
_NAMES = {"true": True, "false": False, "null": None}


class BlockCallStream(ToolCallStream):
    """A `ToolCallStream` for the formats of `READERS`. `schemas`: by name, the schema of each function that may be
    called."""

    def __init__(self, how: ToolFormat, schemas: Schemas, *, parallel: bool = True) -> None:
        super().__init__(how, schemas, parallel=parallel)
        self._schemas = schemas
        self._read = READERS[how.name]
        self._balance = _Balance()

    def _read_call(self) -> bool:
        end = self._block_end()
        if end is None:
            return False
        block, self._held = self._held[:end], self._held[end:]
        self._balance, self._in_calls = _Balance(), False
        raw, self._raw = self._raw + block, ""
        calls = self._calls(block.removesuffix(self._how.closing))
        for name, arguments in calls:
            self._send(CallDelta(self._next(), arguments, self._new_id(), name))
        if not calls:
            self._say(raw)
        return True

    def _calls(self, block: str) -> list[tuple[str, str]]:
        """The calls of known functions in a block, with their arguments as JSON."""
        calls = self._read(block, self._schemas) or []
        try:
            return [(name, dumped(arguments)) for name, arguments in calls if name in self._names]
        except (ValueError, RecursionError):
            return []

    def _block_end(self) -> int | None:
        """The end of the block that `_held` begins with; None if it has not arrived."""
        if self._how.closing and self._raw:
            at = self._held.find(self._how.closing)
            return None if at < 0 else at + len(self._how.closing)
        return self._balance.end(self._held)

    def _finish(self, cut: bool) -> None:
        if self._in_calls:
            self._held, self._in_calls = self._raw + self._held, False
        super()._finish(cut)


class _Balance:
    """The search for the end of the first bracket in a growing text. Brackets within quotes do not count."""

    def __init__(self) -> None:
        self._at = self._depth = 0
        self._quote = ""
        self._escaped = False

    def end(self, text: str) -> int | None:
        """The position after the closing bracket; None if it has not arrived. `text` must begin with the text of the
        previous call."""
        for i in range(self._at, len(text)):
            c = text[i]
            if self._quote:
                self._quote = "" if c == self._quote and not self._escaped else self._quote
                self._escaped = c == "\\" and not self._escaped
            elif c in "\"'" and self._depth:
                self._quote = c
            elif c in "[{(":
                if not self._depth and _ARGS.startswith(text[i : i + len(_ARGS)]):
                    if len(text) - i < len(_ARGS):
                        self._at = i
                        return None  # may become Mistral's [ARGS]
                    continue
                self._depth += 1
            elif c in "]})" and self._depth:
                self._depth -= 1
                if not self._depth:
                    return i + 1
        self._at = len(text)
        return None


def _qwen(block: str, schemas: Schemas) -> list[Call] | None:
    """The call in `<function=NAME> <parameter=KEY> VALUE </parameter> …`. A value is JSON, or text if its schema says
    so."""
    found = _FUNCTION.match(block)
    if found is None:
        return None
    name, properties = found[1].strip(), schemas.get(found[1].strip(), {}).get("properties")
    typed = properties if isinstance(properties, Mapping) else {}
    return [(name, {key: _value(text, typed.get(key)) for key, text in _parameters(found[2])})]


def _parameters(text: str) -> Iterator[tuple[str, str]]:
    """The keys and values. Takes time in proportion to the text, even if a model repeats heads without ends."""
    at = 0
    while (head := _PARAMETER.search(text, at)) and (end := text.find(_PARAMETER_END, head.end())) >= 0:
        yield head[1].strip(), text[head.end() : end].removesuffix("\n")
        at = end + len(_PARAMETER_END)


def _value(text: str, schema: Any) -> Any:
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return text
    try:
        return orjson.loads(text)
    except ValueError:
        return text


def _mistral(block: str, schemas: Schemas) -> list[Call] | None:  # noqa: ARG001
    """The call in `NAME[ARGS]{…}`."""
    name, _, arguments = block.partition(_ARGS)
    return _one(name.strip(), arguments)


def _gemma(block: str, schemas: Schemas) -> list[Call] | None:  # noqa: ARG001
    """The call in `call:NAME{key:<escape>text<escape>,other:3}`."""
    found = _GEMMA.match(block)
    if found is None:
        return None
    parts = found[2].split("<escape>")
    texts = [json.dumps(p) if i % 2 else _BARE_KEY.sub(r'\1"\2":', p) for i, p in enumerate(parts)]
    return _one(found[1], "".join(texts))


def _one(name: str, arguments: str) -> list[Call] | None:
    try:
        value = orjson.loads(arguments)
    except ValueError:
        return None
    return [(name, value)] if isinstance(value, dict) else None


def _python(block: str, schemas: Schemas) -> list[Call] | None:  # noqa: ARG001
    """The calls in `[f(x="text"), g(y=[1, True])]`, or in a single call without brackets."""
    try:
        tree = ast.parse(block.strip(), mode="eval").body
        calls = tree.elts if isinstance(tree, ast.List) else [tree]
        return [(ast.unparse(c.func), {str(k.arg): _literal(k.value) for k in c.keywords}) for c in map(_call, calls)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _call(node: ast.expr) -> ast.Call:
    if not isinstance(node, ast.Call) or node.args or any(k.arg is None for k in node.keywords):
        raise ValueError("no call by names")
    return node


def _literal(node: ast.expr) -> Any:
    """The value of a Python literal, in which JSON's `true`, `false` and `null` are allowed too."""
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(e) for e in node.elts]
    if isinstance(node, ast.Dict):
        return {str(_literal(k)): _literal(v) for k, v in zip(node.keys, node.values, strict=True) if k is not None}
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError("no JSON")
    return value


READERS: Mapping[str, Callable[[str, Schemas], list[Call] | None]] = {
    "qwen3_coder": _qwen,
    "mistral_args": _mistral,
    "functiongemma": _gemma,
    "pythonic": _python,
}
"""By format name, the function that returns the calls of one block, None if it has none."""


def call_stream(
    how: ToolFormat, schemas: Schemas, *, forced: bool = False, required: bool = False, parallel: bool = True
) -> ToolCallStream:
    """The reader of one choice's calls. `forced`: the answer was constrained by a grammar; `required`: to calls."""
    if how.name in READERS and not forced:
        return BlockCallStream(how, schemas, parallel=parallel)
    return ToolCallStream(how.held, schemas, forced=forced, required=required, parallel=parallel)
