"""Requests that fail: the errors that routes raise, and requests that are cancelled, as responses."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hydrainfer.core import HydraError, InvalidRequest, shutting_down
from hydrainfer.server.http.errors import as_hydra_error
from hydrainfer.server.http.paths import route_path
from hydrainfer.server.http.protocol import Protocols


class Farewell:
    """Middleware that answers cancelled and failed requests. A request that is cancelled before it is answered gets a
    503: only a server that shuts down cancels one. An unexpected error becomes a 500. This is done here because the
    middlewares around this one would not see the 500 of Starlette's outermost layer."""

    def __init__(self, app: ASGIApp, protocols: Protocols) -> None:
        self._app = app
        self._protocols = protocols

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
                await self._protocols.error_response(ending, route_path(scope))(scope, receive, send)
        except Exception as e:
            if scope["type"] != "http" or answered:
                raise
            response = self._protocols.error_response(as_hydra_error(e), route_path(scope))
            await response(scope, receive, send)


def install_error_handlers(app: FastAPI, protocols: Protocols) -> None:
    """Install the handlers that make responses of the errors that routes raise."""

    def answer(request: Request, error: HydraError) -> Response:
        return protocols.error_response(error, route_path(request.scope))

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
