"""The bytes of the caches: block stores.

Called by runtime (reads and writes rows of blocks). Never decides which block belongs to whom; that is `cache`.
"""

from hydrainfer.storage.store import BlockStore

__all__ = ["BlockStore"]
