"""The routes of Responses and Messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from hydrainfer.core import HydraError
from hydrainfer.processor import ChatOptions, parse_messages, parse_tools
from hydrainfer.server.answers import Answers, Shape
from hydrainfer.server.body import Bodies, json_response
from hydrainfer.server.fields import ChatFields, parse
from hydrainfer.server.fronts import messages, responses
from hydrainfer.server.fronts.messages_turn import MessageTurn
from hydrainfer.server.fronts.reading import mapping, name_places
from hydrainfer.server.fronts.responses_turn import ResponseTurn
from hydrainfer.server.fronts.turn import shape_of


def front_routes(answers: Answers, bodies: Bodies) -> APIRouter:
    """The routes of Responses and Messages. All of them use `answers`; nothing else reaches the engine."""
    router = APIRouter()

    @router.post("/v1/responses")
    async def respond(request: Request) -> Response:
        body = mapping(await bodies.read(request), "the body")
        chat = responses.chat_of(body)
        if chat.get("reasoning_effort") not in (None, "none"):
            answers.check_reasons("reasoning")
        return await _chat(answers, request, chat, shape_of("resp", ResponseTurn, body))

    @router.post("/v1/messages")
    async def message(request: Request) -> Response:
        body = mapping(await bodies.read(request), "the body")
        if messages.thinks(body):
            answers.check_reasons("thinking")
        return await _chat(answers, request, messages.chat_of(body), shape_of("msg", MessageTurn, body))

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> Response:
        chat = messages.chat_of(mapping(await bodies.read(request), "the body"), counting=True)
        fields = parse(ChatFields, chat)
        answers.check_model(fields.model)
        tools = parse_tools(fields.tools, fields.tool_choice, fields.parallel_tool_calls)
        options = ChatOptions(tools, fields.template_variables, fields.mm_processor_kwargs)
        with _own_places(chat):
            ids = await answers.encode_chat(request, parse_messages(fields.messages), options, fields.cache_salt)
        return json_response({"input_tokens": len(ids)})

    return router


async def _chat(answers: Answers, request: Request, chat: dict[str, Any], shape: Shape) -> Response:
    with _own_places(chat):
        return await answers.chat(request, parse(ChatFields, chat), shape)


@contextmanager
def _own_places(chat: dict[str, Any]) -> Iterator[None]:
    """A context whose errors name the places in the client's body, not those in the chat that it became."""
    try:
        yield
    except HydraError as e:
        name_places(e, chat["messages"])
        raise
