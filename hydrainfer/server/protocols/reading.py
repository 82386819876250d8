"""Checks and conversions of body values, shared by all protocols. Checks raise `InvalidRequest` naming the place."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import orjson
from fastapi import Request
from starlette.responses import Response

from hydrainfer.core import HydraError, InvalidRequest
from hydrainfer.server.http import EXTENSIONS
from hydrainfer.server.openai import Answers, ChatFields, Shape, parse

_NAME = re.compile(
    r"""(?<!\w)(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""  # a text in quotes, which no name equals
    r"|(?:^|(?<=\bthe ))[a-z]+(?!\w)"
    r"|(?<![\w.])[a-z]+(?:_[a-z]+)+(?!\w)"
)
"""What may be the name of a field in a message."""


def extensions(body: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: body[name] for name in EXTENSIONS if body and body.get(name) is not None}


def placed(message: dict[str, Any], where: str) -> dict[str, Any]:
    """`message` with the place in the client's body from which it was made, unless it has one. Only `name_places` reads
    it."""
    return {"place": where, **message}


def name_places(error: HydraError, messages: Sequence[Mapping[str, Any]]) -> None:
    """Let `error` name the places in the client's body instead of those in `messages`, which are `placed`."""

    def place(found: re.Match[str]) -> str:
        i = int(found[1])
        return messages[i]["place"] if i < len(messages) else found[0]  # else it is the client's text, repeated

    def own(text: str) -> str:
        return re.sub(r"\bmessages\.(\d{1,6})\b", place, text)

    error.message, error.param = own(error.message), error.param and own(error.param)


def name_fields(error: HydraError, names: Mapping[str, str]) -> None:
    """Let `error` name the client's fields instead of ours. `names`: the client's names, by ours. In the message, texts
    in quotes stay as they are, and so do words that may be plain English, unless they begin it or follow `the`."""
    error.message = _NAME.sub(lambda match: names.get(match[0], match[0]), error.message)
    if error.param is not None:
        field, dot, rest = error.param.partition(".")
        error.param = names.get(field, field) + dot + rest


@contextmanager
def own_names(names: Mapping[str, str], messages: Sequence[Mapping[str, Any]] = ()) -> Iterator[None]:
    """A context whose errors name the fields and places in the client's body, not those of the chat or completion that
    it became. `names`: as in `name_fields`. `messages`: those of the chat if they are `placed`."""
    try:
        yield
    except HydraError as e:
        name_places(e, messages)
        name_fields(e, names)
        raise


async def answer_chat(
    answers: Answers, request: Request, chat: dict[str, Any], shape: Shape, names: Mapping[str, str]
) -> Response:
    """The answer to a chat whose messages are `placed`. `names`: as in `name_fields`."""
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


def entries(value: object, where: str) -> Sequence[Mapping[str, Any]]:
    if not isinstance(value, list):
        raise InvalidRequest(f"{where} must be a list", param=where)
    return [mapping(entry, f"{where}.{i}") for i, entry in enumerate(value)]


def string(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{where} must be a string", param=where)
    return value


def text_part(text: object, where: str) -> dict[str, Any]:
    return {"type": "text", "text": string(text, where)}


def image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


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
    return image_part(f"data:{string(kind, where)};base64,{string(data, where)}")
