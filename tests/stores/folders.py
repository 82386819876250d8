"""Blocks with known contents, and what a folder of them takes, for tests of the file store."""

from __future__ import annotations

import os
import random
from contextlib import suppress

from hydrainfer.cache import BlockName
from hydrainfer.stores import Root
from hydrainfer.stores.folder import Folder

ROOT = Root(b"\x01" * 16, {"model": "tiny", "dtype": "bfloat16"})
OTHER = Root(b"\x02" * 16, {"model": "other"})
PAGE = 4096
SIZE = 3 * PAGE - 64  # of the blocks of most tests: three pages with the header


def named(i, number=0, kind="kv"):
    return BlockName(random.Random(i).randbytes(16), kind, number, b"")


def data(name, size=SIZE):
    """What the block with this name has."""
    return memoryview(random.Random(name.key + name.kind.encode()).randbytes(size))


def chain(first, n):
    return [named(first + i, i) for i in range(n)]


def write(store, names, size=SIZE, **options):
    return store.write(names, [data(name, size) for name in names], **options)


def readable(store, names, size=SIZE):
    """Which blocks are there; all of their bytes are right."""
    buffers = [memoryview(bytearray(size)) for _ in names]
    there = store.read(names, buffers)
    for name, buffer, is_there in zip(names, buffers, there):
        assert not is_there or buffer == data(name, size)
    return there


def path_of(folder, name, root=ROOT):
    return folder / root.digest.hex() / name.key.hex()[:2] / f"{name.key.hex()}-{name.kind}"


def temps(folder):
    return list((folder / "writing").glob("*"))


def on_disk(folder):
    """What all files take, both by their sizes and by their blocks: the higher figure. A file that is renamed meanwhile
    counts once, because those being written are looked at first."""
    facts = {}
    for top in (folder / "writing", folder):
        for parent, _, names in os.walk(top):
            for name in names:
                with suppress(FileNotFoundError):
                    here = os.lstat(f"{parent}/{name}")
                    facts[here.st_ino] = (-(-here.st_size // PAGE) * PAGE, here.st_blocks * 512)
    return max(map(sum, zip(*facts.values())), default=0)


def is_exact(store, folder):
    return store.contents().n_bytes == Folder(folder).count().n_bytes == on_disk(folder)


def flip(path, at):
    whole = bytearray(path.read_bytes())
    whole[at] ^= 0x10
    path.write_bytes(whole)
