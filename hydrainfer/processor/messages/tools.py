"""The functions that an answer may call, as a client lists them, and the calls in earlier messages of a chat."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from hydrainfer.core import InvalidRequest

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_.:-]{1,128}")
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class ToolCall(msgspec.Struct, frozen=True):
    """A call in an earlier message of the chat."""

    id: str
    name: str
    arguments: dict[str, Any]


class Tools(msgspec.Struct, frozen=True):
    """The functions that an answer may call. `given`: the client's list as it was sent, for the chat template.
    `schemas`: by function, the JSON schema of its arguments, for those that may be called. `required`: the answer must
    consist of calls only. `parallel`: it may have more than one."""

    given: tuple[dict[str, Any], ...]
    schemas: dict[str, Mapping[str, Any]]
    required: bool = False
    parallel: bool = True


def parse_tools(tools: object, choice: object = None, parallel: bool | None = None) -> Tools | None:
    """Parse OpenAI's `tools`, `tool_choice` and `parallel_tool_calls`. Returns None if no function may be called.
    Raises `InvalidRequest` naming the field."""
    if tools is None or tools == []:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice needs tools", param="tool_choice")
        return None
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise InvalidRequest("tools must be a list of tools", param="tools")
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools takes at most {MAX_TOOLS} entries, not {len(tools)}", param="tools")
    schemas = dict(_parse_tool(tool, f"tools.{i}") for i, tool in enumerate(tools))
    if choice == "none":
        return None
    if isinstance(choice, Mapping):
        name = _name(choice, "tool_choice")
        if name not in schemas:
            raise InvalidRequest("tool_choice names a function that is not among tools", param="tool_choice")
        schemas = {name: schemas[name]}
    elif choice not in (None, "auto", "required"):
        raise InvalidRequest("tool_choice must be none, auto, required or a function", param="tool_choice")
    named = isinstance(choice, Mapping)
    return Tools(tuple(tools), schemas, named or choice == "required", parallel is not False and not named)


def parse_calls(calls: object, where: str) -> tuple[ToolCall, ...]:
    """Parse the `tool_calls` of an assistant's message. Raises `InvalidRequest`."""
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        raise InvalidRequest(f"{where} must be a list of calls", param=where)
    return tuple(_parse_call(call, f"{where}.{i}") for i, call in enumerate(calls))


def _parse_call(call: object, where: str) -> ToolCall:
    if not isinstance(call, Mapping):
        raise InvalidRequest(f"{where} must be an object with id, type and function", param=where)
    if not isinstance(call.get("id"), str):
        raise InvalidRequest(f"{where}.id must be a string", param=f"{where}.id")
    name = _name(call, where)
    arguments = call["function"].get("arguments", "{}")
    if isinstance(arguments, str):
        arguments = read_arguments(arguments)
    if not isinstance(arguments, dict):
        raise InvalidRequest(
            f"{where}.function.arguments must be a JSON object or its text", param=f"{where}.function.arguments"
        )
    return ToolCall(call["id"], name, arguments)


def read_arguments(text: str, read: Callable[[str], Any] = json.loads) -> dict[str, Any]:
    """The arguments of a call as an object. Text that is not a JSON object, which a model may write, is wrapped as
    Anthropic's documentation proposes. `read`: the JSON reader; that of `json` accepts half surrogate pairs, which
    orjson cannot write."""
    try:
        value = read(text or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": text}


def _parse_tool(tool: object, where: str) -> tuple[str, Mapping[str, Any]]:
    name = _name(tool, where)
    assert isinstance(tool, Mapping)
    parameters = tool["function"].get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        where = f"{where}.function.parameters"
        raise InvalidRequest(f"{where} must be a JSON schema", param=where)
    return name, parameters or _NO_PARAMETERS


def _name(entry: object, where: str) -> str:
    """The function's name in `entry`, a tool, a call or a choice. Raises `InvalidRequest`."""
    if not isinstance(entry, Mapping) or entry.get("type", "function") != "function":
        raise InvalidRequest(f"{where}.type must be function", param=f"{where}.type")
    function = entry.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if name is None:
        hint = f"; send it in {where}.function, not beside it" if "name" in entry else ""
        raise InvalidRequest(f"{where}.function.name is missing{hint}", param=f"{where}.function.name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        where = f"{where}.function.name"
        raise InvalidRequest(f"{where} must be 1 to 128 letters, digits, or any of _ . : -", param=where)
    return name
