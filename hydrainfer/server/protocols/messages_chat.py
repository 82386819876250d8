"""Anthropic's Messages: request bodies to chats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hydrainfer.core import InvalidRequest
from hydrainfer.server.protocols.messages_fields import EFFORTS
from hydrainfer.server.protocols.places import placed
from hydrainfer.server.protocols.reading import (
    base64_part,
    entries,
    extensions,
    image_part,
    mapping,
    role_of,
    string,
    text_part,
    thinking_of,
    unsupported,
    written,
)

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_ROLES = ("user", "assistant", "system")
_TEXT_OR_BLOCKS = "a string or a list of blocks"

NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "tools.*.function": "tools.*",
    "tools.*.function.parameters": "tools.*.input_schema",
    "tool_choice.function": "tool_choice",
    "image_url": "image blocks",
}
"""The fields that have other names here, by those of a chat. What is in messages is `placed`."""


def chat_of(body: Mapping[str, Any], *, counting: bool = False) -> dict[str, Any]:
    """The fields of the chat that a body asks for. `counting`: the body only asks for the length of its prompt. Raises
    `InvalidRequest`."""
    if body.get("max_tokens") is None and not counting:
        raise InvalidRequest("max_tokens: is required", param="max_tokens")
    system = [{"role": "system", "content": _system(body["system"])}] if body.get("system") else []
    turns = entries(body.get("messages"), "messages")
    if turns and turns[-1].get("role") == "assistant":
        raise unsupported("going on with an assistant's message", "messages", "the last message must be the user's")
    chat: dict[str, Any] = {
        "messages": [
            *(placed(message, "system", content="system") for message in system),
            *(placed(m, f"messages.{i}") for i, turn in enumerate(turns) for m in _turn(turn, f"messages.{i}")),
        ],
        "max_tokens": body.get("max_tokens"),
        "stop": body.get("stop_sequences"),
        "tools": _tools(body.get("tools")),
        **{name: body.get(name) for name in ("model", "stream", "temperature", "top_p", "top_k")},
        **_tool_choice(body.get("tool_choice")),
        **extensions(body),
    }
    output = mapping(body.get("output_config") or {}, "output_config")
    effort = output.get("effort")
    if effort not in (None, *EFFORTS):
        raise InvalidRequest(f"output_config.effort must be one of {', '.join(EFFORTS)}", param="output_config.effort")
    chat |= thinking_of(body, effort if effort and thinks(body) else thinks(body))
    for form, where in ((output.get("format"), "output_config.format"), (body.get("output_format"), "output_format")):
        if form is not None:
            chat["response_format"] = _format(mapping(form, where), where)
            break
    return {name: value for name, value in chat.items() if value is not None}


def _format(form: Mapping[str, Any], where: str) -> dict[str, Any]:
    if form.get("type") != "json_schema":
        raise InvalidRequest(f"{where}.type must be json_schema", param=f"{where}.type")
    schema = mapping(form.get("schema"), f"{where}.schema")
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def thinks(body: Mapping[str, Any]) -> bool | None:
    """Whether the model is asked to think and to show its thoughts; None if the body does not say. Raises
    `InvalidRequest`."""
    kind = mapping(body.get("thinking") or {}, "thinking").get("type")
    if kind not in (None, "enabled", "adaptive", "disabled"):
        raise InvalidRequest("thinking.type must be enabled, adaptive or disabled", param="thinking.type")
    return None if kind is None else kind != "disabled"


def _system(system: object) -> str:
    if isinstance(system, str):
        return system
    parts = entries(system, "system", _TEXT_OR_BLOCKS)
    return "\n\n".join(string(part.get("text"), f"system.{i}.text") for i, part in enumerate(parts))


def _turn(turn: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """The chat messages of one turn. Tool results come first, as messages of their own. Their pictures go into the
    user's message, since only user messages may have pictures."""
    role, content = role_of(turn, where, _ROLES), turn.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    where = f"{where}.content"
    blocks = entries(content, where, _TEXT_OR_BLOCKS)
    if role == "assistant":
        return [_assistant(blocks, where)]
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        if block.get("type") == "tool_result":
            result, pictures = _result(block, f"{where}.{i}")
            results.append(result)
            parts += pictures
        else:
            parts.append(_part(block, f"{where}.{i}"))
    return [*results, *([{"role": role, "content": parts}] if parts or not results else [])]


def _assistant(blocks: Any, where: str) -> dict[str, Any]:
    texts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for i, block in enumerate(blocks):
        kind = block.get("type")
        if kind == "tool_use":
            calls.append(_call(block, f"{where}.{i}"))
        elif kind == "thinking":
            thoughts.append(string(block.get("thinking"), f"{where}.{i}.thinking"))
        elif kind != "redacted_thinking":
            texts.append(_part(block, f"{where}.{i}"))
    thought = {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
    return {"role": "assistant", "content": texts or None, **({"tool_calls": calls} if calls else {}), **thought}


def _call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    arguments = written(mapping(block.get("input") or {}, f"{where}.input"), f"{where}.input")
    function = {"name": block.get("name"), "arguments": arguments}
    return placed({"id": block.get("id"), "type": "function", "function": function}, where, function=where)


def _result(block: Mapping[str, Any], where: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The message and the pictures of a tool result."""
    content, inside = block.get("content"), f"{where}.content"
    text, pictures = content or "", []
    if content is not None and not isinstance(content, str):
        parts = [_part(part, f"{inside}.{i}") for i, part in enumerate(entries(content, inside, _TEXT_OR_BLOCKS))]
        text = "\n".join(part["text"] for part in parts if part["type"] == "text")
        pictures = [part for part in parts if part["type"] != "text"]
    message = {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}
    return placed(message, where, tool_call_id=f"{where}.tool_use_id", content=inside), pictures


def _part(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind = block.get("type")
    if kind == "text":
        return text_part(block.get("text"), f"{where}.text")
    if kind == "image":
        source = mapping(block.get("source"), f"{where}.source")
        if source.get("type") == "base64":
            return base64_part(source.get("data"), source.get("media_type", "image/png"), f"{where}.source.data")
        if source.get("type") == "url":
            return image_part(string(source.get("url"), f"{where}.source.url"), f"{where}.source.url")
        raise unsupported(f"{where}.source.type", f"{where}.source.type", "send base64 or url")
    raise unsupported(f"{where}: a block of this type", f"{where}.type", "send text, image, tool_use or tool_result")


def _tools(tools: object) -> list[dict[str, Any]] | None:
    return None if tools is None else [_tool(tool, f"tools.{i}") for i, tool in enumerate(entries(tools, "tools"))]


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type", "custom") not in ("custom", None):
        raise unsupported(f"{where}.type", f"{where}.type", "tools that the server runs do not exist here")
    names = {"name": "name", "description": "description", "input_schema": "parameters"}
    return {"type": "function", "function": {to: tool[of] for of, to in names.items() if tool.get(of) is not None}}


def _tool_choice(choice: object) -> dict[str, Any]:
    if choice is None:
        return {}
    choice = mapping(choice, "tool_choice")
    kind = choice.get("type")
    chosen: Any = _CHOICES.get(kind) if isinstance(kind, str) else None
    if kind == "tool":
        chosen = {"type": "function", "function": {"name": choice.get("name")}}
    if chosen is None:
        raise InvalidRequest("tool_choice.type must be auto, any, tool or none", param="tool_choice.type")
    return {"tool_choice": chosen, "parallel_tool_calls": choice.get("disable_parallel_tool_use") is not True}
