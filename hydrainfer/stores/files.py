"""A folder as a store: one file per block, for all servers of a user at once, without a process that serves them.

A block's modification time is when it was last used, less a microsecond for each block before it in its chain.
The oldest file is the next to go.
"""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from hydrainfer.cache import BlockName
from hydrainfer.stores.block_file import HEADER_BYTES, header_of, is_whole, read_block
from hydrainfer.stores.folder import (
    ABSENT,
    FORBIDDEN,
    FULL,
    PAGE_BYTES,
    Account,
    File,
    Folder,
    Temp,
    make_folder,
    on_disk,
    remove,
)
from hydrainfer.stores.port import Contents, KindRow, Root, StoreError, StoreFull

_GOAL = 0.9  # of the limit, when room is made
_LONGEST = 0.8  # of the limit, what one call writes: making room for its last block must not cost its first
_TOGETHER = 32  # blocks that are reserved, and open, at a time
_TRIAL_BYTES = 1 << 20  # a disk with less room is full
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe in a block's place must not stop us
_UNRELATED = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO}  # to the one block


class FileStore:
    """The store of `root`'s blocks in `folder`, whose files take at most `limit_bytes` on disk, of all roots together.

    The folder is made if there is none. If nothing can be written to it, opening succeeds and writing raises
    `StoreFull`. Servers that share a folder should be given the same limit: each keeps its own.
    """

    def __init__(self, folder: Path, root: Root, limit_bytes: int) -> None:
        self.place = f"dir:{folder}"
        self.counts: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._root = root
        self._limit_bytes = limit_bytes
        self._folder = Folder(folder)
        self._home = f"{self._folder.path}/{root.digest.hex()}"
        with self._folder.errors():
            self._folder.make()
        with (
            suppress(StoreFull),
            self._folder.errors(writing=True),
            suppress(*ABSENT),
            self._folder.locked() as account,
        ):
            self._count_and_evict(account, 0)
            self._make_home(account)

    def has(self, names: Sequence[BlockName]) -> list[bool]:
        home, access, there = self._home, os.access, []
        for key, kind, _, _ in names:
            name = key.hex()
            there.append(access(f"{home}/{name[:2]}/{name}-{kind}", os.F_OK))
        if True not in there:
            self._check_open()
        return there

    def read(self, names: Sequence[BlockName], into: Sequence[memoryview]) -> list[bool]:
        with self._folder.errors():
            return [self._read(name, view) for name, view in zip(names, into, strict=True)]

    def write(
        self, names: Sequence[BlockName], blocks: Sequence[memoryview], wanted: Callable[[], bool] = lambda: True
    ) -> int:
        """See `SharedStore`. Writes at most four fifths of the limit."""
        now_ns = time.time_ns()
        n_fit = self._n_fitting(blocks)
        n_done = 0
        with self._folder.errors(writing=True), suppress(*ABSENT):  # the folder is being removed, which is no error
            for start in range(0, n_fit, _TOGETHER):
                end = min(start + _TOGETHER, n_fit)
                n = self._write(names[start:end], blocks[start:end], wanted, now_ns)
                n_done += n
                if n < end - start:
                    break
        return n_done

    def touch(self, names: Sequence[BlockName]) -> list[bool]:
        now_ns = time.time_ns()
        with self._folder.errors():
            there = [self._touch(name, now_ns) for name in names]
        if True not in there:
            self._check_open()
        return there

    def contents(self) -> Contents:
        """What the writers' account says, quickly. It may say too much until room is made, after crashes and
        removals. `n_bytes` is of all files."""
        with self._folder.errors():
            return Contents(*self._folder.sum(), self._limit_bytes)

    def close(self) -> None:
        """Does nothing: no file stays open between calls."""

    def _path(self, name: BlockName) -> str:
        key = name.key.hex()
        return f"{self._home}/{key[:2]}/{key}-{name.kind}"

    def _check_open(self) -> None:
        if self._folder.is_closed():
            raise StoreError(f"{self.place}: {os.strerror(errno.EACCES)}")

    def _count(self, what: str, n: int) -> None:
        with self._counting:
            self.counts[what] += n

    def _read(self, name: BlockName, into: memoryview) -> bool:
        path = self._path(name)
        try:
            fd = os.open(path, _READ)
        except OSError as e:
            if isinstance(e, ABSENT) or e.errno == errno.ESTALE:
                return False
            if e.errno in _UNRELATED:
                raise
            self._check_open()
            whole = False
        else:
            try:
                whole = read_block(fd, self._root.digest, name.key, name.kind, into)
            finally:
                os.close(fd)
        if not whole:
            self._count("corrupt", 1)
            with suppress(OSError):  # the disk may have become read-only
                remove(path)
        return whole

    def _touch(self, name: BlockName, now_ns: int) -> bool:
        path, used_ns = self._path(name), _used_ns(name, now_ns)
        try:
            os.utime(path, ns=(used_ns, used_ns), follow_symlinks=False)
        except ABSENT:
            return False
        except OSError as e:
            if e.errno not in FULL | FORBIDDEN:
                raise
            return os.access(path, os.R_OK)  # it can still be read
        return True

    def _n_fitting(self, blocks: Sequence[memoryview]) -> int:
        """How many of the first blocks one call may write."""
        n_bytes = 0
        for i, block in enumerate(blocks):
            n_bytes += on_disk(HEADER_BYTES + block.nbytes)
            if n_bytes > self._limit_bytes * _LONGEST:
                return i
        return len(blocks)

    def _write(
        self, names: Sequence[BlockName], blocks: Sequence[memoryview], wanted: Callable[[], bool], now_ns: int
    ) -> int:
        there = [self._touch(name, now_ns) for name in names]
        sizes = [HEADER_BYTES + block.nbytes for block, is_there in zip(blocks, there) if not is_there]
        temps = deque(self._reserve(sizes))
        unused: list[Temp] = []
        n_done = 0
        try:
            for name, block, is_there in zip(names, blocks, there):
                if not is_there:
                    if not temps:
                        break
                    header = header_of(self._root.digest, name.key, name.kind, block)
                    temps[0].fill(header, block, _used_ns(name, now_ns))
                    if not wanted():
                        break
                    if os.access(self._path(name), os.F_OK):  # another process was faster
                        unused.append(temps.popleft())
                    elif self._publish(temps[0], name):
                        temps.popleft().close()
                    else:
                        break
                n_done += 1
        finally:
            self._give_back([*temps, *unused])
        return n_done

    def _reserve(self, sizes: Sequence[int]) -> list[Temp]:
        """Files of these sizes, or of the first of them if there is no room for all."""
        if not sizes:
            return []
        temps: list[Temp] = []
        with self._folder.locked() as account:
            self._make_room(account, sum(map(on_disk, sizes)))
            while sizes and account.n_bytes + sum(map(on_disk, sizes)) > self._limit_bytes:
                sizes = sizes[:-1]
            n_bytes = sum(map(on_disk, sizes))
            account.add(n_bytes, len(sizes))
            try:
                for size in sizes:
                    temps.append(self._folder.temp(size))  # noqa: PERF401 - if one fails, those before it are removed
            except BaseException:
                for temp in temps:
                    temp.remove()
                account.add(-n_bytes, -len(sizes))
                raise
        return temps

    def _publish(self, temp: Temp, name: BlockName) -> bool:
        """Let a block be found. Returns False if someone removed its file."""
        assert "/" not in name.kind, name
        path = self._path(name)
        try:
            os.rename(temp.path, path)
        except ABSENT:
            with self._folder.locked() as account:
                self._make_home(account)
                make_folder(os.path.dirname(path))
                try:
                    os.rename(temp.path, path)
                except ABSENT:
                    return False
        return True

    def _give_back(self, temps: Sequence[Temp]) -> None:
        if not temps:
            return
        try:
            with self._folder.locked() as account:
                gone = [temp for temp in temps if temp.remove()]
                account.add(-sum(temp.n_bytes for temp in gone), -len(gone))
        except (OSError, StoreError):  # the account says too much until the files are counted
            for temp in temps:
                temp.remove()

    def _make_room(self, account: Account, n_bytes: int) -> None:
        if account.n_bytes + n_bytes > self._limit_bytes:
            self._count_and_evict(account, n_bytes)

    def _count_and_evict(self, account: Account, n_bytes: int) -> None:
        """Make the account exact. If `n_bytes` more would be too much, remove the blocks that are longest unused."""
        self._folder.sweep()
        census = self._folder.count()
        total, n_gone = census.n_bytes, 0
        if total + n_bytes > self._limit_bytes:
            goal = min(int(self._limit_bytes * _GOAL), self._limit_bytes - n_bytes)
            census.files.sort()
            for file in census.files:
                if total <= goal:
                    break
                remove(file.path)
                total -= file.n_bytes
                n_gone += 1
            kept = {file.root for file in census.files[n_gone:]} | {self._root.digest.hex()}
            total -= self._folder.prune(kept) * PAGE_BYTES
            self._count("evicted", n_gone)
        account.set(total, len(census.files) + census.n_temps - n_gone)

    def _make_home(self, account: Account) -> None:
        """Make the root's folder, with `about.json` in it if there is room."""
        make_folder(self._home)
        about = f"{self._home}/about.json"
        if os.path.lexists(about):
            return
        self._make_room(account, PAGE_BYTES)
        if account.n_bytes + PAGE_BYTES > self._limit_bytes:
            return
        account.add(PAGE_BYTES, 0)
        data = json.dumps(self._root.about, indent=1).encode()
        temp = self._folder.temp(len(data))
        try:
            temp.fill(data, memoryview(b""), time.time_ns())
            os.rename(temp.path, about)
        finally:
            temp.remove()


