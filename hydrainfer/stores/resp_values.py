"""A block as values of a server: one value, or several if the block has about 1 MiB or more.

    hydrainfer:<root>:<kind>:<key>      header, first bytes of the block
    hydrainfer:<root>:<kind>:<key>:1    the next bytes
    hydrainfer:<root>:<kind>:<key>:2    the last bytes

The header says how many bytes the block has, and carries a checksum of the block's name and all of its bytes. So a
block that is cut, of which a part is missing or comes from another writer, or that lies under another name, is found
out.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

from hydrainfer.cache import BlockName
from hydrainfer.stores.port import Root

PREFIX = "hydrainfer"
HEADER_BYTES = 20
VALUE_BYTES = 1 << 20  # of a value at most: while a server takes a larger one, all its other clients wait

_HEADER = struct.Struct("<8sIQ")  # magic, checksum, size
_MAGIC = b"hydra\x00\x01\n"
_MAX_BLOCK_BYTES = 1 << 30  # a header that says more is broken


def root_key(root: Root) -> str:
    return f"{PREFIX}:{root.digest.hex()}"


def block_key(root: Root, name: BlockName) -> str:
    return f"{root_key(root)}:{name.kind}:{name.key.hex()}"


def value_keys(key: str, n_values: int) -> list[str]:
    """The keys of a block's values."""
    return [key, *(f"{key}:{i}" for i in range(1, n_values))]


def n_values(n_bytes: int) -> int:
    """The number of values of a block with so many bytes."""
    return -(-(n_bytes + HEADER_BYTES) // VALUE_BYTES)


def size_in(value: object) -> int | None:
    """The bytes of the block that begins with this value, as its header says; None if there is no whole header."""
    if not isinstance(value, bytes) or len(value) < HEADER_BYTES:
        return None
    magic, _, n_bytes = _HEADER.unpack_from(value)
    if magic != _MAGIC or n_bytes > _MAX_BLOCK_BYTES:
        return None
    return int(n_bytes)


def pack(key: str, block: memoryview) -> list[bytes | memoryview]:
    """The values of a block. All but the first are views of it."""
    first = VALUE_BYTES - HEADER_BYTES
    header = _HEADER.pack(_MAGIC, zlib.crc32(block, zlib.crc32(key.encode())), len(block))
    return [
        b"".join((header, block[:first])),
        *(block[i : i + VALUE_BYTES] for i in range(first, len(block), VALUE_BYTES)),
    ]


def contents_of(key: str, values: Sequence[object]) -> list[memoryview] | None:
    """The bytes of a block in its values, or None if they are not a whole block with this key."""
    n_bytes = size_in(values[0])
    parts = [memoryview(value) for value in values if isinstance(value, bytes)]
    if n_bytes is None or len(parts) < len(values):
        return None
    checksum = _HEADER.unpack_from(parts[0])[1]
    parts[0] = parts[0][HEADER_BYTES:]
    if sum(len(part) for part in parts) != n_bytes:
        return None
    actual = zlib.crc32(key.encode())
    for part in parts:
        actual = zlib.crc32(part, actual)
    return parts if actual == checksum else None


def unpack(key: str, values: Sequence[object], into: memoryview) -> bool:
    """Copy a block into a buffer of its size. Returns whether it is whole; if not, the buffer is left as it was."""
    parts = contents_of(key, values) if size_in(values[0]) == len(into) else None
    if parts is None:
        return False
    start = 0
    for part in parts:
        into[start : start + len(part)] = part
        start += len(part)
    return True
