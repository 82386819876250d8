"""The compiled CUDA kernels of `kernels/cuda`, each with its reference's signature."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hydrainfer.ops import delta_chunks, reference, torch_variants
from hydrainfer.ops.batch import KV, AttentionBatch, GridRows, HeadNorms
from hydrainfer.ops.build import load_cuda_kernels
from hydrainfer.ops.scan import DeltaLayer, ScanBatch
from hydrainfer.ops.table import OpSet

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ACCESS = 16  # bytes: what the kernels load and store at once
_CONV_WIDTHS = (3, 4, 7)
_KEYS_EACH, _COLUMNS_EACH, _MOST = 16, 4, 128  # of `kernels/cuda/scan.cuh`: of a thread, and the most of a head


class CudaKernels:
    """Functions of the compiled module. Tensors whose layout does not allow 16-byte accesses are left to torch."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def supports(self, dtype: torch.dtype, head_dim: int) -> bool:
        return dtype in _DTYPES and head_dim // 2 * dtype.itemsize % _ACCESS == 0

    def rope(self, qk: Tensor, cos: Tensor, sin: Tensor) -> None:
        if _halves(qk.shape[2], cos, qk.element_size(), _least_access(qk)) and _rows_of_packs(qk):
            self._module.rope(qk, cos, sin)
        else:
            reference.rope(qk, cos, sin)

    def rope_write_kv(
        self, qk: Tensor, values: Tensor, cos: Tensor, sin: Tensor, cache: KV, batch: AttentionBatch
    ) -> None:
        if _writes(qk, values, cos, cache):
            self._module.write_heads(qk, values, qk, None, None, cos, sin, *cache, batch.slots, 0.0)
        else:
            assert not batch.skips, "torch's operators would write the keys of padding rows"
            reference.rope_write_kv(qk, values, cos, sin, cache, batch)

    def norm_rope(
        self, qk: Tensor, kv_heads: int, norms: HeadNorms, cos: Tensor, sin: Tensor, ops: OpSet
    ) -> tuple[Tensor, Tensor]:
        n, halves = qk.shape[1] - kv_heads, _halves(qk.shape[2], cos, qk.element_size(), _ACCESS)
        if not halves or not _rows_of_packs(qk) or not norms.q.dtype == norms.k.dtype == qk.dtype:
            return reference.norm_rope(qk, kv_heads, norms, cos, sin, ops)
        out = torch.empty(qk.shape, dtype=qk.dtype, device=qk.device)
        self._module.norm_rope(qk, out, norms.q, norms.k, cos, sin, kv_heads, norms.eps)
        return out[:, :n], out[:, n:]

    def norm_rope_write_kv(
        self,
        qk: Tensor,
        values: Tensor,
        norms: HeadNorms,
        cos: Tensor,
        sin: Tensor,
        cache: KV,
        batch: AttentionBatch,
        ops: OpSet,
    ) -> Tensor:
        same = norms.q.dtype == norms.k.dtype and norms.q.dtype in (qk.dtype, torch.float32)
        if not same or not _writes(qk, values, cos, cache):
            assert not batch.skips, "torch's operators would write the keys of padding rows"
            return reference.norm_rope_write_kv(qk, values, norms, cos, sin, cache, batch, ops)
        out = torch.empty(qk.shape, dtype=qk.dtype, device=qk.device)
        self._module.write_heads(qk, values, out, norms.q, norms.k, cos, sin, *cache, batch.slots, norms.eps)
        return out

    def rms_norm_wide(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        dense = x.dim() == 2 and x.is_contiguous() and _rows_of_packs(x)
        if not dense or weight.dtype != torch.float32:
            return reference.rms_norm_wide(x, weight, eps)
        out = torch.empty_like(x)
        self._module.rms_norm_wide(x, weight, out, eps)
        return out

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        if not _gates(gate_up, _least_access(gate_up)):
            return reference.silu_and_mul(gate_up)
        out = _half_as_wide(gate_up)
        self._module.silu_and_mul(gate_up, out)
        return out

    def gelu_tanh_and_mul(self, gate_up: Tensor) -> Tensor:
        if not _gates(gate_up, _least_access(gate_up)):
            return reference.gelu_tanh_and_mul(gate_up)
        out = _half_as_wide(gate_up)
        self._module.gelu_tanh_and_mul(gate_up, out)
        return out

    def clamped_swiglu(self, gate_up: Tensor, limit: float, alpha: float) -> Tensor:
        if not _gates(gate_up):
            return reference.clamped_swiglu(gate_up, limit, alpha)
        out = _half_as_wide(gate_up)
        self._module.clamped_swiglu(gate_up, out, limit, alpha)
        return out

    def quick_gelu(self, x: Tensor) -> Tensor:
        if x.dim() != 2 or not x.is_contiguous() or not _rows_of_packs(x):
            return reference.quick_gelu(x)
        self._module.quick_gelu(x)
        return x

    def short_conv(self, x: Tensor, weight: Tensor, bias: Tensor | None, tails: Tensor, batch: ScanBatch) -> Tensor:
        n = batch.n_decodes
        if not n or not _convolves(x, weight, tails):
            assert not batch.captured, "torch's operators would write the states of padding rows"
            return reference.short_conv(x, weight, bias, tails, batch)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for wave in batch.waves:
            ids = batch.sources[wave], batch.targets[wave]
            self._module.conv_step(x[wave], weight, bias, tails, *ids, out[wave], False)
        if batch.pieces:
            out[n:] = reference.short_conv(x[n:], weight, bias, tails, batch.chunks)
        return out

    def grid_conv(self, rows: Tensor, weight: Tensor, grid: GridRows) -> Tensor:
        columns = rows.shape[1] // 3
        packs = rows.is_contiguous() and columns * rows.element_size() % _ACCESS == 0 and _rows_of_packs(rows)
        if not packs or weight.shape[2:] != (3, 3) or not weight.is_contiguous():
            return reference.grid_conv(rows, weight, grid)
        out = torch.empty((rows.shape[0], columns), dtype=rows.dtype, device=rows.device)
        self._module.grid_conv(rows, weight, grid.places, grid.sizes, out, grid.merge)
        return out

    def gated_delta(
        self,
        qkv: Tensor,
        gate: Tensor,
        beta: Tensor,
        step: Tensor,
        layer: DeltaLayer,
        tails: Tensor,
        states: Tensor,
        batch: ScanBatch,
    ) -> Tensor:
        """Decodes take two kernels, which read and write their states once. Chunks use the matrix form."""
        n, rule, norm = batch.n_decodes, delta_chunks.delta_rule, torch_variants.rms_norm_torch
        if not n or not _convolves(qkv, layer.conv, tails) or not _steps(gate, beta, step, states):
            assert not batch.captured, "torch's operators would write the states of padding rows"
            return reference.gated_delta(qkv, gate, beta, step, layer, tails, states, batch, rule, norm)
        out, mixed = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (gate, qkv[:n]))
        module = self._module
        for wave in batch.waves:
            ids = batch.sources[wave], batch.targets[wave]
            module.conv_step(qkv[wave], layer.conv, None, tails, *ids, mixed[wave], True)
            rows = (part[wave] for part in (mixed, gate, beta, step))
            module.delta_step(*rows, layer.norm, layer.log_rate, layer.step_bias, states, *ids, out[wave], layer.eps)
        if batch.pieces:
            qkv, gate, beta, step = (part[n:] for part in (qkv, gate, beta, step))
            out[n:] = reference.gated_delta(qkv, gate, beta, step, layer, tails, states, batch.chunks, rule, norm)
        return out

    def copy_blocks(self, to: Tensor, to_ids: Tensor, source: Tensor | int, source_ids: Tensor) -> None:
        """Copy blocks `source_ids` of `source` to blocks `to_ids` of `to`, in one launch if the size of a block is a
        multiple of 16 bytes. `to` [blocks, bytes] uint8; `source` is like it, or the address at which blocks of
        another process are mapped, a multiple of 16 as the size of a block. Ids are int64 on the device, `to_ids`
        without repetition."""
        if isinstance(source, int):
            self._module.copy_blocks_from(to, source, to_ids, source_ids)
        elif to.shape[1] % _ACCESS:
            to[to_ids] = source[source_ids]
        else:
            self._module.copy_blocks(to, source, to_ids, source_ids)