def summary(folder: Path) -> list[KindRow]:
    """What a folder holds: a row per root and kind, with bytes on disk. Raises `StoreError`, as all below."""
    with _existing(folder) as place:
        groups: dict[tuple[str, str], list[File]] = {}
        for file in place.count().files:
            groups.setdefault((file.root, file.kind), []).append(file)
        return [_row(place.about(root), kind, files) for (root, kind), files in sorted(groups.items())]


def contents(folder: Path, limit_bytes: int) -> Contents:
    """The number of blocks, and what all files take on disk."""
    with _existing(folder) as place:
        census = place.count()
        return Contents(len(census.files), census.n_bytes, limit_bytes)


def clear(folder: Path) -> tuple[int, int]:
    """Remove all blocks, also while servers use the folder. Returns how many there were, and their bytes on disk."""
    with _existing(folder) as place:
        gone = [file for file in place.count().files if remove(file.path)]
        with place.locked() as account:
            place.sweep()
            place.prune()
            place.recount(account)
        return len(gone), sum(file.n_bytes for file in gone)


def check(folder: Path) -> tuple[int, int]:
    """Read all blocks, and remove those that are broken. Returns how many are whole, and how many were removed."""
    n_good = n_broken = 0
    with _existing(folder) as place:
        for file in place.count().files:
            try:
                good = _is_good(file)
            except ABSENT:
                continue
            if good:
                n_good += 1
            elif remove(file.path):
                n_broken += 1
        with place.locked() as account:
            place.recount(account)
    return n_good, n_broken


