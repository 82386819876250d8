"""The page at `/`: what the instances do, how fast answers are, and a playground.

Its files are in `web`: plain HTML, CSS and JavaScript, sent as they are. They contain no data of the server, so they
need no key. The data shown come from `/v1`, which needs a key if the server has keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_PAGES = {"index.html": "/", "docs.html": "/docs"}
_SAFE = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data: blob:; media-src 'self' data: blob:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes() -> APIRouter:
    """The routes of `/`, `/docs` and their files, which are read once."""
    router = APIRouter(include_in_schema=False)
    for file in sorted(files("hydrainfer.server.page").joinpath("web").iterdir(), key=lambda f: f.name):
        path = _PAGES.get(file.name, f"/web/{file.name}")
        router.add_api_route(path, _sender(file.name, file.read_bytes()), methods=["GET", "HEAD"])
    return router


def _sender(name: str, content: bytes) -> Callable[[Request], Any]:
    etag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    headers, kind = {**_SAFE, "ETag": etag}, _TYPES[name.rpartition(".")[2]]

    async def send(request: Request) -> Response:
        if request.headers.get("if-none-match") == etag:
            return Response(None, 304, headers)
        return Response(content, 200, headers, kind)

    return send
