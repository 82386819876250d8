"""The compiled CUDA kernels of `kernels/cuda`, each with its reference's signature."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hydrainfer.ops import reference
from hydrainfer.ops.batch import KV, AttentionBatch
from hydrainfer.ops.build import load_cuda_kernels

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ACCESS = 16  # bytes: what the kernels load and store at once


class CudaKernels:
    """Functions of the compiled module. Tensors whose layout does not allow 16-byte accesses are left to torch."""

    def __init__(self, module: Any) -> None:
        self._rope_write_kv = module.rope_write_kv
        self._silu_and_mul = module.silu_and_mul
        self._copy_blocks = module.copy_blocks

    def supports(self, dtype: torch.dtype, head_dim: int) -> bool:
        return dtype in _DTYPES and head_dim // 2 * dtype.itemsize % _ACCESS == 0

    def rope_write_kv(
        self, qk: Tensor, values: Tensor, cos: Tensor, sin: Tensor, cache: KV, batch: AttentionBatch
    ) -> None:
        whole = 2 * cos.shape[1] == qk.shape[2] == values.shape[2]
        if whole and all(map(_rows_of_packs, (qk, values, *cache))):
            self._rope_write_kv(qk, values, cos, sin, *cache, batch.slots)
        else:
            reference.rope_write_kv(qk, values, cos, sin, cache, batch)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        if not gate_up.is_contiguous() or width * gate_up.element_size() % _ACCESS or not _rows_of_packs(gate_up):
            return reference.silu_and_mul(gate_up)
        out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
        self._silu_and_mul(gate_up, out)
        return out

    def copy_blocks(self, to: Tensor, to_ids: Tensor, source: Tensor, source_ids: Tensor) -> None:
        """Copy blocks `source_ids` of `source` [blocks, bytes] uint8 to blocks `to_ids` of `to`, in one launch. Ids are
        int64 on the device, `to_ids` without repetition. The size of a block is any multiple of 16 bytes."""
        self._copy_blocks(to, source, to_ids, source_ids)


def _rows_of_packs(x: Tensor) -> bool:
    """Whether each row is dense and starts at a multiple of `_ACCESS`. Memory itself starts at multiples of 256
    bytes."""
    dense, n = 1, x.element_size()
    for size, stride in zip(x.shape[:0:-1], x.stride()[:0:-1]):
        if stride != dense:
            return False
        dense *= size
    return x.storage_offset() * n % _ACCESS == 0 and x.stride(0) * n % _ACCESS == 0


@cache
def cuda_kernels() -> tuple[CudaKernels | None, tuple[str, ...]]:
    """The kernels, or None and the reason in one line. They are compiled at most once for a virtual
    environment."""
    module, notes = load_cuda_kernels()
    return (None if module is None else CudaKernels(module)), notes


def block_copier(device: torch.device) -> Callable[[Tensor, Tensor, Tensor, Tensor], None] | None:
    """`CudaKernels.copy_blocks`; None if this device has none."""
    kernels = cuda_kernels()[0] if device.type == "cuda" else None
    return None if kernels is None else kernels.copy_blocks
