"""Anthropic's Messages: routes and fields."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from hydrainfer.processor import ChatOptions, parse_messages, parse_tools
from hydrainfer.server.http import (
    EXTENSIONS,
    SAMPLING,
    Bodies,
    Body,
    KnownFields,
    Protocol,
    json_response,
    names,
    object_schema,
    refusals,
)
from hydrainfer.server.openai import Answers, ChatFields, parse
from hydrainfer.server.protocols.messages_chat import chat_of, thinks
from hydrainfer.server.protocols.messages_turn import MessageTurn, error_body
from hydrainfer.server.protocols.reading import answer_chat, mapping, own_places
from hydrainfer.server.protocols.turn import shape_of

_PATH = "/v1/messages"
_COUNT = "/v1/messages/count_tokens"
_KNOWN = KnownFields(
    honoured=names(
        "model messages max_tokens system stop_sequences stream temperature top_p top_k tools tool_choice thinking "
        "output_config output_format"
    ).union(EXTENSIONS),
    refused={
        **refusals("mcp_servers", "send tools"),
        **refusals("container context_management compaction fallbacks thread"),
    },
    harmless=names(
        "metadata service_tier inference_geo cache_control speed betas user_profile_id workspace_id billing_policy "
        "fallback_credit_token diagnostics"
    ),
)
_BODY = Body(
    object_schema(
        "max_tokens messages",
        "model: string, messages: array, system: any, max_tokens: integer, tools: array, tool_choice: object, "
        f"stop_sequences: array, output_config: object, {SAMPLING}",
    ),
    _KNOWN,
)
_COUNT_BODY = Body(object_schema("messages", "model: string, messages: array, system: any, tools: array"), _KNOWN)


def _routes(answers: Answers, bodies: Bodies) -> APIRouter:
    router = APIRouter()

    @router.post(_PATH, summary="Anthropic's Messages: answer a chat")
    async def message(request: Request) -> Response:
        body = mapping(await bodies.read(request), "the body")
        if thinks(body):
            answers.check_reasons("thinking")
        return await answer_chat(answers, request, chat_of(body), shape_of("msg", MessageTurn, body))

    @router.post(_COUNT, summary="The number of tokens of a prompt")
    async def count_tokens(request: Request) -> Response:
        chat = chat_of(mapping(await bodies.read(request), "the body"), counting=True)
        fields = parse(ChatFields, chat)
        answers.check_model(fields.model)
        tools = parse_tools(fields.tools, fields.tool_choice, fields.parallel_tool_calls)
        options = ChatOptions(tools, fields.template_variables, fields.mm_processor_kwargs)
        with own_places(chat):
            ids = await answers.encode_chat(request, parse_messages(fields.messages), options, fields.cache_salt)
        return json_response({"input_tokens": len(ids)})

    return router


MESSAGES = Protocol(
    _routes,
    paths=(_PATH,),
    brief=(_COUNT,),
    bodies={_PATH: _BODY, _COUNT: _COUNT_BODY},
    prefix=_PATH,
    error=error_body,
)
