"""A folder as a store: every byte right or a miss, never over its limit, and nothing left of who died."""

from __future__ import annotations

import errno
import os
import shutil
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydrainfer.stores import StoreError, StoreFull, block_file
from hydrainfer.stores.files import FileStore, check, clear, summary
from hydrainfer.stores.folder import Folder
from tests.stores.folders import (
    OTHER,
    PAGE,
    ROOT,
    SIZE,
    chain,
    flip,
    is_exact,
    named,
    on_disk,
    path_of,
    readable,
    temps,
    write,
)

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(60)]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "blocks"


@pytest.fixture
def store(folder):
    return FileStore(folder, ROOT, 1 << 20)


@pytest.mark.parametrize("size", [0, 1, 4032, SIZE, 384 << 10])
def test_blocks_come_back_as_they_were_written(folder, size):
    store = FileStore(folder, ROOT, 64 << 20)
    names = [*chain(0, 40), named(0, kind="embed")]
    assert store.has(names) == [False] * 41 and readable(store, names, size) == [False] * 41
    assert write(store, names, size) == 41
    assert store.has(names) == [True] * 41 and readable(store, names, size) == [True] * 41
    again = FileStore(folder, ROOT, 64 << 20)
    assert readable(again, names, size) == [True] * 41 and again.contents().n_blocks == 41
    assert FileStore(folder, OTHER, 64 << 20).has(names) == [False] * 41
    assert is_exact(store, folder) and not temps(folder) and not again.counts


def test_blocks_that_are_there_are_not_written_again(store, folder):
    names = chain(0, 3)
    assert write(store, names[1:2]) == 1
    before = path_of(folder, names[1]).stat()
    asked = []
    assert write(store, names, wanted=lambda: not asked.append(1)) == 3 and len(asked) == 2
    after = path_of(folder, names[1]).stat()
    assert after.st_ino == before.st_ino and after.st_mtime_ns > before.st_mtime_ns
    assert write(store, [named(9), named(9)]) == 2, "one name twice"
    assert store.contents().n_blocks == 4 and is_exact(store, folder)


