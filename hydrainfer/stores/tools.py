"""What people may do with a place of a store, also while servers use it: look, check all blocks, remove all blocks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from hydrainfer.stores.address import FolderAddress
from hydrainfer.stores.places import Place, check_redis
from hydrainfer.stores.port import Contents, KindRow


class PlaceTools(NamedTuple):
    """The tools of one place; all raise `StoreError`. `summary`: a row per model and kind. `contents`: what the place
    says at once, and its limit. `clear` removes all blocks, and returns how many there were and their bytes. `check`
    removes broken blocks, and returns how many are whole and how many were broken."""

    summary: Callable[[], list[KindRow]]
    contents: Callable[[], Contents]
    clear: Callable[[], tuple[int, int]]
    check: Callable[[], tuple[int, int]]


def tools_of(place: Place, environ: Mapping[str, str] = os.environ) -> PlaceTools:
    """The tools of a place. Nothing is opened yet. Raises `ConfigError` if a package is missing."""
    if isinstance(place.address, FolderAddress):
        from hydrainfer.stores import files

        path, limit_bytes = place.address
        return PlaceTools(
            partial(files.summary, path),
            partial(files.contents, path, limit_bytes),
            partial(files.clear, path),
            partial(files.check, path),
        )
    check_redis()
    from hydrainfer.stores import resp_tools

    one = (place.text, environ)
    return PlaceTools(
        partial(resp_tools.summary, *one),
        partial(resp_tools.contents, *one),
        partial(resp_tools.clear, *one),
        partial(resp_tools.check, *one),
    )
