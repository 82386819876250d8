"""The folder of a run, with its sockets and Ray's session and token. It is removed even if the server was killed."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from hydrainfer.cluster import guardian
from hydrainfer.cluster.guardian import end_processes, end_run
from hydrainfer.core import ConfigError

PREFIX = "hydrainfer-"
OBJECT_STORE_BYTES = 80 << 20  # the minimum that Ray accepts; we store nothing in it
_LOCK = "lock"
_LONGEST_BASE = 50  # bytes: an ipc address ends at 107
_LONGEST_BASE_RAY = 13  # bytes: Ray's sockets are in r/session_<time>_<pid>/sockets
_ROOM_BYTES = 1 << 20
_ROOM_RAY_BYTES = 16 << 20  # half a megabyte at start; logs grow
_GOODBYE_S = 15.0
_KEPT = {"SPT_NOENV": "1"}  # without it `setproctitle`, which Ray uses, overwrites the environment in /proc


class RunFolder:
    """A folder that only this user can read. Its lock is held while the run lives, and can be seen from other
    containers. The next run ends the processes, and removes the folders, of runs that are dead. `for_ray`: Ray's
    session will be inside. Raises `ConfigError` if the temporary directory cannot be used."""

    def __init__(self, for_ray: bool = False) -> None:
        base = _base(_LONGEST_BASE_RAY if for_ray else _LONGEST_BASE)
        n_bytes = _ray_bytes() if for_ray else _ROOM_BYTES
        for old in Path(base).glob(f"{PREFIX}*-*"):
            _end_if_dead(old)
        self._guardian: subprocess.Popen[bytes] | None = None
        self._lock = -1
        try:
            self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=base))
        except OSError as e:
            raise _unusable(base, n_bytes, e) from None
        self.ray = self.path / "r"  # Ray makes it readable for all users, but they cannot enter `path`
        try:
            new = self.path / f"{_LOCK}.new"  # locked before it is renamed, so `lock` is never seen unlocked
            self._lock = os.open(new, os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            new.rename(self.path / _LOCK)
            _check_room(self.path, n_bytes)
        except OSError as e:
            self.remove()
            raise _unusable(base, n_bytes, e) from None

    def new_token(self) -> Path:
        """Write a new secret of this run to a file that only this user can read, and return its path."""
        path = self.path / "token"
        with open(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        return path

    def guard(self) -> dict[str, str]:
        """Start the guardian. It ends every process that has the returned environment variables when this process
        ends. Safe to repeat."""
        if self._guardian is None:
            self._guardian = subprocess.Popen(
                [sys.executable, "-I", "-S", guardian.__file__, str(self.path), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,  # Ctrl-C in a terminal goes to its whole group
            )
        return {guardian.MARK: str(self.path), **_KEPT}

    def end_processes(self) -> None:
        """Kill the guarded processes."""
        end_processes(str(self.path))

    def remove(self) -> None:
        """End the guarded processes that are left and remove the folder."""
        if self._guardian is not None:
            with suppress(subprocess.TimeoutExpired):
                self._guardian.communicate(b".", _GOODBYE_S)
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)


def _base(longest: int) -> str:
    """The temporary directory, or /tmp if its path is longer than `longest` bytes, which is too long for sockets. A
    full TMPDIR is kept and leads to an error; `tempfile` would silently use another directory."""
    asked = os.environ.get("TMPDIR", "")
    base = os.path.abspath(asked) if os.path.isdir(asked) else tempfile.gettempdir()
    return base if len(os.fsencode(base)) <= longest else "/tmp"


def _ray_bytes() -> int:
    """The room that Ray needs in the folder. Its object store is there if it does not fit into shared memory."""
    try:
        shared = shutil.disk_usage("/dev/shm").free
    except OSError:
        shared = 0
    return _ROOM_RAY_BYTES + (0 if shared >= OBJECT_STORE_BYTES else OBJECT_STORE_BYTES)


def _check_room(folder: Path, n_bytes: int) -> None:
    """Check for room by allocating it for a moment, since quotas and reserved blocks cannot be queried."""
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, n_bytes)


def _unusable(base: str, n_bytes: int, error: OSError) -> ConfigError:
    why = f"cannot be used ({error.strerror})"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        why = f"is full (less than {n_bytes >> 20} MiB are free)"
    return ConfigError(f"the temporary directory {base} {why}: make room there, or set TMPDIR to another one")


def _end_if_dead(old: Path) -> None:
    with suppress(OSError):  # another user's, or going away right now
        lock = os.open(old / _LOCK, os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            end_run(str(old))
        finally:
            os.close(lock)