def test_files_and_folders_are_for_their_owner_only(store, folder):
    write(store, chain(0, 2))
    for path in [folder, *folder.rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def replace(path, make):
    path.unlink()
    make(path)


BROKEN = {
    "cut": lambda path: os.truncate(path, 5000),
    "cut within the header": lambda path: os.truncate(path, 63),
    "longer": lambda path: os.truncate(path, SIZE + 65),
    "empty": lambda path: os.truncate(path, 0),
    "a bit of the data": lambda path: flip(path, 64 + 7777),
    "the last bit": lambda path: flip(path, -1),
    "another version": lambda path: flip(path, 7),
    "another size in the header": lambda path: flip(path, 8),
    "another key": lambda path: flip(path, 16),
    "another root": lambda path: flip(path, 32),
    "unused bytes of the header": lambda path: flip(path, 56),
    "another checksum": lambda path: flip(path, 60),
    "zeros": lambda path: path.write_bytes(bytes(SIZE + 64)),
    "a folder": lambda path: replace(path, lambda p: (p / "deep").mkdir(parents=True)),
    "a pipe": lambda path: replace(path, os.mkfifo),
    "a link to itself": lambda path: replace(path, lambda p: p.symlink_to(p)),
    "a link to a good copy": lambda path: path.symlink_to(path.rename(path.parent.parent.parent.parent / "good")),
    "another block": lambda path: shutil.copy(path_of(path.parent.parent.parent, named(1)), path),
    "of another kind": lambda path: path.with_name(path.name[:32] + "-embed").rename(path),
}


@pytest.fixture(params=BROKEN)
def broken(request, store, folder):
    """The name of a block whose file is broken, and the names of those that are whole."""
    name, *others = [named(0), named(1), named(2), named(0, kind="embed")]
    write(store, [name, *others])
    good = path_of(folder, name).read_bytes()
    BROKEN[request.param](path_of(folder, name))
    yield name, others[:2] if request.param == "of another kind" else others
    assert not os.path.lexists(path_of(folder, name))
    if request.param == "a link to a good copy":
        assert (folder.parent / "good").read_bytes() == good, "what a link leads to is left alone"


def test_a_broken_file_is_a_miss_and_is_removed(store, folder, broken):
    name, others = broken
    assert readable(store, [name, *others]) == [False] + [True] * len(others)
    assert store.counts == {"corrupt": 1} and store.has([name]) == [False]
    assert write(store, [name]) == 1 and readable(store, [name]) == [True]
    assert check(folder) == (len(others) + 1, 0) and is_exact(store, folder)
    path_of(folder, name).unlink()


def test_check_removes_a_broken_file(store, folder, broken):
    assert check(folder) == (len(broken[1]), 1)
    assert check(folder) == (len(broken[1]), 0) and is_exact(store, folder)


def test_a_block_of_another_size_is_broken(store):
    write(store, [named(0)])
    assert store.read([named(0)], [memoryview(bytearray(SIZE - 1))]) == [False]
    assert store.has([named(0)]) == [False] and store.counts == {"corrupt": 1}


PLACES = st.integers(0, 63) | st.integers(0, SIZE + 63)
CHANGES = st.lists(
    st.tuples(st.just("flip"), PLACES, st.integers(1, 255))
    | st.tuples(st.just("cut"), PLACES, st.just(0))
    | st.tuples(st.just("longer"), st.integers(1, 5000), st.integers(0, 255))
    | st.tuples(st.just("zeros"), PLACES, st.integers(1, SIZE))
    | st.tuples(st.just("other"), PLACES, st.integers(1, SIZE)),
    min_size=1,
    max_size=4,
)


def changed(whole, other, changes):
    """The bytes of a file after changes; `other`: those of another block's."""
    whole = bytearray(whole)
    for what, at, n in changes:
        if what == "flip" and at < len(whole):
            whole[at] ^= n
        elif what == "cut":
            del whole[at:]
        elif what == "longer":
            whole += bytes([n]) * at
        elif what == "zeros":
            whole[at : at + n] = bytes(len(whole[at : at + n]))
        elif what == "other":
            whole[at : at + n] = other[at : at + n]
    return whole


class Anything:
    """Is equal to all sizes."""

    def __ne__(self, other):
        return False


@pytest.mark.parametrize("unchecked", ["checksum", "length"])
def test_a_check_that_is_left_out_is_noticed(store, folder, monkeypatch, unchecked):
    """By changes that the test after this one makes."""
    names = [named(0), named(1)]
    write(store, names)
    path, other = (path_of(folder, name) for name in names)
    good, other_good = path.read_bytes(), other.read_bytes()
    if unchecked == "checksum":
        monkeypatch.setattr(block_file.zlib, "crc32", lambda data, crc=0: 0)
    else:
        monkeypatch.setattr(block_file, "_data_bytes", lambda fd: Anything())
    with pytest.raises(AssertionError):
        for changes in ([("flip", 64 + 777, 1)], [("longer", 100, 7)]):
            path.write_bytes(changed(good, other_good, changes))
            assert readable(store, names) == [False, True]


def test_no_change_of_a_file_gives_a_wrong_byte(store, folder):
    names = [named(0), named(1)]
    write(store, names)
    path, other = (path_of(folder, name) for name in names)
    good, other_good = path.read_bytes(), other.read_bytes()

    @settings(max_examples=400, deadline=None)
    @given(CHANGES)
    def fuzz(changes):
        now = changed(good, other_good, changes)
        path.write_bytes(now)
        assert readable(store, names) == [now == good, True]
        assert path.exists() == (now == good)

    fuzz()
    assert store.counts["corrupt"] > 300


def test_the_longest_unused_go_first_and_children_before_parents(folder):
    store = FileStore(folder, ROOT, 22 * PAGE)  # 20 blocks of a page, the lock and about.json
    size = PAGE - 64
    a, b, c, d, e = chain(0, 6), chain(10, 6), chain(20, 6), chain(30, 4), chain(40, 4)
    for names in (a, b, c):
        assert write(store, names, size) == 6
    assert store.touch([*a[:3], named(99)]) == [True, True, True, False]
    assert not store.counts and on_disk(folder) == 20 * PAGE
    assert write(store, d, size) == 4 and store.counts == {"evicted": 2}
    assert store.has([*a, *b]) == [True] * 4 + [False] * 2 + [True] * 6
    assert write(store, e, size) == 4 and store.counts == {"evicted": 6}
    assert store.has([*a, *b]) == [True] * 3 + [False] * 3 + [True] * 3 + [False] * 3
    assert store.has([*c, *d, *e]) == [True] * 14 and is_exact(store, folder)


def test_the_limit_is_of_all_roots_and_holds_from_the_start(folder):
    one, two = FileStore(folder, ROOT, 100 * PAGE), FileStore(folder, OTHER, 100 * PAGE)
    assert write(one, chain(0, 20)) == 20
    for first in (100, 200):
        assert write(two, chain(first, 20)) == 20
    assert on_disk(folder) <= 100 * PAGE
    assert sum(one.has(chain(0, 20))) < 20 and all(two.has(chain(200, 20)))
    FileStore(folder, ROOT, 40 * PAGE)
    assert on_disk(folder) <= 40 * PAGE and is_exact(one, folder)


def test_of_a_batch_that_can_never_fit_the_first_blocks_are_written(folder):
    store = FileStore(folder, ROOT, 400 * PAGE)
    names = chain(0, 1000)
    for _ in range(2):
        n = write(store, names)
        assert 90 < n < 133 and readable(store, names) == [True] * n + [False] * (1000 - n)
        assert on_disk(folder) <= 400 * PAGE and is_exact(store, folder)
    assert write(FileStore(folder, ROOT, PAGE), names) == 0 and write(FileStore(folder, ROOT, 3 * PAGE), names) == 0


def test_once_unwanted_nothing_more_is_written(store, folder):
    names = chain(0, 100)
    answers = iter([True] * 50)
    assert write(store, names, wanted=lambda: next(answers, False)) == 50
    assert readable(store, names) == [True] * 50 + [False] * 50
    assert store.contents().n_blocks == 50 and is_exact(store, folder) and not temps(folder)
    with pytest.raises(ZeroDivisionError):
        write(store, names, wanted=lambda: 1 / 0)
    assert is_exact(store, folder) and not temps(folder)


def failing(monkeypatch, function, code, after=0, when=lambda *args: True):
    """Let a function of `os` fail, after so many calls that succeed."""
    real, calls = getattr(os, function), iter(range(after))

    def fails(*args, **kwargs):
        if when(*args) and next(calls, None) is None:
            raise OSError(code, os.strerror(code), args[0])
        return real(*args, **kwargs)

    monkeypatch.setattr(os, function, fails)


FAILURES = [("pwritev", 5, 5), ("ftruncate", 5, 0), ("ftruncate", 37, 32), ("rename", 4, 2)]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
@pytest.mark.parametrize(("function", "after", "n"), FAILURES)
def test_a_full_or_failing_disk(store, folder, monkeypatch, code, function, after, n):
    old, names = chain(0, 3), chain(100, 40)
    write(store, old)
    failing(monkeypatch, function, code, after)
    with pytest.raises(StoreFull, match=r"^dir:[^\n]+$"):
        write(store, names)
    assert not temps(folder) and is_exact(store, folder) and readable(store, old) == [True] * 3
    assert sum(readable(store, names)) == n == store.contents().n_blocks - 3
    monkeypatch.undo()
    assert write(store, names) == 40


def test_short_writes_go_on(store, monkeypatch):
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, at: real(fd, [parts[0], parts[1][:100]], at))
    assert write(store, chain(0, 3)) == 3 and readable(store, chain(0, 3)) == [True] * 3


