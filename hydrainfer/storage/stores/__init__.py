"""Stores of blocks that instances share and that outlive them: files of a folder, or servers with Redis's protocol."""

from hydrainfer.storage.stores.port import BlockName, Contents, Root, SharedStore, StoreError, StoreFull

__all__ = ["BlockName", "Contents", "Root", "SharedStore", "StoreError", "StoreFull"]
