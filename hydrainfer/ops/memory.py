"""Memory for weights and for the rows that are multiplied by them."""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_LARGE = 256 << 10
"""The size from which a tensor has memory pages of its own."""


def weights(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor. A large one on a CPU lies in huge pages if the system has them: a decode step reads
    every weight, and small pages would be too many for a core's TLB."""
    made = torch.empty(shape, dtype=dtype, device=device)
    if made.device.type == "cpu" and made.nbytes >= _LARGE and hasattr(mmap, "MADV_HUGEPAGE"):
        _advise(made.data_ptr() // mmap.PAGESIZE, made.data_ptr() + made.nbytes, mmap.MADV_HUGEPAGE)
    return made


def give_back(tensor: Tensor) -> None:
    """Return the tensor's whole memory pages to the system; its values are lost. Merely freed, a large tensor's memory
    may stay with the allocator, if it lies between others."""
    if tensor.device.type == "cpu" and tensor.nbytes >= _LARGE and hasattr(mmap, "MADV_DONTNEED"):
        end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        _advise(-(-tensor.data_ptr() // mmap.PAGESIZE), end, mmap.MADV_DONTNEED)


def _advise(first_page: int, end: int, advice: int) -> None:
    """Call madvise on the memory from page `first_page` to byte `end`. If the system refuses, nothing changes."""
    first = first_page * mmap.PAGESIZE
    _libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), advice)


def empty_rows(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor [rows, ...] on the CPU, in memory for `rows_in_steps` rows."""
    return torch.empty((rows_in_steps(shape[0]), *shape[1:]), dtype=dtype)[: shape[0]]


def rows_in_steps(n: int) -> int:
    """`n` rounded up: not at all up to 16, to one of 8 steps per doubling up to 128, to one of 16 steps above."""
    doubling = (n - 1).bit_length()
    return n if n <= 16 else n + -n % (1 << doubling - (4 if n <= 128 else 5))


def with_more_rows(x: Tensor, more: int) -> Tensor:
    """`x` [rows, width] followed by `more` rows of any content: those behind it in its memory, or new ones."""
    n, width = x.shape
    behind = x.untyped_storage().nbytes() // x.itemsize - x.storage_offset() - n * width
    if x.is_contiguous() and behind >= more * width:
        return x.as_strided((n + more, width), (width, 1))
    return F.pad(x, (0, 0, 0, more))


@cache
def _libc() -> Any:
    return ctypes.CDLL(None)