def _writes(qk: Tensor, values: Tensor, cos: Tensor, cache: KV) -> bool:
    """Whether a kernel can rotate `qk` and write keys and values to the cache."""
    same = qk.shape[2] == values.shape[2] and _halves(qk.shape[2], cos, qk.element_size(), _ACCESS)
    return same and all(map(_rows_of_packs, (qk, values, *cache)))


def _halves(dim: int, cos: Tensor, itemsize: int, access: int) -> bool:
    """Whether the rotated halves of heads, and those of the rest, can be accessed `access` bytes at a time. `cos`:
    [rows, half]."""
    return dim // 2 * itemsize % access == 0 and cos.shape[1] * itemsize % access == 0 and cos.shape[1] % 4 == 0


def _least_access(x: Tensor) -> int:
    """The bytes that some kernels access at once where halves are no multiple of 16 bytes."""
    return min(_ACCESS, 4 * x.element_size())


def _gates(gate_up: Tensor, access: int = _ACCESS) -> bool:
    halves = gate_up.shape[1] // 2 * gate_up.element_size() % access == 0
    return gate_up.is_contiguous() and halves and _rows_of_packs(gate_up)


def _half_as_wide(x: Tensor) -> Tensor:
    return torch.empty((x.shape[0], x.shape[1] // 2), dtype=x.dtype, device=x.device)


def _convolves(x: Tensor, weight: Tensor, tails: Tensor) -> bool:
    """Whether a kernel can compute a step of `short_conv`."""
    packs = x.shape[1] * x.element_size() % _ACCESS == 0 and _rows_of_packs(x) and _rows_of_packs(tails)
    return packs and weight.is_contiguous() and weight.shape[1] in _CONV_WIDTHS


def _steps(gate: Tensor, beta: Tensor, step: Tensor, states: Tensor) -> bool:
    """Whether a kernel can compute a step of the delta rule."""
    key_dim, dim = states.shape[2:]
    sizes = key_dim % _KEYS_EACH == 0 and dim % _COLUMNS_EACH == 0 and max(key_dim, dim) <= _MOST
    packs = gate.stride(0) % _COLUMNS_EACH == 0 == gate.storage_offset() % _COLUMNS_EACH
    return sizes and packs and all(x.stride(1) == 1 for x in (gate, beta, step)) and _rows_of_packs(states)


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


def block_copier(device: torch.device) -> Callable[[Tensor, Tensor, Tensor | int, Tensor], None] | None:
    """`CudaKernels.copy_blocks`; None if this device has none."""
    kernels = cuda_kernels()[0] if device.type == "cuda" else None
    return None if kernels is None else kernels.copy_blocks
