"""Text and chats to token ids and back, as vLLM has it."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from hydrainfer.core import InvalidRequest
from hydrainfer.processor import ChatOptions, parse_messages, parse_tools
from hydrainfer.server.http import Bodies, Body, KnownFields, Protocol, json_response, names, refusals
from hydrainfer.server.openai import Answers, DetokenizeFields, TokenizeFields, parse

_TOKENIZE = KnownFields(
    TokenizeFields.honoured(),
    {
        **refusals("add_generation_prompt", "the prompt always ends where the answer begins", (True,)),
        **refusals("continue_final_message chat_template media_io_kwargs"),
    },
    names("priority request_id"),
)
_DETOKENIZE = KnownFields(DetokenizeFields.honoured(), {}, names("request_id"))


def _routes(answers: Answers, bodies: Bodies) -> APIRouter:
    router = APIRouter()
    intake = answers.intake
    processor = intake.processor

    @router.post("/tokenize", summary="Text or a chat to token ids")
    async def tokenize(request: Request) -> Response:
        """The token ids of a text, or of the prompt that a chat becomes."""
        fields = parse(TokenizeFields, await bodies.read(request))
        answers.check_model(fields.model)
        if (fields.prompt is None) == (fields.messages is None):
            raise InvalidRequest("send either prompt or messages", param="prompt")
        if fields.prompt is not None:
            text, special = fields.prompt, fields.add_special_tokens
            ids = await intake.run(lambda: processor.encode(text, add_special=special))
        else:
            messages, tools = parse_messages(fields.messages), parse_tools(fields.tools)
            options = ChatOptions(tools, fields.chat_template_kwargs, fields.mm_processor_kwargs)
            ids = await answers.encode_chat(request, messages, options)
        body = {"count": len(ids), "max_model_len": processor.model.n_context, "tokens": ids}
        if fields.return_token_strs:
            body["token_strs"] = [processor.model.vocabulary.token_text(i) for i in ids]
        return json_response(body)

    @router.post("/detokenize", summary="Token ids to text")
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        fields = parse(DetokenizeFields, await bodies.read(request))
        answers.check_model(fields.model)
        return json_response({"prompt": await intake.run(lambda: processor.decode(fields.tokens))})

    return router


TOKENS = Protocol(
    _routes,
    brief=("/tokenize", "/detokenize"),
    bodies={
        "/tokenize": Body(TokenizeFields, {"prompt": "Once upon a time"}, _TOKENIZE),
        "/detokenize": Body(DetokenizeFields, {"tokens": [300, 301, 302]}, _DETOKENIZE),
    },
)
