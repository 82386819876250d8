"""OpenAI's chats and completions, and the list of models."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from starlette.responses import Response

from hydrainfer.server.http import Bodies, Body, Protocol, json_response
from hydrainfer.server.openai import CHAT, TEXT, Answers, ChatFields, CompletionFields, parse
from hydrainfer.server.protocols.places import own_names

_QUESTION = {"messages": [{"role": "user", "content": "What is 3 + 4?"}]}
_NAME = Path(description="A name of the model.", examples=["shapes-and-digits"])


def _routes(answers: Answers, bodies: Bodies) -> APIRouter:
    router = APIRouter()
    model = answers.intake.processor.model
    created = int(answers.wall_clock())
    anthropics = {
        "type": "model",
        "created_at": datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": model.n_context,
    }

    def model_card(name: str) -> dict[str, Any]:
        """A model in OpenAI's words, then in vLLM's, then in Anthropic's, whose client asks the same path."""
        card = {"id": name, "object": "model", "created": created, "owned_by": "hydrainfer"}
        card |= {"root": model.path.name, "max_model_len": model.n_context}
        return {**card, "display_name": name, **anthropics}

    @router.get("/v1/models", summary="The model, by all its names")
    async def models() -> Response:
        """Lists the served model under each of its names, with the length of its context."""
        return json_response({"object": "list", "data": [model_card(name) for name in answers.names]})

    @router.get("/v1/models/{name:path}", summary="The model, by one of its names")
    async def one_model(name: Annotated[str, _NAME]) -> Response:
        """Describes the served model by one of its names."""
        return json_response(model_card(answers.check_model(name)))

    @router.post("/v1/chat/completions", summary="Answer a chat with text and pictures")
    async def chat(request: Request) -> Response:
        """Answers a chat with texts, pictures and tools, whole or as server-sent events."""
        fields = parse(ChatFields, await bodies.read(request))
        with own_names(fields.own_names):
            return await answers.chat(request, fields)

    @router.post("/v1/completions", summary="Continue a text")
    async def complete(request: Request) -> Response:
        """Continues a text, or each of a list of texts, without a chat template."""
        fields = parse(CompletionFields, await bodies.read(request))
        with own_names(fields.own_names):
            return await answers.complete(request, fields)

    return router


OPENAI = Protocol(
    _routes,
    paths=("/v1/chat/completions", "/v1/completions"),
    bodies={
        "/v1/chat/completions": Body(ChatFields, {**_QUESTION, "max_tokens": 64}, CHAT),
        "/v1/completions": Body(CompletionFields, {"prompt": "Once upon a time", "max_tokens": 64}, TEXT),
    },
)
