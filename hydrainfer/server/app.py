"""The HTTP application: paths, limits, authentication. The answers are made in answers.py."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Query, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from hydrainfer.core import InstanceInfo, InvalidRequest
from hydrainfer.processor import ChatOptions, parse_messages, parse_tools
from hydrainfer.server.access import EXPOSED, Access
from hydrainfer.server.answers import Answers
from hydrainfer.server.body import Bodies, json_response
from hydrainfer.server.errors import Farewell, install_error_handlers
from hydrainfer.server.fields import ChatFields, CompletionFields, DetokenizeFields, TokenizeFields, parse
from hydrainfer.server.fronts import front_routes, ollama_routes
from hydrainfer.server.gate import Door, Gate, authorization_of
from hydrainfer.server.hosts import Hosts, is_loopback
from hydrainfer.server.instances import instance_card, trouble
from hydrainfer.server.intake import Intake
from hydrainfer.server.openapi import describe
from hydrainfer.server.page import EndedAfter, overview, page_routes
from hydrainfer.server.paths import Prefixed
from hydrainfer.server.tenants import Tenants

_RETRY_AFTER_S = "5"


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the application. `model_names`: the names that clients may use for the model. `stall_s`: the
    seconds without progress of an instance after which `/health` returns 503. `allowed_origins`: the origins whose
    pages may send requests from a browser; `*` allows all. `root_path`: the prefix under which a proxy serves the
    application; requests may come with it or without. `host`: the address that the server binds to; if that is loopback
    and no key is needed, only the names of `Hosts` may be in a request's `Host`. `max_connections`: those of
    clients that may be open at once."""

    model_names: tuple[str, ...]
    version: str
    max_body_bytes: int = 64 << 20
    stall_s: float = 30.0
    allowed_origins: tuple[str, ...] = ()
    root_path: str = ""
    host: str = ""
    max_connections: int = sys.maxsize