def test_a_folder_that_can_only_be_read(store, folder, monkeypatch):
    names = chain(0, 3)
    write(store, names)
    failing(monkeypatch, "open", errno.EROFS, when=lambda path, flags, *_: flags & (os.O_RDWR | os.O_CREAT))
    for function in ("utime", "unlink"):
        failing(monkeypatch, function, errno.EROFS)
    failing(monkeypatch, "mkdir", errno.EROFS, when=lambda path, *_: not os.path.exists(path))
    for reader in (store, FileStore(folder, ROOT, 1 << 20)):
        assert reader.has(names) == [True] * 3 and readable(reader, names) == [True] * 3
        assert reader.touch(names) == [True] * 3
        with pytest.raises(StoreFull, match="Read-only file system"):
            write(reader, chain(9, 3))
    flip(path_of(folder, names[0]), 100)
    assert readable(store, names) == [False, True, True], "it cannot be removed, but is not taken for good"
    with pytest.raises(StoreError, match="Read-only file system"):
        FileStore(folder.parent / "new", ROOT, 1 << 20)


def test_a_process_that_stands_still_under_the_lock_stops_writers_only(store, folder, monkeypatch):
    write(store, chain(0, 3))
    monkeypatch.setattr("hydrainfer.stores.folder._LOCK_S", 0.1)
    with Folder(folder).locked():
        with pytest.raises(StoreFull, match="another process has held the lock"):
            write(store, chain(3, 3))
        assert readable(FileStore(folder, ROOT, 1 << 20), chain(0, 6)) == [True] * 3 + [False] * 3
    assert write(store, chain(0, 6)) == 6


