"""Reading safetensors files straight into preallocated tensors, one sequential pass and no memory map.

A mapped file stays resident next to the weights copied out of it; reading leaves only the page cache. Format:
8 bytes header length, JSON header {name: {dtype, shape, data_offsets}}, bytes (huggingface/safetensors README).
"""

from __future__ import annotations

import json
import math
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import torch

from hydrainfer.core import CheckpointError

_MAX_HEADER_BYTES = 100_000_000
_PIECE_BYTES = 4 << 20
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2}
ITEM_BYTES |= dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3"), 1)
PLAIN = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


class Scales(NamedTuple):
    """The scales of an FP8 tensor, in their file from `offset` on: `grid` (matrices, rows, columns) numbers, each for a
    `block` (matrices, rows, columns) of the tensor or, at its edges, what there is of one."""

    file: Path
    offset: int
    dtype: str
    grid: tuple[int, ...]
    block: tuple[int, ...]


class StoredTensor(NamedTuple):
    """One tensor of a file: `offset` is in bytes from the file's start; `heads` and `plus` are those of
    `checkpoint.gguf.HeldTensor`. `scales`: those of its numbers, if it is in FP8."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int
    heads: int = 0
    plus: float = 0.0
    scales: Scales | None = None


def read_header(path: Path) -> list[StoredTensor]:
    """The tensors of one file in file order. Raises `CheckpointError` if it is missing, truncated or malformed."""
    try:
        size = path.stat().st_size
        with path.open("rb") as f:
            n = int.from_bytes(f.read(8), "little")
            if size < 8 or n > min(size - 8, _MAX_HEADER_BYTES):
                raise CheckpointError(f"{path}: is truncated or not a safetensors file ({size} bytes)")
            header = json.loads(f.read(n))
        found = [_entry(name, e, 8 + n) for name, e in header.items() if name != "__metadata__"]
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent}: weight file {path.name} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as e:
        raise CheckpointError(f"{path}: is not a readable safetensors file ({type(e).__name__})") from None
    for t in found:
        if t.dtype in ITEM_BYTES and t.n_bytes != math.prod(t.shape) * ITEM_BYTES[t.dtype]:
            raise CheckpointError(f"{path}: tensor {t.name} has {t.n_bytes} bytes, which does not match its shape")
    end = max((t.offset + t.n_bytes for t in found), default=0)
    if end > size:
        raise CheckpointError(f"{path}: is truncated: {size} bytes of {end}")
    return sorted(found, key=lambda t: t.offset)


def _entry(name: str, entry: dict, base: int) -> StoredTensor:
    start, end = (int(v) for v in entry["data_offsets"])
    if not 0 <= start <= end:
        raise ValueError(name)
    return StoredTensor(name, str(entry["dtype"]), tuple(int(n) for n in entry["shape"]), base + start, end - start)


def read_into(file: FileIO, offset: int, buffer: memoryview) -> None:
    """Fill `buffer` from `offset`. Raises `CheckpointError` if the file ends early."""
    file.seek(offset)
    filled = 0
    while filled < len(buffer):
        n = file.readinto(buffer[filled:])
        if not n:
            raise CheckpointError(f"{file.name}: ended early while reading weights")
        filled += n


def same_bytes(one: tuple[Path, StoredTensor], other: tuple[Path, StoredTensor]) -> bool:
    """Whether two tensors, each given with its file, are equal in shape, dtype and bytes. Raises `CheckpointError`."""
    (_, a), (_, b) = one, other
    if (a.dtype, a.shape, a.n_bytes) != (b.dtype, b.shape, b.n_bytes):
        return False
    with one[0].open("rb", buffering=0) as first, other[0].open("rb", buffering=0) as second:
        for start in range(0, a.n_bytes, _PIECE_BYTES):
            pieces = [bytearray(min(_PIECE_BYTES, a.n_bytes - start)) for _ in range(2)]
            read_into(first, a.offset + start, memoryview(pieces[0]))
            read_into(second, b.offset + start, memoryview(pieces[1]))
            if pieces[0] != pieces[1]:
                return False
    return True
