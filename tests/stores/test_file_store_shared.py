"""A folder that threads and processes use at once as a store: cleared, checked, killed, and filled to its limit."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import threading
import time

import pytest

from hydrainfer.stores.files import FileStore, check, clear, summary
from hydrainfer.stores.folder import Folder
from tests.stores.folders import OTHER, ROOT, chain, is_exact, on_disk, readable, temps, write

pytestmark = [pytest.mark.multi, pytest.mark.timeout(60)]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.storage.peers"])


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "blocks"


@pytest.fixture
def store(folder):
    return FileStore(folder, ROOT, 1 << 20)


def test_people_may_clear_and_check_while_servers_write(store, folder):
    ends, errors, n_read = threading.Event(), [], [0]

    def serve(first):
        try:
            while not ends.is_set():
                names = chain(first, 40)
                write(store, names)
                n_read[0] += sum(readable(store, names))
                store.touch(names)
                store.contents()
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=serve, args=(first,)) for first in (0, 0, 50)]
    for thread in threads:
        thread.start()
    for i in range(15):
        assert check(folder)[1] == 0
        summary(folder)
        clear(folder)
        if i % 5 == 0:
            shutil.rmtree(folder, ignore_errors=True)
            time.sleep(0.02)
            FileStore(folder, OTHER, 1 << 20)
    ends.set()
    for thread in threads:
        thread.join()
    assert not errors and n_read[0] and not store.counts["corrupt"] and not temps(folder)


def _write_until_killed(pipe, folder, n_alone):
    store, n = FileStore(folder, ROOT, 1 << 20), iter(range(n_alone))

    def wanted():
        if next(n, None) is None:
            pipe.send("in the middle")
            time.sleep(60)
        return True

    for i in range(1000):
        write(store, chain(40 * i, 40), wanted=wanted)


@pytest.mark.parametrize("n_alone", [0, 5, 31, 200])
def test_a_killed_writer_leaves_nothing(folder, n_alone):
    pipe, theirs = _context.Pipe()
    process = _context.Process(target=_write_until_killed, args=(theirs, folder, n_alone), daemon=True)
    process.start()
    assert pipe.poll(30)
    FileStore(folder, ROOT, 1 << 20)
    assert temps(folder), "it lives"
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert temps(folder) and on_disk(folder) <= 1 << 20
    store = FileStore(folder, ROOT, 1 << 20)
    names = [name for i in range(10) for name in chain(40 * i, 40)]
    n_read = sum(readable(store, names))
    assert not temps(folder) and is_exact(store, folder) and not store.counts["corrupt"]
    assert n_read == store.contents().n_blocks and min(n_alone, 40) <= n_read <= n_alone


LIMIT = 1 << 20


def _write_much(seed, folder, looked):
    """Until twenty times the limit is written, and `looked` is set."""
    rng, store, left = random.Random(seed), FileStore(folder, ROOT if seed % 2 else OTHER, LIMIT), 20 * LIMIT
    block = memoryview(rng.randbytes(64_000))
    while left > 0 or not looked.is_set():
        names = chain(rng.randrange(10**9), rng.randrange(1, 50))
        names = [name._replace(key=bytes([name.number % 4]) + name.key[1:]) for name in names]  # few folders to look at
        sizes = [rng.choice([4033, 30_000, 50_000, 64_000]) for _ in names]
        store.write(names, [block[:size] for size in sizes])
        left -= sum(sizes)


def test_the_limit_holds_at_every_moment_while_processes_write(folder):
    FileStore(folder, ROOT, LIMIT)
    looked = _context.Event()
    processes = [_context.Process(target=_write_much, args=(seed, folder, looked), daemon=True) for seed in (1, 2)]
    for process in processes:
        process.start()
    highest = n_looks = 0
    end = time.monotonic() + 20
    while any(process.is_alive() for process in processes):
        with Folder(folder).locked():  # or files evicted while we look would count beside those in their place
            highest = max(highest, on_disk(folder))
        n_looks += 1
        if (n_looks > 20 and highest > 0.9 * LIMIT) or time.monotonic() > end:
            looked.set()
        time.sleep(0.005)
    assert [process.exitcode for process in processes] == [0, 0]
    assert 0.9 * LIMIT < highest <= LIMIT and n_looks > 20
    assert not temps(folder) and is_exact(FileStore(folder, ROOT, LIMIT), folder)
