"""Stores of blocks that instances share and that outlive them: files of a folder, or servers with Redis's protocol.

Called by `storage` (the threads of an instance), `assemble` and the commands. Never knows tensors, caches of an
instance or what a block is worth.
"""

from hydrainfer.cache import BlockName
from hydrainfer.stores.address import FolderAddress
from hydrainfer.stores.places import Place, check_folder, check_stores, make_folders, open_places, parse_places
from hydrainfer.stores.port import Contents, KindRow, Root, SharedStore, StoreError, StoreFull
from hydrainfer.stores.tools import PlaceTools, tools_of
from hydrainfer.stores.trial import TRIAL_KIND, Trial, remove_trial, try_out, try_places

__all__ = [
    "TRIAL_KIND",
    "BlockName",
    "Contents",
    "FolderAddress",
    "KindRow",
    "Place",
    "PlaceTools",
    "Root",
    "SharedStore",
    "StoreError",
    "StoreFull",
    "Trial",
    "check_folder",
    "check_stores",
    "make_folders",
    "open_places",
    "parse_places",
    "remove_trial",
    "tools_of",
    "try_out",
    "try_places",
]
