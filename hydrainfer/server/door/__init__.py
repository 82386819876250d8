"""The door: whether a request may come in, and when.

A request is let in or refused by its headers: key and limits of its tenant, seconds of work that wait, and the host it
names. It then waits for its turn to be prepared. Called by the application and uvicorn. Of bodies it reads only what
decides the order.
"""

from hydrainfer.server.door.connection import Connection
from hydrainfer.server.door.gate import Door, Gate, authorization_of
from hydrainfer.server.door.hosts import Hosts, is_loopback
from hydrainfer.server.door.overload import OverloadControl, Place, Urgency, Work
from hydrainfer.server.door.standing import Standing, handler_of, tenant_of
from hydrainfer.server.door.tenants import Tenants

__all__ = [
    "Connection",
    "Door",
    "Gate",
    "Hosts",
    "OverloadControl",
    "Place",
    "Standing",
    "Tenants",
    "Urgency",
    "Work",
    "authorization_of",
    "handler_of",
    "is_loopback",
    "tenant_of",
]
