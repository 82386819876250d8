"""The host names under which an open server on loopback may be used.

A web page can have its own name resolve to 127.0.0.1 (DNS rebinding). Its requests then count as same-origin in the
browser, so CORS does not stop them; but their `Host` header has the page's name.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from hydrainfer.core import InvalidRequest
from hydrainfer.server.http import Protocols, route_path

_LOCAL = (".localhost", ".local", ".internal")  # no public name ends in these


class HostNotAllowed(InvalidRequest):
    """403: the `Host` header has a name that pages of the web may have."""

    status, type, code = 403, "permission_error", "host_not_allowed"


class Hosts:
    """Middleware that answers 403 if a web page may have the name in the request's `Host`. Allowed are IP addresses,
    names of this machine and of private networks, `host` (what the server binds to), and the hosts of `origins`."""

    def __init__(self, app: ASGIApp, host: str, origins: Iterable[str], protocols: Protocols) -> None:
        self._app = app
        self._protocols = protocols
        names = (urlsplit(origin).hostname or "" for origin in origins)
        self._known = {"", "localhost", host.lower(), socket.gethostname().lower(), *names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            name = _host_name(next((v for k, v in scope["headers"] if k == b"host"), b""))
            if not self._allows(name):
                message = (
                    f"the host {name[:255]!r} is not allowed: set --api-key, or name the host in --allowed-origins"
                )
                response = self._protocols.error_response(HostNotAllowed(message), route_path(scope))
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _allows(self, name: str) -> bool:
        return name in self._known or name.endswith(_LOCAL) or _is_address(name)


def is_loopback(host: str) -> bool:
    """Whether a server that binds to `host`, an address or a name, can only be reached from its own machine."""
    return host == "localhost" or host.endswith(".localhost") or (_is_address(host) and ip_address(host).is_loopback)


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _host_name(header: bytes) -> str:
    """The name or address in a `Host` header, in lower case and without the port; the whole header if it has none."""
    text = header.decode("latin-1")
    try:
        return (urlsplit(f"//{text}").hostname or text).removesuffix(".")
    except ValueError:  # such as an unpaired bracket
        return text
