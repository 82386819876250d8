"""Request paths without the prefix under which a proxy serves the application."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class Prefixed:
    """Middleware for an application that a proxy serves under `prefix`. Requests may come with it or without."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app, self._prefix = app, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, "root_path": self._prefix}, receive, send)


def route_path(scope: Scope) -> str:
    """The path as the routes know it: without `root_path`, which ASGI servers put before it."""
    path: str = scope["path"]
    prefix: str = scope.get("root_path", "")
    return path[len(prefix) :] if prefix and path.startswith(prefix + "/") else path
