"""The cache folder of a user, which is kept from run to run, and the files in it, which several processes may write."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path


def cache_folder() -> Path:
    """The cache folder, which exists: `$XDG_CACHE_HOME/hydrainfer`, else `~/.cache/hydrainfer`. If that cannot be
    written (a read-only home, or none), a private folder of this user under the temporary directory. Raises `OSError`
    if that is full."""
    with suppress(OSError, RuntimeError):  # read-only, or no home directory
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(base) / "hydrainfer"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    return _private()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """A context that only one process or thread at a time is in for this path, if its folder can hold a lock: on a full
    disk it cannot. The folder is made if there is none."""
    with ExitStack() as stack:
        with suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            lock = stack.enter_context(path.with_suffix(".lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def keep(path: Path, data: bytes) -> None:
    """Replace a file by one with these bytes, at once. If the disk is full, what was there stays."""
    with suppress(OSError):
        fd, part = tempfile.mkstemp(".part", path.stem, path.parent)
        try:
            with open(fd, "wb") as file:
                file.write(data)
            os.replace(part, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(part)
            raise


def _private() -> Path:
    """The private folder, the same for every process of this user. Code in it is executed, so no other user may have
    made it."""
    folder = Path(tempfile.gettempdir()) / f"hydrainfer.cache-{os.getuid()}"
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if folder.is_dir() and not folder.is_symlink() and found.st_uid == os.getuid() and not found.st_mode & 0o077:
            return folder
    return Path(tempfile.mkdtemp(prefix="hydrainfer.cache-"))
