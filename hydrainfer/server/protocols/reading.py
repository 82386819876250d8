"""Checks and conversions of body values, shared by all protocols. Checks raise `InvalidRequest` naming the place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from fastapi import Request
from starlette.responses import Response

from hydrainfer.core import InvalidRequest
from hydrainfer.server.http import EXTENSIONS
from hydrainfer.server.openai import Answers, ChatFields, Shape, parse
from hydrainfer.server.protocols.places import own_names, placed


def extensions(body: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: body[name] for name in EXTENSIONS if body and body.get(name) is not None}


async def answer_chat(
    answers: Answers, request: Request, chat: dict[str, Any], shape: Shape, names: Mapping[str, str]
) -> Response:
    """The answer to a chat, whose errors name the client's fields and places. `names`: as in `name_fields`."""
    with own_names(names, chat["messages"]):
        return await answers.chat(request, parse(ChatFields, chat), shape)


def thinking_of(body: Mapping[str, Any], thinks: bool | str | None) -> dict[str, Any]:
    """The fields that turn thinking on or off in a chat, or set its effort. `thinks` None: the model's default."""
    if isinstance(thinks, str):
        return {"reasoning_effort": thinks}
    given = body.get("chat_template_kwargs") or {}
    if thinks is None or not isinstance(given, Mapping):
        return {}
    return {"chat_template_kwargs": {"enable_thinking": thinks, "thinking": thinks, **given}}


def written(value: object, where: str) -> str:
    """`value` as JSON. Raises `InvalidRequest` if it is nested too deeply."""
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError:
        raise InvalidRequest(f"{where} is nested too deeply", param=where) from None


def unsupported(what: str, where: str, hint: str = "") -> InvalidRequest:
    message = f"{what} is not supported by this server" + (f"; {hint}" if hint else "")
    return InvalidRequest(message, param=where, code="unsupported_parameter")


def mapping(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{where} must be an object", param=where)
    return value


def entries(value: object, where: str, kinds: str = "a list") -> Sequence[Mapping[str, Any]]:
    """The objects of the list `value`. `kinds`: what the client may send there."""
    if not isinstance(value, list):
        raise InvalidRequest(f"{where} must be {kinds}", param=where)
    return [mapping(entry, f"{where}.{i}") for i, entry in enumerate(value)]


def string(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{where} must be a string", param=where)
    return value


def text_part(text: object, where: str) -> dict[str, Any]:
    return {"type": "text", "text": string(text, where)}


def role_of(message: Mapping[str, Any], where: str, roles: Sequence[str]) -> str:
    role = message.get("role")
    if not isinstance(role, str) or role not in roles:
        raise InvalidRequest(f"{where}.role must be one of {', '.join(roles)}", param=f"{where}.role")
    return role


def image_part(url: str, where: str) -> dict[str, Any]:
    """A picture. `where`: the field of the client's body that has it."""
    return placed({"type": "image_url", "image_url": {"url": url}}, where, image_url=where)


def add_result(messages: list[dict[str, Any]], result: dict[str, Any], pictures: list[dict[str, Any]]) -> None:
    """Add a tool's message. Its pictures become a user message, since only these may have pictures. It stands behind
    the results of all calls, since these must follow the calls directly."""
    shown: list[dict[str, Any]] = []
    if [m["role"] for m in messages[-2:]] == ["tool", "user"] and isinstance(messages[-1]["content"], list):
        shown = messages.pop()["content"]
    messages.append(result)
    if shown or pictures:
        messages.append({"role": "user", "content": [*shown, *pictures]})


def base64_part(data: object, kind: object, where: str) -> dict[str, Any]:
    """A picture given by its bytes. Its format is found from its first bytes, not from `kind`."""
    return image_part(f"data:{string(kind, where)};base64,{string(data, where)}", where)