def check_writable(folder: Path) -> None:
    """Make the folder if there is none, and write a file to it, which is removed again."""
    place, data = Folder(folder), memoryview(bytes(_TRIAL_BYTES))
    with place.errors():
        place.make()
    with place.errors(writing=True), place.locked() as account:
        account.add(_TRIAL_BYTES, 0)
        try:
            temp = place.temp(_TRIAL_BYTES)
            try:
                temp.fill(b"", data, time.time_ns())
            finally:
                temp.remove()
        finally:
            account.add(-_TRIAL_BYTES, 0)


@contextmanager
def _existing(folder: Path) -> Iterator[Folder]:
    place = Folder(folder)
    with place.errors():
        place.check_used()
        yield place


def _row(about: dict[str, str], kind: str, files: Sequence[File]) -> KindRow:
    now_s = time.time()
    ages_s = [max(0.0, now_s - file.used_ns / 1e9) for file in files]
    return KindRow(about, kind, len(files), sum(file.n_bytes for file in files), max(ages_s), min(ages_s))


def _is_good(file: File) -> bool:
    key = bytes.fromhex(os.path.basename(file.path)[:32])
    try:
        fd = os.open(file.path, _READ)
    except OSError as e:
        if isinstance(e, ABSENT) or e.errno in _UNRELATED:
            raise
        return False
    try:
        return is_whole(fd, bytes.fromhex(file.root), key, file.kind)
    finally:
        os.close(fd)


def _used_ns(name: BlockName, now_ns: int) -> int:
    """The modification time of a block used now: of the blocks of one call, parents are the last to go."""
    return now_ns - name.number * 1000
