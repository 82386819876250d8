"""Several instances as one: the router in front of them and between them, and the links they talk over.

Called by assemble; the server sees the router as an `EngineHandle`, engines see it as their `Placement`. Knows an
instance only by its handle; never schedules and never touches caches or tensors.
"""

from hydrainfer.cluster.hashing import HashRing
from hydrainfer.cluster.local import LocalLink
from hydrainfer.cluster.router import Balancing, InstanceHandle, Member, Router

__all__ = ["Balancing", "HashRing", "InstanceHandle", "LocalLink", "Member", "Router"]
