"""OpenAI's Responses: routes and fields."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from hydrainfer.server.http import Bodies, Body, KnownFields, Protocol, loose, names, refusals
from hydrainfer.server.openai import Answers
from hydrainfer.server.protocols.reading import answer_chat, mapping
from hydrainfer.server.protocols.responses_chat import NAMES, chat_of
from hydrainfer.server.protocols.responses_fields import ResponseFields
from hydrainfer.server.protocols.responses_turn import ResponseTurn
from hydrainfer.server.protocols.turn import shape_of

_PATH = "/v1/responses"
_EXAMPLE = {"input": "What is 3 + 4?", "max_output_tokens": 64}
_KNOWN = KnownFields(
    honoured=ResponseFields.honoured(),
    refused={
        **refusals("previous_response_id conversation", "nothing is stored; send the whole conversation as input"),
        **refusals("background max_tool_calls context_management moderation access_programs image"),
        **refusals("prompt", "send input"),
        **refusals("top_logprobs", "use /v1/chat/completions"),
    },
    harmless=names(
        "metadata store user safety_identifier prompt_cache_key prompt_cache_retention prompt_cache_options "
        "service_tier stream_options client_metadata request_id"
    ),
    nested={
        "text": loose("format verbosity", format=loose("type name schema", "strict description")),
        "tools": loose("type name description parameters", "strict"),
        "tool_choice": loose("type name", "mode tools"),
        "reasoning": loose("effort summary", "generate_summary context"),
        "input": loose(
            "type role content call_id name arguments output",
            "id status summary encrypted_content phase namespace action result results outputs",
            content=loose("type text image_url refusal", "detail file_id annotations logprobs"),
        ),
    },
)


def _routes(answers: Answers, bodies: Bodies) -> APIRouter:
    router = APIRouter()

    @router.post(_PATH, summary="OpenAI's Responses: answer a chat")
    async def respond(request: Request) -> Response:
        """Answers a question or a conversation, whole or as OpenAI's response events. Nothing is stored."""
        body = mapping(await bodies.read(request), "the body")
        chat = chat_of(body)
        if chat.get("reasoning_effort") not in (None, "none"):
            answers.check_reasons("reasoning")
        return await answer_chat(answers, request, chat, shape_of("resp", ResponseTurn, body), NAMES)

    return router


RESPONSES = Protocol(_routes, paths=(_PATH,), bodies={_PATH: Body(ResponseFields, _EXAMPLE, _KNOWN)})
