"""Memory for weights."""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from typing import Any

import torch
from torch import Tensor

_LARGE = 256 << 10
"""Bytes from which a tensor has pages of its own."""


def weights(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor. A large one on a CPU lies in huge pages where the system has some: a step of decodes
    reads every weight, from more small pages than a core keeps the addresses of."""
    made = torch.empty(shape, dtype=dtype, device=device)
    if made.device.type == "cpu" and made.nbytes >= _LARGE and hasattr(mmap, "MADV_HUGEPAGE"):
        before = made.data_ptr() % mmap.PAGESIZE
        first, n_bytes = ctypes.c_void_p(made.data_ptr() - before), ctypes.c_size_t(made.nbytes + before)
        _libc().madvise(first, n_bytes, mmap.MADV_HUGEPAGE)  # refused, it changes nothing
    return made


@cache
def _libc() -> Any:
    return ctypes.CDLL(None)
