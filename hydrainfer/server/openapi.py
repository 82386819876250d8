"""The OpenAPI description: FastAPI's list of the routes, completed with bodies, examples, errors and keys."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from hydrainfer.server.http import Body, Protocols

_OPEN = ("/health", "/ready", "/ping", "/load", "/metrics", "/version")
_OPERATORS = ("/reset_prefix_cache",)
_PROBES = ("/health", "/ready", "/ping")
_REF = "#/components/schemas/{model}"
_ABOUT = (
    "OpenAI's, Anthropic's and Ollama's APIs before one model. Fields of these APIs that are not listed change "
    "nothing, or are refused by name."
)

_ERRORS = {
    401: "The server has keys, and the request has none of them.",
    403: "The server has no keys, and Host is no name of this machine.",
}
_OPERATOR_ERRORS = {
    400: "An option of vLLM's that is not supported is true.",
    403: "The key is none of an operator, or the server has no keys.",
    503: "An instance does not answer.",
}
_BODY_ERRORS = {
    400: "A field is wrong, unknown or not supported, or the prompt is too long; the message names the field.",
    404: "The server has no model of this name.",
    408: "The body did not arrive in time.",
    413: "The body or a picture is too large.",
    415: "Content-Type is not application/json, or the body is compressed.",
    422: "A picture cannot be fetched or decoded.",
    429: "Too much work waits already, or the key's tenant is over a limit; Retry-After says when to come back.",
}
_WORK_ERRORS = {
    500: "A step of the model failed.",
    503: "The server is shutting down, or no instance runs a stage that the request needs; see Retry-After.",
    504: "The deadline has passed, or cannot be met.",
}


def describe(app: FastAPI, prefix: str, protocols: Protocols) -> dict[str, Any]:
    """The OpenAPI document, made on the first call. `prefix`: the path prefix under which a proxy serves the app."""
    if app.openapi_schema is None:
        made = get_openapi(title=app.title, version=app.version, description=_ABOUT, routes=app.routes)
        made["servers"] = [{"url": prefix or "/"}]
        schemas: dict[str, Any] = {"Error": _error_schema()}
        for path, operations in made["paths"].items():
            for operation in operations.values():
                _complete(path, operation, schemas, protocols)
        key = {"type": "http", "scheme": "bearer", "description": "Where the server has keys"}
        made["components"] = {"schemas": schemas, "securitySchemes": {"key": key}}
        app.openapi_schema = made
    return app.openapi_schema


def _error_schema() -> dict[str, Any]:
    error = {"description": "What is wrong, in the format of the path's protocol.", "examples": [{"message": "…"}]}
    return {"type": "object", "required": ["error"], "properties": {"error": error}}


def _complete(path: str, operation: dict[str, Any], schemas: dict[str, Any], protocols: Protocols) -> None:
    kind = "application/json"
    if path == "/metrics":
        kind = "text/plain"
    content: dict[str, Any] = {kind: {}}
    content |= {streamed: {} for streamed in protocols.media_types(path)}
    operation["responses"] = {"200": {"description": "The answer.", "content": content}}
    error = {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}}
    for status, why in _errors(path, operation, protocols).items():
        operation["responses"][str(status)] = {"description": why, "content": error}
    if path in _OPERATORS:
        operation["security"] = [{"key": []}]
    elif path not in _OPEN:
        operation["security"] = [{"key": []}, {}]
    body = protocols.bodies.get(path)
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": _content(body, schemas)}}


def _errors(path: str, operation: dict[str, Any], protocols: Protocols) -> dict[int, str]:
    """What each status of an error means at a path."""
    if path in _PROBES:
        return {503: "The body says what is wrong; Retry-After says when to ask again."}
    if path in _OPEN:
        return {}
    errors = dict(_ERRORS)
    if path in _OPERATORS:
        return errors | _OPERATOR_ERRORS
    if path in protocols.bodies:
        errors |= _BODY_ERRORS
    elif operation.get("parameters"):
        errors |= {status: _BODY_ERRORS[status] for status in (400, 404)}
    if path in protocols.work:
        errors |= _WORK_ERRORS
    return dict(sorted(errors.items()))


def _content(body: Body, schemas: dict[str, Any]) -> dict[str, Any]:
    """A body's schema and example. The schema is added to `schemas`, with those of the objects in it."""
    name = body.fields.__name__
    schema = body.fields.model_json_schema(ref_template=f"#/components/schemas/{name}.{{model}}")
    schemas |= {f"{name}.{inner}": shape for inner, shape in schema.pop("$defs", {}).items()}
    schemas[name] = schema
    return {"schema": {"$ref": _REF.format(model=name)}, "example": dict(body.example)}
