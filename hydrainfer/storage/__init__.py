"""The bytes of the caches: block stores, and transports that copy blocks between instances.

Called by runtime (reads and writes rows of blocks) and, behind a port, by the engine (pulls). Never decides which block
belongs to whom; that is `cache`.
"""

from hydrainfer.storage.store import BlockStore
from hydrainfer.storage.transport import LocalExports, LocalTransport, StorePuller, Transport

__all__ = ["BlockStore", "LocalExports", "LocalTransport", "StorePuller", "Transport"]
