"""The OpenAPI description: FastAPI's list of the routes, completed with bodies, errors and keys."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from hydrainfer.server.fields import ChatFields, CompletionFields, DetokenizeFields, TokenizeFields

_OPEN = ("/health", "/ready", "/metrics", "/version")
_REF = "#/components/schemas/{model}"


def _object(required: str, properties: str) -> dict[str, Any]:
    """The JSON schema of an object. `required`: names with spaces between; `properties`: as in "model: string, input:
    any"."""
    named = dict(one.split(": ") for one in properties.split(", "))
    kinds = {name: {} if kind == "any" else {"type": kind} for name, kind in named.items()}
    return {"type": "object", "required": required.split(), "properties": kinds}


_SAMPLING = "temperature: number, top_p: number, top_k: integer, stream: boolean"
_OLLAMA = "model: string, stream: boolean, format: any, options: object"
_BODIES: dict[str, type[BaseModel] | dict[str, Any]] = {
    "/v1/chat/completions": ChatFields,
    "/v1/completions": CompletionFields,
    "/tokenize": TokenizeFields,
    "/detokenize": DetokenizeFields,
    "/v1/responses": _object(
        "input",
        "model: string, input: any, instructions: string, max_output_tokens: integer, tools: array, tool_choice: any, "
        f"parallel_tool_calls: boolean, text: object, {_SAMPLING}",
    ),
    "/v1/messages": _object(
        "max_tokens messages",
        "model: string, messages: array, system: any, max_tokens: integer, tools: array, tool_choice: object, "
        f"stop_sequences: array, output_config: object, {_SAMPLING}",
    ),
    "/v1/messages/count_tokens": _object("messages", "model: string, messages: array, system: any, tools: array"),
    "/api/chat": _object("messages", f"messages: array, tools: array, {_OLLAMA}"),
    "/api/generate": _object("", f"prompt: string, system: string, images: array, raw: boolean, {_OLLAMA}"),
    "/api/show": _object("", "model: string"),
}
_SAYS = {
    "/v1/chat/completions": "Answer a chat with text and pictures",
    "/v1/completions": "Continue a text",
    "/v1/responses": "OpenAI's Responses: answer a chat",
    "/v1/messages": "Anthropic's Messages: answer a chat",
    "/v1/messages/count_tokens": "The number of tokens of a prompt",
    "/api/chat": "Ollama's: answer a chat",
    "/api/generate": "Ollama's: answer one question, or continue a text (raw)",
    "/api/tags": "Ollama's: the model's names",
    "/api/ps": "Ollama's: the models that are loaded",
    "/api/show": "Ollama's: what the model can do",
    "/api/version": "Ollama's: the version",
    "/v1/models": "The model, by all its names",
    "/v1/models/{name}": "The model, by one of its names",
    "/v1/instances": "The instances and their load",
    "/v1/overview": "What the page at / reads",
    "/tokenize": "Text or a chat to token ids",
    "/detokenize": "Token ids to text",
    "/health": "Whether every stage makes progress",
    "/ready": "Whether new requests are taken",
    "/metrics": "Prometheus metrics",
    "/version": "The version",
}
_STREAMED = {
    "text/event-stream": ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
    "application/x-ndjson": ("/api/chat", "/api/generate"),
}
_ERRORS = {400: "a value is wrong", 401: "no known key", 429: "too much waits; Retry-After", 503: "Retry-After"}


def describe(app: FastAPI, prefix: str) -> dict[str, Any]:
    """The OpenAPI document, made on the first call. `prefix`: the path prefix under which a proxy serves the app."""
    if app.openapi_schema is None:
        made = get_openapi(title=app.title, version=app.version, routes=app.routes)
        made["servers"] = [{"url": prefix or "/"}]
        schemas: dict[str, Any] = {"Error": _object("error", "error: any")}
        for path, operations in made["paths"].items():
            for operation in operations.values():
                _complete(path, operation, schemas)
        key = {"type": "http", "scheme": "bearer", "description": "Where the server has keys"}
        made["components"] = {"schemas": schemas, "securitySchemes": {"key": key}}
        app.openapi_schema = made
    return app.openapi_schema


def _complete(path: str, operation: dict[str, Any], schemas: dict[str, Any]) -> None:
    operation["summary"] = _SAYS.get(path, operation.get("summary", ""))
    kind = "text/plain" if path == "/metrics" else "application/json"
    content: dict[str, Any] = {kind: {}}
    content |= {streamed: {} for streamed, paths in _STREAMED.items() if path in paths}
    operation["responses"] = {"200": {"description": "the answer", "content": content}}
    if path in _OPEN:
        return
    operation["security"] = [{"key": []}, {}]
    error = {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}}
    for status, why in _ERRORS.items():
        operation["responses"][str(status)] = {"description": why, "content": error}
    body = _BODIES.get(path)
    if body is not None:
        name = path.strip("/").replace("/", "_") if isinstance(body, dict) else body.__name__
        schemas[name] = _schema(body, schemas)
        ref = {"schema": {"$ref": _REF.format(model=name)}}
        operation["requestBody"] = {"required": True, "content": {"application/json": ref}}


def _schema(body: type[BaseModel] | dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    if isinstance(body, dict):
        return body
    schema = body.model_json_schema(ref_template=_REF)
    schemas.update(schema.pop("$defs", {}))
    return schema
