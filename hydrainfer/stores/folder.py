"""The folder of a file store: its lock, what its files take on disk, and what dead writers have left.

    FOLDER/hydrainfer.lock              held by whoever makes or removes files; has the sum of what they take
    FOLDER/writing/HOST-RANDOM          files that cannot be found yet, of full size from the start
    FOLDER/ROOT/about.json              what the root is, for people
    FOLDER/ROOT/KEY[:2]/KEY-KIND        blocks (`block_file`)

The sum is raised before files are made and lowered after they are removed. So a process that is killed leaves it too
high, never too low, and counting the files makes it exact again. Files with other names are neither counted nor
removed.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import stat
import struct
import time
import uuid
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from hydrainfer.machine import host_identity
from hydrainfer.stores.port import StoreError, StoreFull

PAGE_BYTES = 4096  # files are counted in these
ABSENT = (FileNotFoundError, NotADirectoryError)
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG}
FORBIDDEN = {errno.EACCES, errno.EPERM}

_LOCK_S = 30.0
_ABANDONED_S = 600.0  # for files of other hosts, whose locks may be invisible here
_SUM = struct.Struct("<8sQQ")  # magic, bytes, blocks; a CRC follows
_MAGIC = b"HydraSum"
_CRC = struct.Struct("<I")
_ROOT, _PART = re.compile(r"[0-9a-f]{32}"), re.compile(r"[0-9a-f]{2}")
_BLOCK, _TEMP = re.compile(r"[0-9a-f]{32}-(.+)", re.DOTALL), re.compile(r"([0-9a-f]+)-[0-9a-f]{32}")
_OURS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def on_disk(n_bytes: int) -> int:
    """What a file of this size counts."""
    return -(-n_bytes // PAGE_BYTES) * PAGE_BYTES


class File(NamedTuple):
    """A block's file, or what lies in its place. The least of several is the next to go. `n_bytes`: on disk."""

    used_ns: int
    path: str
    n_bytes: int
    root: str
    kind: str


class Census(NamedTuple):
    """All files of a folder. `n_bytes`: on disk, with those that are being written and those that are no blocks."""

    files: list[File]
    n_temps: int
    n_bytes: int


