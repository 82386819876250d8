"""The OpenAPI description: FastAPI's list of the routes, completed with bodies, errors and keys."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from hydrainfer.server.http import Protocols, Schema, object_schema

_OPEN = ("/health", "/ready", "/ping", "/load", "/metrics", "/version")
_OPERATORS = ("/reset_prefix_cache",)
_NOT_ADMIN = {403: "not the key of an operator"}
_REF = "#/components/schemas/{model}"


_ERRORS = {400: "a value is wrong", 401: "no known key", 429: "too much waits; Retry-After", 503: "Retry-After"}


def describe(app: FastAPI, prefix: str, protocols: Protocols) -> dict[str, Any]:
    """The OpenAPI document, made on the first call. `prefix`: the path prefix under which a proxy serves the app."""
    if app.openapi_schema is None:
        made = get_openapi(title=app.title, version=app.version, routes=app.routes)
        made["servers"] = [{"url": prefix or "/"}]
        schemas: dict[str, Any] = {"Error": object_schema("error", "error: any")}
        for path, operations in made["paths"].items():
            for operation in operations.values():
                _complete(path, operation, schemas, protocols)
        key = {"type": "http", "scheme": "bearer", "description": "Where the server has keys"}
        made["components"] = {"schemas": schemas, "securitySchemes": {"key": key}}
        app.openapi_schema = made
    return app.openapi_schema


def _complete(path: str, operation: dict[str, Any], schemas: dict[str, Any], protocols: Protocols) -> None:
    kind = "text/plain" if path == "/metrics" else "application/json"
    content: dict[str, Any] = {kind: {}}
    content |= {streamed: {} for streamed in protocols.media_types(path)}
    operation["responses"] = {"200": {"description": "the answer", "content": content}}
    if path in _OPEN:
        return
    of_operators = path in _OPERATORS
    operation["security"] = [{"key": []}] if of_operators else [{"key": []}, {}]
    error = {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}}
    for status, why in (_ERRORS | (_NOT_ADMIN if of_operators else {})).items():
        operation["responses"][str(status)] = {"description": why, "content": error}
    body = protocols.bodies.get(path)
    if body is not None:
        schema = body.schema
        name = path.strip("/").replace("/", "_") if isinstance(schema, dict) else schema.__name__
        schemas[name] = _schema(schema, schemas)
        ref = {"schema": {"$ref": _REF.format(model=name)}}
        operation["requestBody"] = {"required": True, "content": {"application/json": ref}}


def _schema(body: Schema, schemas: dict[str, Any]) -> dict[str, Any]:
    if isinstance(body, dict):
        return body
    schema = body.model_json_schema(ref_template=_REF)
    schemas.update(schema.pop("$defs", {}))
    return schema
