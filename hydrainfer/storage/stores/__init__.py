"""Stores of blocks that instances share and that outlive them: files of a folder, or servers with Redis's protocol."""

from hydrainfer.cache import BlockName
from hydrainfer.storage.stores.client import ThreadedClient
from hydrainfer.storage.stores.places import open_places, parse_places
from hydrainfer.storage.stores.port import Contents, Root, SharedStore, StoreError, StoreFull

__all__ = [
    "BlockName",
    "Contents",
    "Root",
    "SharedStore",
    "StoreError",
    "StoreFull",
    "ThreadedClient",
    "open_places",
    "parse_places",
]
