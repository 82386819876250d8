"""The folder of a run's sockets, and how it goes away even if the server was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

PREFIX = "hydrainfer-"
_LOCK = "lock"
_LONGEST_BASE = 50  # an ipc address ends at 107 bytes


class RunFolder:
    """Only this user may look inside. A lock says that the run lives, in whatever container it does; folders of runs
    that do not are removed by the next one."""

    def __init__(self) -> None:
        base = tempfile.gettempdir()
        base = base if len(base) <= _LONGEST_BASE else "/tmp"
        for old in Path(base).glob(f"{PREFIX}*-*"):
            _remove_if_dead(old)
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=base))
        self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_if_dead(old: Path) -> None:
    with suppress(OSError):  # another user's, or going away right now
        lock = os.open(old / _LOCK, os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(old, ignore_errors=True)
        finally:
            os.close(lock)
