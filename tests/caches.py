"""A cache folder of a test's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from hydrainfer.config import cache_folder

_OF_THE_MACHINE = ("kernels", "attention", "products", "shapes")


def take_own_cache(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Make `folder` the cache of this process and of those that it starts. Kernels and measurements of the machine are
    shared with the cache that was in use: to compile them again takes a minute on busy cores."""
    shared, own = cache_folder(), folder / "hydrainfer"
    own.mkdir(parents=True)
    for name in _OF_THE_MACHINE:
        (shared / name).mkdir(exist_ok=True)
        (own / name).symlink_to(shared / name)
    patch.setenv("XDG_CACHE_HOME", str(folder))
