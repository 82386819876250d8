"""One cache's bytes on one device, block-major."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

from hydrainfer.cache import CacheKind, CacheSpec
from hydrainfer.core import ExportHandle


class BlockStore:
    """`n_blocks` blocks of `spec.block_shape`. `data[b]` is one block, contiguous, so that a block moves in one copy.

    Memory reads as zero and, on a CPU, is touched only as blocks are first written: a masked row that nobody wrote
    must not hold a NaN.

    `layers` (FULL): per layer a strided view of all blocks, [n_blocks, 2, block_tokens, kv_heads, head_dim].
    `rows` (EMBED): [n_blocks * block_tokens, width]; row `block * block_tokens + offset` is one token's embedding.
    """

    def __init__(self, spec: CacheSpec, n_blocks: int, device: torch.device | str = "cpu") -> None:
        self.spec = spec
        self.n_blocks = n_blocks
        self.data = _zeros((n_blocks, *spec.block_shape), getattr(torch, spec.dtype), torch.device(device))
        self.layers: list[Tensor] = list(self.data.unbind(1)) if spec.kind is CacheKind.FULL else []
        self.rows: Tensor | None = self.data.flatten(0, 1) if spec.kind is CacheKind.EMBED else None

    @property
    def n_bytes(self) -> int:
        return self.n_blocks * self.spec.block_bytes

    def export(self, transport: str, address: str) -> ExportHandle:
        """What a peer needs to read its blocks, where `transport` finds it under `address`."""
        return ExportHandle(transport, address, self.n_blocks, self.spec.block_bytes)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    n_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or n_bytes == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, n_bytes)  # the kernel gives zero pages on first touch; the tensor keeps the mapping alive
    return torch.frombuffer(pages, dtype=dtype).view(shape)
