"""What a protocol declares of itself: its paths, bodies, errors and routes. Whoever needs the list reads it here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from fastapi import APIRouter
from starlette.responses import Response

from hydrainfer.core import HydraError
from hydrainfer.server.http.errors import JSON, error_body, error_headers
from hydrainfer.server.http.fields import Described
from hydrainfer.server.http.known import KnownFields


class Body(NamedTuple):
    """The request body of a path. `fields`: their descriptions. `example`: a body that the built-in model answers.
    `known`: all its fields, or None if they are not checked."""

    fields: type[Described]
    example: Mapping[str, Any]
    known: KnownFields | None = None


class Protocol(NamedTuple):
    """An API that clients speak. `routes` makes its routes from the server's `Answers` and `Bodies`. `paths` ask for
    completions, which are streamed as `media_type`; requests to the `brief` paths are short tasks, which wait in no
    queue but count as requests of their tenants. `bodies`: by path. Errors of all paths that begin with `prefix` have
    the format of `error`; default: OpenAI's."""

    routes: Callable[..., APIRouter]
    paths: tuple[str, ...] = ()
    brief: tuple[str, ...] = ()
    bodies: Mapping[str, Body] = MappingProxyType({})
    prefix: str = ""
    error: Callable[[HydraError], bytes] = error_body
    media_type: str = "text/event-stream"


class Protocols:
    """The protocols of a server, in the order of their routes. `work`, `brief`: their paths."""

    def __init__(self, protocols: Sequence[Protocol]) -> None:
        self.all = tuple(protocols)
        self.work = frozenset(path for protocol in protocols for path in protocol.paths)
        self.brief = frozenset(path for protocol in protocols for path in protocol.brief)
        self.bodies = {path: body for protocol in protocols for path, body in protocol.bodies.items()}
        self._by_prefix = sorted(protocols, key=lambda protocol: -len(protocol.prefix))

    @property
    def known(self) -> dict[str, KnownFields]:
        """The fields of each path whose fields are checked."""
        return {path: body.known for path, body in self.bodies.items() if body.known is not None}

    def media_types(self, path: str) -> list[str]:
        """The types of the streams that a path may answer with."""
        return [protocol.media_type for protocol in self.all if path in protocol.paths]

    def error_body(self, error: HydraError, path: str) -> bytes:
        """The body of an error response. `path`: the path of the request, without the prefix of `--root-path`."""
        for protocol in self._by_prefix:
            if path.startswith(protocol.prefix):
                return protocol.error(error)
        return error_body(error)

    def error_response(self, error: HydraError, path: str) -> Response:
        """The response to an error. `path`: as in `error_body`."""
        return Response(self.error_body(error, path), error.status, error_headers(error), JSON)
