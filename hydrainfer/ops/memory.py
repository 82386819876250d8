"""Memory for weights, and for rows that are multiplied by them."""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_LARGE = 256 << 10
"""Bytes from which a tensor has pages of its own."""


def weights(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor. A large one on a CPU lies in huge pages where the system has some: a step of decodes
    reads every weight, from more small pages than a core keeps the addresses of."""
    made = torch.empty(shape, dtype=dtype, device=device)
    if made.device.type == "cpu" and made.nbytes >= _LARGE and hasattr(mmap, "MADV_HUGEPAGE"):
        _advise(made.data_ptr() // mmap.PAGESIZE, made.data_ptr() + made.nbytes, mmap.MADV_HUGEPAGE)
    return made


def give_back(tensor: Tensor) -> None:
    """Its whole pages, to the system, so that its numbers are lost. A large tensor that is merely freed may stay with
    the allocator, if it lies between others."""
    if tensor.device.type == "cpu" and tensor.nbytes >= _LARGE and hasattr(mmap, "MADV_DONTNEED"):
        end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        _advise(-(-tensor.data_ptr() // mmap.PAGESIZE), end, mmap.MADV_DONTNEED)


def _advise(first_page: int, end: int, advice: int) -> None:
    """Refused, it changes nothing."""
    first = first_page * mmap.PAGESIZE
    _libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), advice)


def empty_rows(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor [rows, ...] on the CPU, with memory for as many more rows as `rows_in_steps` wants."""
    return torch.empty((rows_in_steps(shape[0]), *shape[1:]), dtype=dtype)[: shape[0]]


def rows_in_steps(n: int) -> int:
    """`n` up to 16; above, the next of 8 numbers per doubling up to 128, of 16 after."""
    doubling = (n - 1).bit_length()
    return n if n <= 16 else n + -n % (1 << doubling - (4 if n <= 128 else 5))


def with_more_rows(x: Tensor, more: int) -> Tensor:
    """`x` [rows, width] with so many more rows, which hold anything: those behind it in its memory, or new ones."""
    n, width = x.shape
    behind = x.untyped_storage().nbytes() // x.itemsize - x.storage_offset() - n * width
    if x.is_contiguous() and behind >= more * width:
        return x.as_strided((n + more, width), (width, 1))
    return F.pad(x, (0, 0, 0, more))


@cache
def _libc() -> Any:
    return ctypes.CDLL(None)
