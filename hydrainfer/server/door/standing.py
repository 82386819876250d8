"""The standing of a request at the door: who sends it, and the place it has."""

from __future__ import annotations

from starlette.types import Scope

from hydrainfer.server.door.overload import Place, Urgency
from hydrainfer.server.door.returns import Mark
from hydrainfer.server.door.tenants import Tenant, Tenants


class Standing:
    """What the door knows of a request. `mark`: set by the connection, if the request asks for work. `path`: set by the
    gate, if it watches this path. `tenant` and `place`: of a request that the gate has let in."""

    __slots__ = ("mark", "path", "place", "tenant")

    def __init__(self) -> None:
        self.mark: Mark | None = None
        self.path = ""
        self.tenant: Tenant | None = None
        self.place: Place | None = None

    @classmethod
    def of(cls, scope: Scope) -> Standing:
        """The standing of the request with this scope."""
        state = scope.setdefault("state", {})
        standing: Standing | None = state.get("standing")
        if standing is None:
            standing = state["standing"] = cls()
        return standing

    def urgency(self, priority: int | None, within_s: float | None) -> Urgency:
        """The urgency by headers and fields: the field's priority comes first, and the shorter time counts. Raises
        `InvalidRequest`."""
        if self.place is None or self.tenant is None:
            return Urgency.read(priority, within_s)
        urgency = self.place.urgency.with_fields(priority, within_s)
        Tenants.check_priority(self.tenant, urgency.priority)
        return urgency

    def salt(self, own: str | None) -> str:
        """The cache salt of the request: its own and, unless its tenant shares the cache, the tenant's name."""
        if self.tenant is None:
            return own or ""
        return self.tenant.salt(own)


def tenant_of(scope: Scope) -> str:
    """The name of the request's tenant; "" if it has none, or none was asked for."""
    tenant = Standing.of(scope).tenant
    return tenant.name if tenant is not None else ""


def handler_of(scope: Scope) -> str:
    """The path under which a request is counted: that of its route, or that at the gate if no route has seen it."""
    route = scope.get("route")
    return getattr(route, "path", "") or Standing.of(scope).path or "none"