def test_folders_that_are_not_ours_alone(store, folder, monkeypatch):
    (folder.parent / "file").touch()
    with pytest.raises(StoreError, match="no folder"):
        FileStore(folder.parent / "file", ROOT, 1 << 20)
    (folder.parent / "public").mkdir()
    (folder.parent / "public").chmod(0o777)
    with pytest.raises(StoreError, match="everybody may write"):
        FileStore(folder.parent / "public", ROOT, 1 << 20)
    for tool in (summary, clear, check):
        with pytest.raises(StoreError, match="No such file"):
            tool(folder.parent / "absent")
        with pytest.raises(StoreError, match="no store of blocks"):
            tool(folder.parent)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    for use in (lambda: FileStore(folder, ROOT, 1 << 20), lambda: write(store, [named(0)]), lambda: check(folder)):
        with pytest.raises(StoreError, match=r"^dir:[^\n]+: belongs to another user$"):
            use()


def test_a_folder_that_cannot_be_read(store, monkeypatch):
    failing(monkeypatch, "open", errno.EACCES)
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.F_OK and path.endswith("blocks"))
    for use in (store.has, lambda names: readable(store, names), lambda names: write(store, names)):
        with pytest.raises(StoreError, match=r"^dir:[^\n]+: Permission denied$") as raised:
            use([named(0)])
        assert raised.type is StoreError


def test_files_of_others_are_left_alone(store, folder):
    kept = [folder / "notes.txt", folder / "writing" / "notes", folder / ROOT.digest.hex() / "ab" / "notes"]
    write(store, chain(0, 200))
    for path in kept:
        path.parent.mkdir(exist_ok=True)
        path.write_text("kept")
    FileStore(folder, ROOT, PAGE)
    clear(folder)
    assert [path.read_text() for path in kept] == ["kept"] * 3 and not any(store.has(chain(0, 200)))


def test_left_over_files_go_only_when_their_writer_is_dead(store, folder):
    ours, theirs = "/" + Folder(folder)._host, "/" + "0" * 16
    old, new, own = (folder / f"writing{host}-{n:032x}" for host, n in [(theirs, 1), (theirs, 2), (ours, 3)])
    names = chain(0, 5)

    def open_another():
        for path in (old, new, own):
            path.write_bytes(b"x")
        os.utime(old, (time.time() - 660,) * 2)
        FileStore(folder, ROOT, 1 << 20)
        assert not old.exists() and not own.exists() and new.exists()
        return True

    assert write(store, names, wanted=open_another) == 5 and temps(folder) == [new]
    assert readable(store, names) == [True] * 5


def test_what_people_are_shown(store, folder):
    write(store, chain(0, 5))
    write(FileStore(folder, OTHER, 1 << 20), [named(7), named(7, kind="embed")])
    now_s = time.time()
    os.utime(path_of(folder, named(0)), (now_s - 100,) * 2)
    (folder / OTHER.digest.hex() / "about.json").write_text("{")
    rows = summary(folder)
    assert [row[:4] for row in rows] == [
        (ROOT.about, "kv", 5, 15 * PAGE),
        ({}, "embed", 1, 3 * PAGE),
        ({}, "kv", 1, 3 * PAGE),
    ]
    assert 100 <= rows[0].oldest_s < 130 and 0 <= rows[0].newest_s < 30
    assert store.contents() == (7, 24 * PAGE, 1 << 20)
    assert clear(folder) == (7, 21 * PAGE) and clear(folder) == (0, 0) and summary(folder) == []
    assert store.contents().n_blocks == 0 and is_exact(store, folder)
    assert write(store, chain(0, 5)) == 5 and summary(folder)[0].about == ROOT.about and is_exact(store, folder)
