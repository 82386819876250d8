"""A block as a file: a header of 64 bytes, then the data. Every byte of both is determined by the block's name and its
data, so a file is whole if its header is the one that its data would get."""

from __future__ import annotations

import errno
import os
import stat
import struct
import zlib

HEADER_BYTES = 64

_START = struct.Struct("<8sQ16s16sI8x")  # magic and version, size of the data, key, root, CRC of the kind
_CRC = struct.Struct("<I")  # of all of that and the data
_MAGIC = b"HydraKV\x01"
_PIECE_BYTES = 1 << 20


def header_of(root: bytes, key: bytes, kind: str, data: memoryview) -> bytes:
    start = _start(root, key, kind, data.nbytes)
    return start + _CRC.pack(zlib.crc32(data, zlib.crc32(start)))


def read_block(fd: int, root: bytes, key: bytes, kind: str, into: memoryview) -> bool:
    """Read a file into a buffer of the block's size. Returns whether it is that block."""
    if _data_bytes(fd) != into.nbytes:
        return False
    header = bytearray(HEADER_BYTES)
    try:
        n = os.preadv(fd, [header, into], 0)
        while HEADER_BYTES <= n < HEADER_BYTES + into.nbytes:  # more than 2 GiB
            piece = os.preadv(fd, [into.cast("B")[n - HEADER_BYTES :]], n)
            if piece == 0:
                return False
            n += piece
    except OSError as e:
        if e.errno != errno.EIO:
            raise
        return False
    return header == header_of(root, key, kind, into)


def is_whole(fd: int, root: bytes, key: bytes, kind: str) -> bool:
    """Whether a file is that block, of whatever size."""
    n_bytes = _data_bytes(fd)
    if n_bytes is None:
        return False
    start = _start(root, key, kind, n_bytes)
    crc, place = zlib.crc32(start), HEADER_BYTES
    try:
        header = os.pread(fd, HEADER_BYTES, 0)
        while piece := os.pread(fd, _PIECE_BYTES, place):
            crc = zlib.crc32(piece, crc)
            place += len(piece)
    except OSError as e:
        if e.errno != errno.EIO:
            raise
        return False
    return header == start + _CRC.pack(crc)


def _start(root: bytes, key: bytes, kind: str, n_bytes: int) -> bytes:
    return _START.pack(_MAGIC, n_bytes, key, root, zlib.crc32(os.fsencode(kind)))


def _data_bytes(fd: int) -> int | None:
    """The size of the data; None if this is no file of ours."""
    facts = os.fstat(fd)
    if stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid() and facts.st_size >= HEADER_BYTES:
        return facts.st_size - HEADER_BYTES
    return None
