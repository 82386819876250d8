"""Ollama's routes and fields: chat, generate, and those that describe models."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from hydrainfer.checkpoint import find_json
from hydrainfer.processor import ModelDescription
from hydrainfer.server.http import Bodies, Body, KnownFields, Protocol, json_response, names, refusals
from hydrainfer.server.openai import OPENAI_REFUSED, Answers, CompletionFields, Shape, parse
from hydrainfer.server.protocols.ollama_chat import (
    chat_of,
    check_types,
    generate_of,
    names_of,
    only_loads,
    raw_of,
    thinks,
)
from hydrainfer.server.protocols.ollama_fields import GenerateFields, OllamaChatFields, OptionFields, ShowFields
from hydrainfer.server.protocols.ollama_turn import ChatTurn, GenerateTurn, error_body, head
from hydrainfer.server.protocols.places import own_names
from hydrainfer.server.protocols.reading import answer_chat, mapping, string
from hydrainfer.server.protocols.turn import shape_of

_OLLAMA_VERSION = "0.12.11"
"""The version of Ollama whose API this is. Clients refuse older ones."""
_NEVER = "9999-12-31T23:59:59Z"
_REFUSED = {**refusals("template", "it is chosen when the server starts"), **refusals("suffix width height steps")}
_HARMLESS = names("keep_alive truncate shift name")
_OPTIONS = KnownFields(
    honoured=OptionFields.honoured(),
    refused={name: OPENAI_REFUSED[name] for name in ("mirostat", "typical_p", "tfs_z", "repeat_last_n")},
    harmless=names(  # of Ollama's engine: its memory, its threads, its context
        "num_ctx num_batch num_gpu main_gpu low_vram vocab_only use_mmap use_mlock num_thread numa f16_kv logits_all "
        "embedding_only num_keep mirostat_tau mirostat_eta penalize_newline"
    ),
)
_CHAT = KnownFields(OllamaChatFields.honoured(), _REFUSED, _HARMLESS, nested={"options": _OPTIONS})
_GENERATE = KnownFields(
    GenerateFields.honoured(),
    {**_REFUSED, **refusals("context", "send the conversation to /api/chat")},
    _HARMLESS,
    nested={"options": _OPTIONS},
)
_EXAMPLE = {"messages": [{"role": "user", "content": "What is 3 + 4?"}], "options": {"num_predict": 64}}
_BODIES = {
    "/api/chat": Body(OllamaChatFields, _EXAMPLE, _CHAT),
    "/api/generate": Body(GenerateFields, {"prompt": "What is 3 + 4?", "options": {"num_predict": 64}}, _GENERATE),
    "/api/show": Body(ShowFields, {}),
}


def _routes(answers: Answers, bodies: Bodies) -> APIRouter:
    router = APIRouter()
    model = answers.intake.processor.model
    details = _details(model)

    async def body_of(request: Request) -> Mapping[str, Any]:
        body = mapping(await bodies.read(request), "the body")
        check_types(body)
        return body

    async def answered(request: Request, body: Mapping[str, Any], chat: dict[str, Any], shape: Shape) -> Response:
        if thinks(body):
            answers.check_reasons("think")
        return await answer_chat(answers, request, _own_name(answers, chat), shape, names_of(body))

    @router.post("/api/chat", summary="Ollama's: answer a chat")
    async def chat(request: Request) -> Response:
        """Answers a chat with texts and pictures, as lines or, with stream false, whole."""
        body = await body_of(request)
        if only_loads(body):
            return _loaded(answers, body, {"message": {"role": "assistant", "content": ""}})
        return await answered(request, body, chat_of(body), shape_of("ollama", ChatTurn, body))

    @router.post("/api/generate", summary="Ollama's: answer one question, or continue a text (raw)")
    async def generate(request: Request) -> Response:
        """Answers one question, or continues a text if raw is true."""
        body = await body_of(request)
        if only_loads(body):
            return _loaded(answers, body, {"response": ""})
        shape = shape_of("ollama", GenerateTurn, body)
        if body.get("raw"):
            raw = _own_name(answers, raw_of(body))
            with own_names(names_of(body)):
                return await answers.complete(request, parse(CompletionFields, raw), shape)
        return await answered(request, body, generate_of(body), shape)

    def named(**about: Any) -> Response:
        size = sum(file.stat().st_size for file in model.path.glob(f"*.{details['format']}"))
        about |= {"size": size, "digest": "", "details": details}
        return json_response({"models": [{"name": n, "model": n, **about} for n in answers.names]})

    @router.get("/api/tags", summary="Ollama's: the model's names")
    async def tags() -> Response:
        """Lists the served model under each of its names."""
        return named(modified_at=head("", int(model.path.stat().st_mtime))["created_at"])

    @router.get("/api/ps", summary="Ollama's: the models that are loaded")
    async def loaded() -> Response:
        """Lists the served model as one that is loaded and stays so."""
        return named(expires_at=_NEVER, size_vram=0, context_length=model.n_context)

    @router.post("/api/show", summary="Ollama's: what the model can do")
    async def show(request: Request) -> Response:
        """Tells the family, the context and the abilities of the model, such as vision and tools."""
        body = await body_of(request)
        _check_model(answers, body)
        family = details["family"]
        info = {"general.architecture": family, f"{family}.context_length": model.n_context}
        return json_response({"details": details, "model_info": info, "capabilities": _capabilities(model)})

    @router.get("/api/version", summary="Ollama's: the version")
    async def api_version() -> Response:
        """Tells the version of Ollama whose API this is; the server's own is at /version."""
        return json_response({"version": _OLLAMA_VERSION})

    return router


def _details(model: ModelDescription) -> dict[str, Any]:
    """The file format and the family of the model. Unknown details are empty."""
    family: str = (find_json(model.path / "config.json") or {}).get("model_type", "unknown")
    unknown = {"parent_model": "", "parameter_size": "", "quantization_level": ""}
    kind = "gguf" if (model.path / "model.gguf").exists() else "safetensors"
    return {**unknown, "format": kind, "family": family, "families": [family]}


def _capabilities(model: ModelDescription) -> list[str]:
    template = model.template
    takes_tools = template is not None and template.tools is not None and template.takes_tools
    thinks = template is not None and template.reasoning is not None
    more = {"vision": model.images is not None, "tools": takes_tools, "thinking": thinks}
    return ["completion", *(name for name, there in more.items() if there)]


def _own_name(answers: Answers, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields with the server's own name of the model: a name without a tag and one with the tag `latest` are the
    same."""
    name = fields.get("model")
    if name is None:
        return fields
    bare = name.removesuffix(":latest")
    return fields | {"model": next((n for n in (name, bare, f"{bare}:latest") if n in answers.names), name)}


def _check_model(answers: Answers, body: Mapping[str, Any]) -> str:
    name = body.get("model") or body.get("name")
    fields = {} if name is None else {"model": string(name, "model")}
    return answers.check_model(_own_name(answers, fields).get("model"))


def _loaded(answers: Answers, body: Mapping[str, Any], said: dict[str, Any]) -> Response:
    """The answer to a request without a prompt: the model is loaded."""
    line = {**head(_check_model(answers, body), int(time.time())), **said, "done": True, "done_reason": "load"}
    return Response(orjson.dumps(line) + b"\n", media_type="application/x-ndjson")


OLLAMA = Protocol(
    _routes,
    paths=("/api/chat", "/api/generate"),
    bodies=_BODIES,
    prefix="/api/",
    error=error_body,
    media_type="application/x-ndjson",
)
