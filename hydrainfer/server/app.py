"""The HTTP application: paths, limits, authentication. The answers are made in `openai/answers.py`."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Query, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from hydrainfer.core import InstanceInfo
from hydrainfer.metrics import HttpCounts
from hydrainfer.server.door import Door, Gate, Hosts, Tenants, authorization_of, handler_of, is_loopback, tenant_of
from hydrainfer.server.http import (
    EXPOSED,
    Access,
    Bodies,
    Farewell,
    FieldCheck,
    Prefixed,
    Protocol,
    Protocols,
    install_error_handlers,
    json_response,
)
from hydrainfer.server.live import Intake
from hydrainfer.server.openai import Answers
from hydrainfer.server.openapi import describe
from hydrainfer.server.operators import operator_routes
from hydrainfer.server.page import EndedAfter, instance_card, overview_body, page_routes, trouble
from hydrainfer.server.protocols import PROTOCOLS

_RETRY_AFTER_S = "5"


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the application. `model_names`: the names that clients may use for the model. `stall_s`: the
    seconds without progress of an instance after which `/health` returns 503. `allowed_origins`: the origins whose
    pages may send requests from a browser; `*` allows all. `root_path`: the prefix under which a proxy serves the
    application; requests may come with it or without. `host`: the address that the server binds to; if that is loopback
    and no key is needed, only the names of `Hosts` may be in a request's `Host`. `max_connections`: those of
    clients that may be open at once. `refuses_unknown`: requests with fields that nobody knows. `proxies`:
    addresses and networks whose X-Forwarded-For and X-Forwarded-Proto are believed. `status_classes`: as in
    `HttpCounts`."""

    model_names: tuple[str, ...]
    version: str
    max_body_bytes: int = 64 << 20
    stall_s: float = 30.0
    allowed_origins: tuple[str, ...] = ()
    root_path: str = ""
    host: str = ""
    max_connections: int = sys.maxsize
    refuses_unknown: bool = True
    proxies: tuple[str, ...] = ()
    status_classes: bool = False


def create_app(
    settings: ServerSettings,
    intake: Intake,
    *,
    metrics: Callable[[], bytes],
    ended_after: EndedAfter = lambda _: (),
    tenants: Tenants | None = None,
    protocols: Sequence[Protocol] = PROTOCOLS,
    wall_clock: Callable[[], float] = time.time,
) -> FastAPI:
    """The ASGI application. `metrics` returns Prometheus text; `ended_after`: the latest ended requests, for the page
    at `/`. `tenants`: all but the open routes need one of their keys; default: open to all. `protocols`: the APIs that
    it speaks. `Connection` uses `app.state.door`. The caller closes the engine and the intake after the server has
    stopped."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        intake.sessions.close()

    tenants = tenants or Tenants()
    spoken = Protocols(protocols)
    app = FastAPI(
        title="HydraInfer",
        version=settings.version,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.openapi = lambda: describe(app, settings.root_path, spoken)  # type: ignore[method-assign]
    install_error_handlers(app, spoken)
    counts = HttpCounts(settings.status_classes)
    door = app.state.door = Door(intake.sessions.overload, tenants, spoken, settings.max_connections, counts)
    app.add_middleware(Gate, door=door, timeout_s=intake.timeout_s, max_body_bytes=settings.max_body_bytes)
    app.add_middleware(Farewell, protocols=spoken)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=EXPOSED,
        )
    if tenants.open and is_loopback(settings.host) and "*" not in settings.allowed_origins:
        app.add_middleware(Hosts, host=settings.host, origins=settings.allowed_origins, protocols=spoken)
    app.add_middleware(Access, counts=door.counts, handler_of=handler_of, tenant_of=tenant_of)
    if settings.proxies:
        app.add_middleware(ProxyHeadersMiddleware, trusted_hosts=list(settings.proxies))
    if settings.root_path:
        app.add_middleware(Prefixed, prefix=settings.root_path)
    answers = Answers(intake, settings.model_names, wall_clock)
    bodies = Bodies(settings.max_body_bytes, intake.timeout_s, FieldCheck(spoken.known, settings.refuses_unknown).check)
    app.include_router(_open_routes(settings, intake, lambda: metrics() + door.counts.page()))
    guarded = [Depends(_require_key(tenants))]
    app.include_router(operator_routes(tenants, intake.sessions))
    app.include_router(page_routes())
    first, *others = (protocol.routes(answers, bodies) for protocol in protocols)
    for router in (first, _instance_routes(settings, intake, ended_after), *others):  # as /openapi.json has them
        app.include_router(router, dependencies=guarded)
    return app


def _open_routes(settings: ServerSettings, intake: Intake, metrics: Callable[[], bytes]) -> APIRouter:
    router = APIRouter()

    def instances() -> list[InstanceInfo]:
        return intake.sessions.handle.instances()

    @router.head("/health", include_in_schema=False)
    @router.get("/health", summary="Whether every stage makes progress")
    async def health() -> Response:
        """200 while every stage has an instance and work makes progress; else 503, which says what is wrong."""
        why_not = trouble(instances(), settings.stall_s)
        if why_not is None:
            return json_response({"status": "ok"})
        return json_response(why_not, 503, {"Retry-After": _RETRY_AFTER_S})

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready", summary="Whether new requests are taken")
    async def ready() -> Response:
        """200 while /health is 200 and new requests are taken; 503 once the server is shutting down."""
        draining = {"status": "draining", "live": intake.sessions.n_live}
        why_not = draining if intake.sessions.overload.closed else trouble(instances(), settings.stall_s)
        if why_not is None:
            return json_response({"status": "ready"})
        return json_response(why_not, 503, {"Retry-After": _RETRY_AFTER_S})

    @router.post("/ping", include_in_schema=False)
    @router.get("/ping", summary="As /health, under the name that SageMaker asks for")
    async def ping() -> Response:
        """Answers what /health answers."""
        return await health()

    @router.get("/load", summary="How many requests are under way")
    async def load() -> Response:
        """The number of requests that have come and have not ended."""
        return json_response({"server_load": intake.sessions.overload.n_requests})

    @router.get("/metrics", summary="Prometheus metrics")
    async def prometheus() -> Response:
        """Counters and histograms of requests, stages, caches and instances, as Prometheus reads them."""
        return Response(metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @router.get("/version", summary="The version")
    async def version() -> Response:
        """The version of HydraInfer."""
        return json_response({"version": settings.version})

    return router


_AFTER = Query(ge=0, description="Only requests with higher numbers; 0: all that are kept.", examples=[0])


def _instance_routes(settings: ServerSettings, intake: Intake, ended_after: EndedAfter) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/instances", summary="The instances and their load")
    async def instances() -> Response:
        """Every instance of the layout: its stages, its state, its load and its caches."""
        cards = [instance_card(info) for info in intake.sessions.handle.instances()]
        return json_response({"object": "list", "data": cards})

    @router.get("/v1/overview", summary="What the page at / reads")
    async def look(after: Annotated[int, _AFTER] = 0) -> Response:
        """The instances, the queues, what a request may hold, and the times of the latest requests that have ended."""
        name, most = settings.model_names[0], settings.max_body_bytes
        body = overview_body(intake, name, settings.version, ended_after, after, body_bytes=most)
        return Response(body, media_type="application/json", headers={"Cache-Control": "no-store"})

    return router


def _require_key(tenants: Tenants) -> Callable[[Request], Awaitable[None]]:
    async def check(request: Request) -> None:  # async: a plain function would cost a thread per request
        tenants.find(authorization_of(request))

    return check