def create_app(
    settings: ServerSettings,
    intake: Intake,
    *,
    metrics: Callable[[], bytes],
    ended_after: EndedAfter = lambda _: (),
    tenants: Tenants | None = None,
    wall_clock: Callable[[], float] = time.time,
) -> FastAPI:
    """The ASGI application. `metrics` returns Prometheus text; `ended_after`: the latest ended requests, for the page
    at `/`. `tenants`: /v1, /api, /tokenize and /detokenize need one of their keys; default: open to all. `Connection`
    uses `app.state.door`. The caller closes the engine and the intake after the server has stopped."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        intake.sessions.close()

    tenants = tenants or Tenants()
    app = FastAPI(
        title="HydraInfer",
        version=settings.version,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.openapi = lambda: describe(app, settings.root_path)  # type: ignore[method-assign]
    install_error_handlers(app)
    door = app.state.door = Door(intake.sessions.admission, tenants, settings.max_connections)
    app.add_middleware(Gate, door=door, timeout_s=intake.timeout_s, max_body_bytes=settings.max_body_bytes)
    app.add_middleware(Farewell)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=EXPOSED,
        )
    if tenants.open and is_loopback(settings.host) and "*" not in settings.allowed_origins:
        app.add_middleware(Hosts, host=settings.host, origins=settings.allowed_origins)
    app.add_middleware(Access, counts=door.counts)
    if settings.root_path:
        app.add_middleware(Prefixed, prefix=settings.root_path)
    answers = Answers(intake, settings.model_names, wall_clock)
    bodies = Bodies(settings.max_body_bytes, intake.timeout_s)
    app.include_router(_open_routes(settings, intake, lambda: metrics() + door.counts.page()))
    guarded = [Depends(_require_key(tenants))]
    app.include_router(page_routes())
    app.include_router(_model_routes(settings, answers, bodies, int(wall_clock())), dependencies=guarded)
    app.include_router(_instance_routes(settings, intake, ended_after), dependencies=guarded)
    app.include_router(_text_routes(answers, bodies), dependencies=guarded)
    app.include_router(front_routes(answers, bodies), dependencies=guarded)
    app.include_router(ollama_routes(answers, bodies), dependencies=guarded)
    return app


def _open_routes(settings: ServerSettings, intake: Intake, metrics: Callable[[], bytes]) -> APIRouter:
    router = APIRouter()

    def instances() -> list[InstanceInfo]:
        return intake.sessions.handle.instances()

    @router.head("/health", include_in_schema=False)
    @router.get("/health")
    async def health() -> Response:
        why_not = trouble(instances(), settings.stall_s)
        if why_not is None:
            return json_response({"status": "ok"})
        return json_response(why_not, 503, {"Retry-After": _RETRY_AFTER_S})

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready")
    async def ready() -> Response:
        draining = {"status": "draining", "live": intake.sessions.n_live}
        why_not = draining if intake.sessions.admission.closed else trouble(instances(), settings.stall_s)
        if why_not is None:
            return json_response({"status": "ready"})
        return json_response(why_not, 503, {"Retry-After": _RETRY_AFTER_S})

    @router.get("/metrics")
    async def prometheus() -> Response:
        return Response(metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @router.get("/version")
    async def version() -> Response:
        return json_response({"version": settings.version})

    return router


def _model_routes(settings: ServerSettings, answers: Answers, bodies: Bodies, created: int) -> APIRouter:
    router = APIRouter()
    model = answers.intake.processor.model

    def model_card(name: str) -> dict[str, Any]:
        card = {"id": name, "object": "model", "created": created, "owned_by": "hydrainfer"}
        return {**card, "root": model.path.name, "max_model_len": model.n_context}

    @router.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [model_card(name) for name in settings.model_names]})

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        return json_response(model_card(answers.check_model(name)))

    @router.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await answers.chat(request, parse(ChatFields, await bodies.read(request)))

    @router.post("/v1/completions")
    async def complete(request: Request) -> Response:
        return await answers.complete(request, parse(CompletionFields, await bodies.read(request)))

    return router


def _instance_routes(settings: ServerSettings, intake: Intake, ended_after: EndedAfter) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/instances")
    async def instances() -> Response:
        cards = [instance_card(info) for info in intake.sessions.handle.instances()]
        return json_response({"object": "list", "data": cards})

    @router.get("/v1/overview")
    async def look(after: Annotated[int, Query(ge=0)] = 0) -> Response:
        body = overview(intake, settings.model_names[0], settings.version, ended_after, after)
        return Response(body, media_type="application/json", headers={"Cache-Control": "no-store"})

    return router


def _text_routes(answers: Answers, bodies: Bodies) -> APIRouter:
    router = APIRouter()
    intake = answers.intake
    processor = intake.processor

    @router.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        fields = parse(TokenizeFields, await bodies.read(request))
        answers.check_model(fields.model)
        if (fields.prompt is None) == (fields.messages is None):
            raise InvalidRequest("send either prompt or messages", param="prompt")
        if fields.prompt is not None:
            text, special = fields.prompt, fields.add_special_tokens
            ids = await intake.run(lambda: processor.encode(text, add_special=special))
        else:
            messages, tools = parse_messages(fields.messages), parse_tools(fields.tools)
            options = ChatOptions(tools, fields.chat_template_kwargs, fields.mm_processor_kwargs)
            ids = await answers.encode_chat(request, messages, options)
        body = {"count": len(ids), "max_model_len": processor.model.n_context, "tokens": ids}
        if fields.return_token_strs:
            body["token_strs"] = [processor.model.vocabulary.token_text(i) for i in ids]
        return json_response(body)

    @router.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        fields = parse(DetokenizeFields, await bodies.read(request))
        answers.check_model(fields.model)
        return json_response({"prompt": await intake.run(lambda: processor.decode(fields.tokens))})

    return router


def _require_key(tenants: Tenants) -> Callable[[Request], Awaitable[None]]:
    async def check(request: Request) -> None:  # async: a plain function would cost a thread per request
        tenants.find(authorization_of(request))

    return check
