"""Anthropic's Messages: routes and fields."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from hydrainfer.processor import ChatOptions, parse_messages, parse_tools
from hydrainfer.server.http import Bodies, Body, KnownFields, Protocol, json_response, loose, names, refusals
from hydrainfer.server.openai import Answers, ChatFields, parse
from hydrainfer.server.protocols.messages_chat import NAMES, chat_of, thinks
from hydrainfer.server.protocols.messages_fields import CountFields, MessageFields
from hydrainfer.server.protocols.messages_turn import MessageTurn, error_body
from hydrainfer.server.protocols.places import own_names
from hydrainfer.server.protocols.reading import answer_chat, mapping
from hydrainfer.server.protocols.turn import shape_of

_PATH = "/v1/messages"
_COUNT = "/v1/messages/count_tokens"
_BLOCKS = loose(
    "type text source content id name input tool_use_id is_error thinking",
    "title context citations cache_control signature data caller",
    source=loose("type media_type data url", "file_id content"),
)
_KNOWN = KnownFields(
    honoured=MessageFields.honoured(),
    refused={
        **refusals("mcp_servers", "send tools"),
        **refusals("container context_management compaction fallbacks thread"),
    },
    harmless=names(
        "metadata service_tier inference_geo cache_control speed betas user_profile_id workspace_id billing_policy "
        "fallback_credit_token diagnostics"
    ),
    nested={
        "system": _BLOCKS,
        "tools": loose("type name description input_schema", "cache_control strict"),
        "tool_choice": loose("type name disable_parallel_tool_use"),
        "thinking": loose("type", "budget_tokens display"),
        "output_config": loose("format effort", "task_budget", format=loose("type schema", "name")),
        "messages": loose("role content", content=_BLOCKS),
    },
)
_EXAMPLE = {"messages": [{"role": "user", "content": "What is 3 + 4?"}]}
_BODY = Body(MessageFields, {**_EXAMPLE, "max_tokens": 64}, _KNOWN)
_COUNT_BODY = Body(CountFields, _EXAMPLE, _KNOWN)


def _routes(answers: Answers, bodies: Bodies) -> APIRouter:
    router = APIRouter()

    @router.post(_PATH, summary="Anthropic's Messages: answer a chat")
    async def message(request: Request) -> Response:
        """Answers a chat with texts and pictures, whole or as Anthropic's events. The key may come as x-api-key."""
        body = mapping(await bodies.read(request), "the body")
        if thinks(body):
            answers.check_reasons("thinking")
        return await answer_chat(answers, request, chat_of(body), shape_of("msg", MessageTurn, body), NAMES)

    @router.post(_COUNT, summary="The number of tokens of a prompt")
    async def count_tokens(request: Request) -> Response:
        """Counts the tokens of the prompt that the same body would have at /v1/messages; nothing is answered."""
        chat = chat_of(mapping(await bodies.read(request), "the body"), counting=True)
        with own_names(NAMES, chat["messages"]):
            fields = parse(ChatFields, chat)
            answers.check_model(fields.model)
            tools = parse_tools(fields.tools, fields.tool_choice, fields.parallel_tool_calls)
            options = ChatOptions(tools, fields.template_variables, fields.mm_processor_kwargs)
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
