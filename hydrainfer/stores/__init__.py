"""Stores of blocks that instances share and that outlive them: files of a folder, or servers with Redis's protocol.

Called by `storage` (the threads of an instance), `assemble` and the commands. Never knows tensors, caches of an
instance or what a block is worth.
"""

from hydrainfer.cache import BlockName
from hydrainfer.stores.places import open_places, parse_places
from hydrainfer.stores.port import Contents, Root, SharedStore, StoreError, StoreFull

__all__ = [
    "BlockName",
    "Contents",
    "Root",
    "SharedStore",
    "StoreError",
    "StoreFull",
    "open_places",
    "parse_places",
]
