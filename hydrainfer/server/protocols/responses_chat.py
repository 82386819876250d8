"""OpenAI's Responses: request bodies to chats. Nothing is stored: every request has the whole conversation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from hydrainfer.core import InvalidRequest
from hydrainfer.server.protocols.places import placed
from hydrainfer.server.protocols.reading import (
    add_result,
    entries,
    extensions,
    image_part,
    mapping,
    role_of,
    string,
    text_part,
    unsupported,
    written,
)
from hydrainfer.server.protocols.responses_turn import ECHOED

_INCLUDED = ("reasoning.encrypted_content",)  # accepted, but never included: no answer has any
_PENALTIES = ("presence_penalty", "frequency_penalty")
_ROLES = ("user", "assistant", "system", "developer")
_TEXT_OR_PARTS = "a string or a list of parts"
NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "tools.*.function": "tools.*",
    "tool_choice.function": "tool_choice",
    "image_url": "input_image",
}
"""The fields that have other names here, by those of a chat. What is in messages is `placed`."""
_SAME = ("model", "stream", "temperature", "top_p", "top_k", "parallel_tool_calls", "stop", *_PENALTIES)


def chat_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the chat that a body asks for. Raises `InvalidRequest`."""
    for name in ECHOED:
        written(body.get(name), name)
    if body.get("truncation") not in (None, "disabled"):
        raise unsupported("truncation", "truncation", "shorten the input")
    included = body.get("include") or []
    if not isinstance(included, list) or any(what not in _INCLUDED for what in included):
        raise unsupported("include", "include", "leave it out")
    text = mapping(body.get("text") or {}, "text")
    if text.get("verbosity") not in (None, "medium"):
        raise unsupported("text.verbosity", "text.verbosity", "say in the prompt how long an answer should be")
    instructions = body.get("instructions")
    first = []
    if instructions:
        message = {"role": "system", "content": string(instructions, "instructions")}
        first.append(placed(message, "instructions", content="instructions"))
    chat: dict[str, Any] = {
        "messages": [*first, *_messages(body.get("input"))],
        "max_tokens": body.get("max_output_tokens"),
        "tools": _tools(body.get("tools")),
        "tool_choice": _tool_choice(body.get("tool_choice")),
        "response_format": _format(text.get("format")),
        **{name: body.get(name) for name in _SAME},
        **extensions(body),
        "reasoning_effort": mapping(body.get("reasoning") or {}, "reasoning").get("effort"),
    }
    return {name: value for name, value in chat.items() if value is not None}


def _messages(given: object) -> list[dict[str, Any]]:
    if isinstance(given, str):
        return [placed({"role": "user", "content": given}, "input", content="input")]
    if not isinstance(given, list) or not given:
        raise InvalidRequest("input must be a text or a list of items, not empty", param="input")
    messages: list[dict[str, Any]] = []
    thoughts: list[str] = []  # thoughts that belong to the assistant's next message
    for i, item in enumerate(entries(given, "input")):
        where, kind = f"input.{i}", item.get("type", "message")
        if kind == "message":
            _say(_message(item, where), messages)
        elif kind == "function_call":
            _call(item, where, messages)
        elif kind == "function_call_output":
            _output(item, where, messages)
        elif kind == "reasoning":
            thoughts.append(_thought(item, where))
            continue
        else:
            raise unsupported(f"{where}: an item of this type", f"{where}.type", "send messages and function calls")
        if any(thoughts) and messages[-1]["role"] == "assistant":
            before = messages[-1].get("reasoning_content")  # present if a call was added to that message
            messages[-1]["reasoning_content"] = "\n".join(filter(None, [before, *thoughts]))
        thoughts.clear()
        messages[-2:] = [placed(message, where) for message in messages[-2:]]
    return messages


def _thought(item: Mapping[str, Any], where: str) -> str:
    """The text of a reasoning item, in the format in which this server writes it."""
    parts = entries(item.get("content") or [], f"{where}.content")
    return "".join(string(part.get("text"), f"{where}.content.{i}.text") for i, part in enumerate(parts))


def _message(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    role, content = role_of(item, where, _ROLES), item.get("content")
    if isinstance(content, str):
        return {"role": role, "content": content}
    return {"role": role, "content": _parts(content, f"{where}.content")}


def _parts(content: object, where: str) -> list[dict[str, Any]]:
    return [_part(part, f"{where}.{i}") for i, part in enumerate(entries(content, where, _TEXT_OR_PARTS))]


def _part(part: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind = part.get("type")
    if kind in ("input_text", "output_text", "text"):
        return text_part(part.get("text"), f"{where}.text")
    if kind == "refusal":
        return text_part(part.get("refusal"), f"{where}.refusal")
    if kind == "input_image":
        if part.get("file_id"):
            raise unsupported(f"{where}.file_id", f"{where}.file_id", "send image_url")
        where = f"{where}.image_url"
        return image_part(string(part.get("image_url"), where), where)
    raise unsupported(f"{where}: a part of this type", f"{where}.type", "send input_text or input_image")


def _say(message: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    """Add a message. If the message before it is the assistant's and has calls, an assistant's text is added to that
    one, since tool results must follow it directly."""
    before = messages[-1] if messages else {}
    if message["role"] == "assistant" == before.get("role") and before.get("tool_calls"):
        both = [before["content"] or [], message["content"]]
        before["content"] = [part for c in both for part in ([text_part(c, "")] if isinstance(c, str) else c)]
    else:
        messages.append(message)


def _call(item: Mapping[str, Any], where: str, messages: list[dict[str, Any]]) -> None:
    """Add a call to the last message, if that is the assistant's, or else as a new message."""
    function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
    call = {"id": item.get("call_id"), "type": "function", "function": function}
    call = placed(call, where, id=f"{where}.call_id", function=where)
    if messages and messages[-1]["role"] == "assistant":
        messages[-1].setdefault("tool_calls", []).append(call)
    else:
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})


def _output(item: Mapping[str, Any], where: str, messages: list[dict[str, Any]]) -> None:
    """Add a function's result."""
    output, pictures, inside = item.get("output"), [], f"{where}.output"
    if not isinstance(output, str):
        parts = _parts(output, inside)
        pictures = [part for part in parts if part["type"] != "text"]
        output = "\n".join(part["text"] for part in parts if part["type"] == "text")
    result = {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
    add_result(messages, placed(result, where, tool_call_id=f"{where}.call_id", content=inside), pictures)


def _tools(tools: object) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    found = []
    for i, tool in enumerate(entries(tools, "tools")):
        if tool.get("type") != "function":
            raise unsupported(f"tools.{i}.type", f"tools.{i}.type", "only functions can be called")
        keys = ("name", "description", "parameters", "strict")
        found.append({"type": "function", "function": {k: tool[k] for k in keys if tool.get(k) is not None}})
    return found


def _tool_choice(choice: object) -> object:
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _format(given: object) -> dict[str, Any] | None:
    if given is None:
        return None
    given = mapping(given, "text.format")
    if given.get("type") != "json_schema":
        return dict(given)
    schema = given.get("schema")
    if not isinstance(schema, Mapping):
        raise InvalidRequest("text.format.schema must be a JSON schema", param="text.format.schema")
    try:
        orjson.dumps(schema)
    except orjson.JSONEncodeError:
        raise InvalidRequest("text.format.schema is nested too deeply", param="text.format.schema") from None
    return {"type": "json_schema", "json_schema": {"name": given.get("name"), "schema": schema}}
