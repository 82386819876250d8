"""The page at `/`: what the instances do, how fast answers are, and a playground; and `/v1/overview`, which it reads.

Its files are in `web`: plain HTML, CSS and JavaScript, sent as they are. They contain no data of the server, so they
need no key. The data shown come from `/v1`, which needs a key if the server has keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from hydrainfer.core import Layout, Role
from hydrainfer.metrics import INTERVALS, Ended
from hydrainfer.server.instances import instance_card
from hydrainfer.server.intake import Intake

EndedAfter = Callable[[int], Sequence[Ended]]
"""A function that returns the latest ended requests after the one with this number."""
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_PAGES = {"index.html": "/", "docs.html": "/docs"}
_SAFE = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes() -> APIRouter:
    """The routes of `/`, `/docs` and their files, which are read once."""
    router = APIRouter(include_in_schema=False)
    for file in sorted(files("hydrainfer.server").joinpath("web").iterdir(), key=lambda f: f.name):
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


def overview(intake: Intake, model: str, version: str, ended_after: EndedAfter, number: int) -> bytes:
    """The body of `/v1/overview?after=number`."""
    admission, now = intake.sessions.admission, intake.sessions.clock()
    infos = intake.sessions.handle.instances()
    waiting = admission.waiting()
    body = {
        "object": "overview",
        "model": model,
        "version": version,
        "pictures": intake.processor.model.images is not None,
        "layout": str(Layout(tuple(Role.parse(i.role) for i in infos))) if infos else "",
        "live": admission.n_live,
        "draining": admission.closed,
        "queue_s": {kind: round(seconds, 3) for kind, seconds in waiting.queue_s.items()},
        "refused": sum(waiting.refused.values()),
        "instances": [instance_card(info) for info in infos],
        "ended": [_entry(one, now) for one in ended_after(number)],
    }
    return orjson.dumps(body)


def _entry(one: Ended, now: float) -> dict[str, Any]:
    times = {"ttft_s": one.ttft_s, "tpot_s": one.tpot_s, "e2e_s": one.e2e_s}
    return {
        "number": one.number,
        "ago_s": round(max(now - one.finished_s, 0.0), 3),
        "tokens": one.n_tokens,
        **{name: None if value is None else round(value, 6) for name, value in times.items()},
        "intervals_s": {name: round(one.intervals_s.get(name, 0.0), 6) for name in INTERVALS},
    }
