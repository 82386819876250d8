"""The folder of files that a user keeps from one run to the next."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path


def cache_folder() -> Path:
    """An existing folder: `$XDG_CACHE_HOME/hydrainfer`, else `~/.cache/hydrainfer`; where neither can be written (a
    read-only home, or none), one under the temporary directory that is this user's alone. Raises `OSError` if that is
    full."""
    with suppress(OSError, RuntimeError):  # read-only; no home is known
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(base) / "hydrainfer"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    return _private()


def _private() -> Path:
    """The same one for every process of this user; what is in it is executed, so nobody else may have made it."""
    folder = Path(tempfile.gettempdir()) / f"hydrainfer.cache-{os.getuid()}"
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if folder.is_dir() and not folder.is_symlink() and found.st_uid == os.getuid() and not found.st_mode & 0o077:
            return folder
    return Path(tempfile.mkdtemp(prefix="hydrainfer.cache-"))
