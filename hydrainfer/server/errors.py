"""Error responses. OpenAI's format is `{"error": {"message", "type", "param", "code"}}`; paths under /v1/messages use
Anthropic's format, those under /api Ollama's."""

from __future__ import annotations

import asyncio
import logging
import math

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hydrainfer.core import HydraError, InternalError, InvalidRequest, Overloaded, shutting_down
from hydrainfer.server.paths import route_path

logger = logging.getLogger(__name__)

JSON = "application/json"
_INTERNAL = "the server failed to run this request; its log says more"


_ANTHROPIC = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: HydraError, path: str = "") -> bytes:
    """The body of an error response. `path`: the path of the request, without the prefix of `--root-path`."""
    if path.startswith("/v1/messages"):
        kind = _ANTHROPIC.get(error.status, "api_error")
        return orjson.dumps({"type": "error", "error": {"type": kind, "message": error.message}})
    if path.startswith("/api/"):
        return orjson.dumps({"error": error.message})
    return orjson.dumps(
        {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}
    )


def error_headers(error: HydraError) -> dict[str, str]:
    """The headers of an error response, without the body's type and length. Where retrying makes sense, `Retry-After`
    (whole seconds, at least 1) and `retry-after-ms` (milliseconds, preferred by the `openai` client)."""
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
        headers["retry-after-ms"] = str(max(1, math.ceil(error.retry_after_s * 1e3)))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return headers


def error_response(error: HydraError, path: str = "") -> Response:
    """The response to an error. `path`: as in `error_body`."""
    return Response(error_body(error, path), error.status, error_headers(error), JSON)


class Farewell:
    """Middleware that answers cancelled and failed requests. A request that is cancelled before it is answered gets a
    503: only a server that shuts down cancels one. An unexpected error becomes a 500. This is done here because the
    middlewares around this one would not see the 500 of Starlette's outermost layer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answered = False

        async def note(message: Message) -> None:
            nonlocal answered
            answered = True
            await send(message)

        try:
            await self._app(scope, receive, note)
        except asyncio.CancelledError:
            if scope["type"] != "http":
                raise
            if not answered:
                ending = shutting_down()
                await error_response(ending, route_path(scope))(scope, receive, send)
        except Exception as e:
            if scope["type"] != "http" or answered:
                raise
            await error_response(as_hydra_error(e), route_path(scope))(scope, receive, send)


def as_hydra_error(error: Exception) -> HydraError:
    """`error` as a `HydraError`. Typed errors are returned as they are; a `MemoryError` becomes `Overloaded`. Any other
    is logged and becomes a 500 without details."""
    if isinstance(error, HydraError):
        return error
    if isinstance(error, MemoryError):
        logger.error("no memory for a request")
        return Overloaded("the server has no memory for this request now; retry later", retry_after_s=1.0)
    logger.error("request failed", exc_info=error)
    return InternalError(_INTERNAL)


def install_error_handlers(app: FastAPI) -> None:
    """Install the handlers that make responses of the errors that routes raise."""

    def answer(request: Request, error: HydraError) -> Response:
        return error_response(error, route_path(request.scope))

    async def on_error(request: Request, error: Exception) -> Response:
        return answer(request, as_hydra_error(error))

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 404:
            known = InvalidRequest(f"unknown path {request.url.path}; see /docs for the paths", code="unknown_path")
        elif error.status_code == 405:
            known = InvalidRequest(f"{request.method} is not allowed on {request.url.path}", code="method_not_allowed")
        else:
            known = InvalidRequest(str(error.detail))
        response = answer(request, known)
        response.status_code = error.status_code
        response.headers.update(error.headers or {})
        return response

    async def on_hang_up(request: Request, error: Exception) -> Response:  # noqa: ARG001
        return Response(status_code=499)  # for the access log; the client is gone

    async def on_validation(request: Request, error: Exception) -> Response:  # noqa: ARG001
        return answer(request, InvalidRequest("the request's path or query is malformed"))

    app.add_exception_handler(HydraError, on_error)
    app.add_exception_handler(MemoryError, on_error)
    app.add_exception_handler(Exception, on_error)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(ClientDisconnect, on_hang_up)
    app.add_exception_handler(RequestValidationError, on_validation)
