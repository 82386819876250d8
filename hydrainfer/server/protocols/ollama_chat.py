"""Ollama's chat and generate: request bodies to chats or, with `raw`, to text completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hydrainfer.core import InvalidRequest
from hydrainfer.server.http import EXTENSIONS
from hydrainfer.server.protocols.ollama_fields import EFFORTS
from hydrainfer.server.protocols.places import placed
from hydrainfer.server.protocols.reading import (
    add_result,
    base64_part,
    entries,
    extensions,
    mapping,
    string,
    text_part,
    thinking_of,
    unsupported,
    written,
)

_OPTIONS = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "seed", "stop")},
    **{name: name for name in ("presence_penalty", "frequency_penalty")},
    "repeat_penalty": "repetition_penalty",
    "num_predict": "max_tokens",
}
"""Supported options → the fields of a chat."""
_NAMES = {"response_format": "format", "reasoning_effort": "think", "image_url": "images"}
_RAW_TOKENS = 128  # max_tokens of a raw prompt that sets none
_TYPES: tuple[tuple[type, str, tuple[str, ...]], ...] = (
    (bool, "true or false", ("stream", "raw", "logprobs")),
    (str, "a string", ("prompt", "system")),
    (list, "a list", ("messages", "tools", "images")),
    (dict, "an object", ("options",)),
)
"""The types of fields whose values have defaults here, so that a wrong `0` or `""` would pass for a default."""


def check_types(body: Mapping[str, Any]) -> None:
    """Raises `InvalidRequest` for a field of `_TYPES` that has another type. None is as if it were not there."""
    for kind, called, names in _TYPES:
        for name in names:
            value = body.get(name)
            if value is not None and not isinstance(value, kind):
                raise InvalidRequest(f"{name} must be {called}", param=name)


def chat_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """The chat that a body of /api/chat asks for. Raises `InvalidRequest`."""
    pending: list[str] = []  # ids of calls whose results have not come yet
    turns = entries(body.get("messages") or [], "messages")
    messages: list[dict[str, Any]] = []
    for i, turn in enumerate(turns):
        pictures = _pictures(turn.get("images"), f"messages.{i}.images")
        _add(turn, f"messages.{i}", pictures, pending, messages)
        messages[-2:] = [placed(message, f"messages.{i}") for message in messages[-2:]]
    tools = body.get("tools") or None
    return _common(body) | {"messages": messages, **({"tools": tools} if tools else {})}


def generate_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """The chat, with one question, that a body of /api/generate asks for. Raises `InvalidRequest`."""
    messages: list[dict[str, Any]] = []
    if body.get("system"):
        system = {"role": "system", "content": string(body["system"], "system")}
        messages.append(placed(system, "system", content="system"))
    question = {"role": "user", "content": string(body.get("prompt") or "", "prompt")}
    _add(question, "prompt", _pictures(body.get("images"), "images"), [], messages)
    return _common(body) | {"messages": [placed(message, "prompt", content="prompt") for message in messages]}


def raw_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """The text completion that a body of /api/generate with `raw` asks for. Raises `InvalidRequest`."""
    for name in ("images", "system"):
        if body.get(name):
            raise unsupported(f"{name} beside raw", name, "leave raw out")
    fields = {"max_tokens": _RAW_TOKENS, **_common(body), "prompt": body.get("prompt")}
    fields.pop("chat_template_kwargs", None)  # set by `think`, which has no meaning without a template
    if fields.pop("logprobs", None):
        fields["logprobs"] = fields.pop("top_logprobs", None) or 0
    return fields


def names_of(body: Mapping[str, Any]) -> dict[str, str]:
    """The names that fields have in a body that was read, by those that they have in what it became. Some may be sent
    as options or, as in the other protocols, beside them."""
    options = body.get("options") or {}
    sent = [of for of, to in _OPTIONS.items() if options.get(of) is not None or to not in EXTENSIONS]
    names = {_OPTIONS[of]: f"options.{of}" for of in sent}
    if body.get("raw"):
        names["logprobs"] = "top_logprobs"
    elif not body.get("messages"):
        names["messages"] = "prompt"
    return _NAMES | names


def only_loads(body: Mapping[str, Any]) -> bool:
    """Whether the body has no prompt, which is Ollama's way to load a model."""
    return not body.get("messages") and not body.get("prompt") and not body.get("images")


def _common(body: Mapping[str, Any]) -> dict[str, Any]:
    options = body.get("options") or {}
    fields = {to: options[of] for of, to in _OPTIONS.items() if options.get(of) is not None}
    limit = fields.get("max_tokens")
    if isinstance(limit, int | float) and not isinstance(limit, bool) and limit <= 0:  # no limit
        del fields["max_tokens"]
    model = body.get("model")
    return {
        **extensions(body),
        **thinking_of(body, thinks(body)),
        **fields,
        **({"model": string(model, "model")} if model is not None else {}),
        **{name: body[name] for name in ("logprobs", "top_logprobs") if body.get(name) is not None},
        **_format(body.get("format")),
        "stream": body.get("stream") is not False,
        "timings": True,
    }


def thinks(body: Mapping[str, Any]) -> bool | str | None:
    """Whether the model is asked to think, or with which effort; None if the body does not say. Raises
    `InvalidRequest`."""
    think = body.get("think")
    if think is not None and not isinstance(think, bool) and think not in EFFORTS:
        raise InvalidRequest("think must be true, false, low, medium or high", param="think")
    return think


def _format(given: object) -> dict[str, Any]:
    if given is None or given == "" or given == {}:
        return {}
    if given == "json":
        return {"response_format": {"type": "json_object"}}
    if not isinstance(given, Mapping):
        raise InvalidRequest("format must be json or a JSON schema", param="format")
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "format", "schema": given}}}


def _pictures(given: object, where: str) -> list[dict[str, Any]]:
    if not given:
        return []
    if not isinstance(given, list):
        raise InvalidRequest(f"{where} must be a list", param=where)
    return [base64_part(data, "image/png", f"{where}.{i}") for i, data in enumerate(given)]


def _add(
    turn: Mapping[str, Any],
    where: str,
    images: list[dict[str, Any]],
    pending: list[str],
    messages: list[dict[str, Any]],
) -> None:
    """Add one turn with its pictures. Ollama's calls have no ids: tool results answer the `pending` calls, in order."""
    role, content = turn.get("role"), turn.get("content")
    if role == "tool":
        id = pending.pop(0) if pending else _id(0)
        name = {"name": turn["tool_name"]} if turn.get("tool_name") else {}
        return add_result(messages, {"role": role, "content": content, "tool_call_id": id, **name}, images)
    more = {"reasoning_content": turn["thinking"]} if turn.get("thinking") else {}
    if role == "assistant" and turn.get("tool_calls"):
        inside = f"{where}.tool_calls"
        calls = [_call(c, f"{inside}.{i}", i) for i, c in enumerate(entries(turn["tool_calls"], inside))]
        pending[:] = [call["id"] for call in calls]
        more["tool_calls"] = calls
        content = content or None
    if images:
        content = [*images, text_part(content or "", f"{where}.content")]
    messages.append({"role": role, "content": content, **more})


def _call(call: Mapping[str, Any], where: str, index: int) -> dict[str, Any]:
    function = mapping(call.get("function"), f"{where}.function")
    arguments = written(function.get("arguments") or {}, f"{where}.function.arguments")
    return {
        "id": _id(index),
        "type": "function",
        "function": {"name": function.get("name"), "arguments": arguments},
    }


def _id(index: int) -> str:
    """The id of a call. Mistral's templates demand nine letters or digits."""
    return f"call{index:05d}"
