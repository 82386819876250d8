"""A double of the module of `kernels/cuda` that makes its demands and computes nothing."""

from __future__ import annotations

import torch

from tests.cuda.fake import CUDA


class KernelsDouble:
    """Checks what it is given, and keeps the names of what was called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def rope(self, qk, cos, sin) -> None:
        rows, _, dim = qk.shape
        assert all(x.device == CUDA for x in (qk, cos, sin)) and qk.stride()[1:] == (dim, 1)
        self._turns(rows, dim, cos, sin)
        assert all(n * qk.element_size() % min(16, 4 * qk.element_size()) == 0 for n in (dim // 2, cos.shape[1]))
        self.calls.append("rope")

    def norm_rope(self, qk, to, q_norm, k_norm, cos, sin, kv_heads, eps) -> None:
        rows, heads, dim = qk.shape
        assert all(x.device == CUDA for x in (qk, to, q_norm, k_norm, cos, sin)) and qk.dtype == to.dtype
        self._turns(rows, dim, cos, sin)
        assert to.shape == qk.shape and qk.stride()[1:] == to.stride()[1:] == (dim, 1) and 0 <= kv_heads <= heads
        assert q_norm.shape == k_norm.shape == (dim,) and q_norm.dtype == k_norm.dtype == qk.dtype and eps > 0
        assert all(n * qk.element_size() % 16 == 0 for n in (dim // 2, cos.shape[1]))
        self.calls.append("norm_rope")

    def write_heads(self, qk, fresh, to, q_norm, k_norm, cos, sin, keys, values, slots, eps) -> None:
        rows, heads, dim = qk.shape
        assert all(x.device == CUDA for x in (qk, fresh, to, cos, sin, keys, values, slots))
        self._turns(rows, dim, cos, sin)
        assert qk.dtype == to.dtype == fresh.dtype == keys.dtype == values.dtype and to.shape == qk.shape
        assert slots.shape == (rows,) and slots.dtype == torch.int64
        assert keys.shape == values.shape and keys.stride() == values.stride() and keys.stride()[2:] == (dim, 1)
        assert keys.shape[3] == dim and heads >= keys.shape[2] and fresh.shape == (rows, keys.shape[2], dim)
        assert qk.stride()[1:] == to.stride()[1:] == fresh.stride()[1:] == (dim, 1)
        assert keys.stride(1) == keys.shape[2] * dim
        assert all(n * qk.element_size() % 16 == 0 for n in (dim // 2, cos.shape[1]))
        assert (q_norm is None) == (k_norm is None) == (to is qk), "heads that are normalised go elsewhere"
        if q_norm is not None:
            assert q_norm.dtype == k_norm.dtype and q_norm.dtype in (qk.dtype, torch.float32) and eps > 0
            assert q_norm.shape == k_norm.shape == (dim,)
        self.calls.append("write_heads")

    @staticmethod
    def _turns(rows, dim, cos, sin) -> None:
        assert cos.shape == sin.shape and cos.shape[0] == rows and 2 * cos.shape[1] <= dim and cos.shape[1] % 4 == 0
        assert cos.dtype == sin.dtype == torch.float32 and cos.is_contiguous() and sin.is_contiguous()

    def silu_and_mul(self, gate_up, out) -> None:
        self._gates("silu_and_mul", gate_up, out)

    def gelu_tanh_and_mul(self, gate_up, out) -> None:
        self._gates("gelu_tanh_and_mul", gate_up, out)

    def clamped_swiglu(self, gate_up, out, limit, alpha) -> None:
        assert limit > 0 and alpha > 0
        self._gates("clamped_swiglu", gate_up, out)

    def _gates(self, name, gate_up, out) -> None:
        least = 16 if name == "clamped_swiglu" else min(16, 4 * out.element_size())
        assert gate_up.is_contiguous() and out.is_contiguous() and gate_up.dtype == out.dtype
        assert out.shape == (gate_up.shape[0], gate_up.shape[1] // 2)
        assert out.shape[1] * out.element_size() % least == 0
        self.calls.append(name)

    def quick_gelu(self, x) -> None:
        assert x.is_contiguous() and x.dim() == 2 and x.shape[1] * x.element_size() % 16 == 0
        self.calls.append("quick_gelu")

    def rms_norm_wide(self, x, weight, out, eps) -> None:
        assert x.is_contiguous() and out.is_contiguous() and x.shape == out.shape and x.dtype == out.dtype and eps > 0
        assert weight.dtype == torch.float32 and weight.shape == (x.shape[1],)
        assert x.shape[1] * x.element_size() % 16 == 0
        self.calls.append("rms_norm_wide")

    def conv_step(self, x, weight, bias, tails, sources, targets, out, silu) -> None:
        rows, channels = x.shape
        assert x.stride(1) == 1 and out.is_contiguous() and out.shape == x.shape and weight.is_contiguous()
        assert (
            weight.shape[0] == channels
            and weight.shape[1] in (3, 4, 7)
            and tails.shape[1:] == (weight.shape[1] - 1, channels)
        )
        assert tails.stride()[1:] == (channels, 1) and (bias is None or bias.shape == (channels,))
        assert all(t.storage_offset() * t.element_size() % 16 == 0 for t in (x, tails))
        assert all(n * x.element_size() % 16 == 0 for n in (channels, x.stride(0), tails.stride(0)))
        assert x.dtype == weight.dtype == tails.dtype == out.dtype
        self._ids(rows, sources, targets)
        self.calls.append("conv_step")

    def grid_conv(self, rows, weight, places, sizes, out, merge) -> None:
        n, columns = out.shape
        assert (
            rows.is_contiguous() and out.is_contiguous() and weight.is_contiguous() and rows.shape == (n, 3 * columns)
        )
        assert weight.shape == (columns, 1, 3, 3) and places.shape == sizes.shape == (n, 2) and merge > 0
        assert places.is_contiguous() and sizes.is_contiguous() and places.dtype == sizes.dtype == torch.float32
        assert rows.dtype == weight.dtype == out.dtype and columns * out.element_size() % 16 == 0
        assert rows.device == places.device == sizes.device == CUDA
        self.calls.append("grid_conv")

    def delta_step(self, mixed, gate, beta, step, norm, rate, bias, states, sources, targets, out, eps) -> None:
        rows, (heads, key_dim, dim) = len(mixed), states.shape[1:]
        assert mixed.is_contiguous() and out.is_contiguous() and gate.shape == out.shape == (rows, heads * dim)
        assert beta.shape == step.shape == (rows, heads) and norm.shape == (dim,)
        assert gate.stride(1) == beta.stride(1) == step.stride(1) == 1
        assert rate.shape == bias.shape == (heads,) and rate.dtype == bias.dtype == states.dtype == torch.float32
        assert states.stride()[1:] == (key_dim * dim, dim, 1) and states.stride(0) % 4 == 0
        assert gate.stride(0) % 4 == gate.storage_offset() % 4 == 0 and eps > 0
        assert key_dim % 16 == dim % 4 == 0 and max(key_dim, dim) <= 128
        assert (mixed.shape[1] - heads * dim) % (2 * key_dim) == 0
        self._ids(rows, sources, targets)
        self.calls.append("delta_step")

    @staticmethod
    def _ids(rows, sources, targets) -> None:
        assert sources.shape == targets.shape == (rows,) and sources.dtype == targets.dtype == torch.int64
        assert sources.device == targets.device == CUDA

    def copy_blocks(self, to, source, to_ids, source_ids) -> None:
        assert to.shape[1] == source.shape[1] and to.shape[1] % 16 == 0
        assert to_ids.shape == source_ids.shape and to_ids.dtype == source_ids.dtype == torch.int64
        assert to.device == source.device == to_ids.device == source_ids.device == CUDA
        self.calls.append("copy_blocks")