class Temp:
    """A file that is being written. It is locked as long as its writer lives."""

    def __init__(self, path: str, size: int) -> None:
        self.path = path
        self.n_bytes = on_disk(size)
        self._fd = os.open(path, _OURS | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._fd, size)
        except BaseException:
            self.remove()
            raise

    def fill(self, header: bytes, data: memoryview, used_ns: int) -> None:
        total, n = len(header) + data.nbytes, os.pwritev(self._fd, [header, data], 0)
        while n < total:
            n += os.pwrite(self._fd, (header + data.tobytes())[n:], n)
        os.utime(self._fd, ns=(used_ns, used_ns))

    def remove(self) -> bool:
        """Whether the file was there."""
        there = False
        with suppress(OSError):
            os.unlink(self.path)
            there = True
        self.close()
        return there

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class Account:
    """What all files take on disk, of the lock file `fd`. To be changed only under the lock.

    `known`: whether the file says it. `n_blocks` includes those that are being written."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        record = os.pread(fd, _SUM.size + _CRC.size, 0)
        self.known = record[_SUM.size :] == _CRC.pack(zlib.crc32(record[: _SUM.size]))
        self.n_bytes = self.n_blocks = 0
        if self.known:
            magic, self.n_bytes, self.n_blocks = _SUM.unpack(record[: _SUM.size])
            self.known = magic == _MAGIC

    def set(self, n_bytes: int, n_blocks: int) -> None:
        self.n_bytes, self.n_blocks = max(0, n_bytes), max(0, n_blocks)
        record = _SUM.pack(_MAGIC, self.n_bytes, self.n_blocks)
        os.pwrite(self._fd, record + _CRC.pack(zlib.crc32(record)), 0)

    def add(self, n_bytes: int, n_blocks: int) -> None:
        self.set(self.n_bytes + n_bytes, self.n_blocks + n_blocks)


class Folder:
    """The folder at `path`, which may vanish at any time. `place`: its name for people."""

    def __init__(self, path: Path) -> None:
        self.place = f"dir:{path}"
        self.path = os.path.abspath(path)
        self._writing, self._lock_file = f"{self.path}/writing", f"{self.path}/hydrainfer.lock"
        self._host = host_identity()

    @contextmanager
    def errors(self, writing: bool = False) -> Iterator[None]:
        """A context that raises `StoreError` instead of `OSError`; while writing, `StoreFull` if blocks can be read."""
        try:
            yield
        except OSError as e:
            message = f"{self.place}: {e.strerror or type(e).__name__}"
            if writing and (e.errno in FULL or (e.errno in FORBIDDEN and not self.is_closed())):
                raise StoreFull(message) from e
            raise StoreError(message) from e

    def is_closed(self) -> bool:
        """Whether the folder is there, and we may not read it."""
        return os.access(self.path, os.F_OK) and not os.access(self.path, os.R_OK | os.X_OK)

    def make(self) -> None:
        if not os.path.exists(self.path):
            with suppress(FileExistsError):
                os.makedirs(self.path, 0o700)
        self.check_ours()

    def check_ours(self) -> None:
        link, facts, us = os.lstat(self.path), os.stat(self.path), os.geteuid()
        if not stat.S_ISDIR(facts.st_mode):
            raise StoreError(f"{self.place}: no folder")
        if facts.st_uid != us or link.st_uid not in (0, us):
            raise StoreError(f"{self.place}: belongs to another user")
        if facts.st_mode & stat.S_IWOTH:
            raise StoreError(f"{self.place}: everybody may write to it")

    def check_used(self) -> None:
        """Raise `StoreError` if this has never been the folder of a store."""
        self.check_ours()
        if not os.path.lexists(self._lock_file):
            raise StoreError(f"{self.place}: no store of blocks")

    @contextmanager
    def locked(self) -> Iterator[Account]:
        """The lock, for one thread of one process."""
        fd = self._lock()
        try:
            account = Account(fd)
            if not account.known:
                self.recount(account)
            yield account
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # now, also if a child process has inherited the file
            os.close(fd)

    def _lock(self) -> int:
        end_s, pause_s = time.monotonic() + _LOCK_S, 0.0002
        while True:
            with suppress(FileNotFoundError):  # the folder is being removed
                self.make()
                fd = os.open(self._lock_file, _OURS | os.O_CREAT, 0o600)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if os.path.samestat(os.stat(self._lock_file), os.fstat(fd)):
                        return fd
                except BlockingIOError:
                    pass
                except BaseException:
                    os.close(fd)
                    raise
                os.close(fd)
            if time.monotonic() > end_s:
                raise StoreFull(f"{self.place}: another process has held the lock for {_LOCK_S:.0f} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.001)

    def sum(self) -> tuple[int, int]:
        """The account's number of blocks and bytes, without the lock."""
        try:
            fd = os.open(self._lock_file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except ABSENT:
            return 0, 0
        try:
            account = Account(fd)
        finally:
            os.close(fd)
        if account.known:
            return account.n_blocks, account.n_bytes
        census = self.count()
        return len(census.files), census.n_bytes

    def temp(self, size: int) -> Temp:
        """A new file to write to. To be called under the lock, after the account was raised."""
        path = f"{self._writing}/{self._host}-{uuid.uuid4().hex}"
        try:
            return Temp(path, size)
        except ABSENT:
            make_folder(self._writing)
            return Temp(path, size)

    def sweep(self) -> None:
        """Remove what dead writers have left. To be called under the lock, before counting."""
        for entry in _entries(self._writing):
            match = _TEMP.fullmatch(entry.name)
            if match is not None and _is_abandoned(entry.path, match[1] == self._host):
                remove(entry.path)

    def count(self) -> Census:
        """Count all files. Under the lock the result is exact, but for files that are renamed meanwhile: as those being
        written are counted first, one may count twice, but none is missed."""
        n_bytes = PAGE_BYTES  # the lock file
        n_temps = 0
        for entry in _entries(self._writing):
            if _TEMP.fullmatch(entry.name):
                with suppress(*ABSENT):
                    n_bytes += on_disk(entry.stat(follow_symlinks=False).st_size)
                    n_temps += 1
        files: list[File] = []
        for root in self._roots():
            n_bytes += PAGE_BYTES  # about.json
            for part in _parts(root.path):
                files.extend(_files(part, root.name))
        return Census(files, n_temps, n_bytes + sum(file.n_bytes for file in files))

    def recount(self, account: Account) -> None:
        census = self.count()
        account.set(census.n_bytes, len(census.files) + census.n_temps)

    def prune(self, kept: Collection[str] = ()) -> int:
        """Remove the folders of roots without blocks, those in `kept` excepted. Returns how many are gone."""
        n_gone = 0
        for root in self._roots():
            if root.name in kept:
                continue
            for part in _parts(root.path):
                with suppress(OSError):
                    os.rmdir(part)
            with suppress(OSError):
                if not any(_parts(root.path)):
                    remove(f"{root.path}/about.json")
                    os.rmdir(root.path)
                    n_gone += 1
        return n_gone

    def about(self, root: str) -> dict[str, str]:
        """What a root is; empty if nothing says it."""
        with suppress(OSError, ValueError):
            about = json.loads(Path(self.path, root, "about.json").read_bytes()[:PAGE_BYTES])
            if isinstance(about, dict):
                return {str(key): str(value) for key, value in about.items()}
        return {}

    def _roots(self) -> Iterator[os.DirEntry[str]]:
        for entry in _entries(self.path):
            if _ROOT.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                yield entry


def make_folder(path: str) -> None:
    """Make a folder, also where something else is in its place."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)
            os.mkdir(path, 0o700)


def remove(path: str) -> bool:
    """Remove whatever is at `path`. Returns whether something was there."""
    try:
        os.unlink(path)
    except ABSENT:
        return False
    except OSError:
        if not os.path.isdir(path):
            raise
        shutil.rmtree(path, ignore_errors=True)
    return True


def _entries(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except ABSENT:
        return []


def _parts(root: str) -> Iterator[str]:
    for entry in _entries(root):
        if _PART.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            yield entry.path


def _files(part: str, root: str) -> Iterator[File]:
    for entry in _entries(part):
        match = _BLOCK.fullmatch(entry.name)
        if match is not None:
            with suppress(*ABSENT):
                facts = entry.stat(follow_symlinks=False)
                yield File(facts.st_mtime_ns, entry.path, on_disk(facts.st_size), root, match[1])


def _is_abandoned(path: str, is_of_this_host: bool) -> bool:
    """Whether the writer of a file is dead: it holds no lock, and where locks may be invisible, the file is old too."""
    try:
        fd = os.open(path, _OURS)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return is_of_this_host or time.time() - os.fstat(fd).st_mtime > _ABANDONED_S
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
