"""The bytes of the caches: block stores, and transports that copy blocks between instances.

Called by runtime (reads and writes rows of blocks) and, behind a port, by the engine (pulls). Never decides who owns a
block; `cache` does.
"""

from hydrainfer.storage.exports import Exports, Routes
from hydrainfer.storage.layers import ACCESS, CudaQueue, LayerLoader
from hydrainfer.storage.local import LocalTransport
from hydrainfer.storage.places import WAYS, check_between, check_transport, check_within, needs_shared
from hydrainfer.storage.puller import StorePuller, between_tiers
from hydrainfer.storage.store import BlockStore, Region
from hydrainfer.storage.store_client import ThreadedClient
from hydrainfer.storage.transport import LocalExports, TransportError, Unreachable
from hydrainfer.storage.way import Way

__all__ = [
    "ACCESS",
    "WAYS",
    "BlockStore",
    "CudaQueue",
    "Exports",
    "LayerLoader",
    "LocalExports",
    "LocalTransport",
    "Region",
    "Routes",
    "StorePuller",
    "ThreadedClient",
    "TransportError",
    "Unreachable",
    "Way",
    "between_tiers",
    "check_between",
    "check_transport",
    "check_within",
    "needs_shared",
]
