"""`CudaKernels` on a CPU, with a module that computes as the kernels do: layouts, slices, orders of arguments, and what
is left to torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hydrainfer.ops import KV, DeltaLayer, HeadNorms, ScanBatch, reference, select_ops
from hydrainfer.ops.cuda.kernels import CudaKernels
from tests.ops.test_scan import batch_of
from tests.ops.test_variants import close, paged, random

pytestmark = pytest.mark.cpu
F32 = torch.float32


class Computes:
    """The module of `kernels/cuda`; counts what it is called for."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def rope(self, qk, cos, sin) -> None:
        self.calls.append("rope")
        reference.rope(qk, cos, sin)

    def norm_rope(self, qk, to, q_norm, k_norm, cos, sin, kv_heads, eps) -> None:
        self.calls.append("norm_rope")
        n = qk.shape[1] - kv_heads
        for part, weight, made in ((qk[:, :n], q_norm, to[:, :n]), (qk[:, n:], k_norm, to[:, n:])):
            made.copy_(reference.rms_norm(part.float(), weight.float(), eps))
        reference.rope(to, cos, sin)

    def write_heads(self, qk, fresh, to, q_norm, k_norm, cos, sin, keys, values, slots, eps) -> None:
        self.calls.append("write_heads")
        n, made = qk.shape[1] - keys.shape[2], qk.float()
        if q_norm is not None:
            for part, weight in ((made[:, :n], q_norm), (made[:, n:], k_norm)):
                part.copy_(reference.rms_norm(part, weight.float(), eps))
        reference.rope(made, cos, sin)
        to.copy_(made)
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                block, offset = divmod(slot, keys.shape[1])
                keys[block, offset], values[block, offset] = to[row, n:], fresh[row]

    def conv_step(self, x, weight, bias, tails, sources, targets, out, silu) -> None:
        self.calls.append("conv_step")
        made = self._rows(
            lambda *rows: reference.short_conv(rows[0], weight, bias, tails, rows[-1]), [x], sources, targets
        )
        out.copy_(torch.nn.functional.silu(made) if silu else made)

    def delta_step(self, mixed, gate, beta, step, norm, rates, biases, states, sources, targets, out, eps) -> None:
        self.calls.append("delta_step")
        layer = DeltaLayer(norm, norm, rates, biases, eps)
        rows = [mixed.float(), gate, beta, step]
        delta = lambda *rows: reference.delta_heads(*rows[:-1], layer, states, rows[-1])  # noqa: E731
        out.copy_(self._rows(delta, rows, sources, targets))

    @staticmethod
    def _rows(op, rows, sources, targets) -> torch.Tensor:
        """Row after row, in place."""
        assert all(len(part) == len(sources) == len(targets) for part in rows)
        made = []
        for i in range(len(sources)):
            one = ScanBatch(1, sources[i : i + 1], targets[i : i + 1], [])
            made.append(op(*(part[i : i + 1] for part in rows), one))
        return torch.cat(made)


@pytest.fixture
def computes():
    module = Computes()
    return module, CudaKernels(module)


@pytest.mark.parametrize("fresh", [False, True])
def test_a_mixed_batch_of_recurrent_layers(computes, fresh):
    """Decodes by kernels, chunks by torch, all into one result."""
    module, kernels = computes
    heads, key_heads, key_dim, dim, width = 6, 2, 16, 16, 4
    counts = [1, 1, 1, 5, 65]
    channels, n = 2 * key_heads * key_dim + heads * dim, sum(counts)
    # as a product gives them: what follows the channels makes rows that start at multiples of 16 bytes
    rows = random(n, channels + heads * dim + 2 * heads, dtype=F32).split([channels, heads * dim, heads, heads], 1)
    conv, norm = random(channels, width, dtype=F32, seed=1), random(dim, dtype=F32, seed=2)
    layer = DeltaLayer(conv, norm, torch.linspace(-4, 1, heads), random(heads, dtype=F32, seed=3), 1e-6)
    tails = random(30, 2, width - 1, channels, dtype=F32, seed=4)
    states = random(30, 2, heads, key_dim, dim, dtype=F32, seed=5)
    ours, wanted = ([part.clone()[:, 1] for part in (tails, states)] for _ in range(2))
    batch = batch_of(counts, fresh)
    got, want = kernels.gated_delta(*rows, layer, *ours, batch), reference.gated_delta(*rows, layer, *wanted, batch)
    assert module.calls == ["conv_step", "delta_step"]
    close(got, want)
    for one, other in zip(ours, wanted):
        close(one, other)
    x, ours, wanted = rows[0], tails.clone()[:, 1], tails.clone()[:, 1]
    bias = random(channels, dtype=F32, seed=6)
    close(kernels.short_conv(x, conv, bias, ours, batch), reference.short_conv(x, conv, bias, wanted, batch))
    close(ours, wanted)
    assert module.calls == ["conv_step", "delta_step", "conv_step"]


def test_operators_without_a_kernel_are_left_to_torch_and_in_no_graph(computes):
    module, kernels = computes
    batch = batch_of([1, 1], False)
    x, weight, tails = random(2, 36, dtype=F32), random(36, 5, dtype=F32), random(30, 4, 36, dtype=F32)
    close(
        kernels.short_conv(x, weight, None, tails.clone(), batch), reference.short_conv(x, weight, None, tails, batch)
    )
    with pytest.raises(AssertionError, match="padding rows"):
        kernels.short_conv(x, weight, None, tails, replace(batch, captured=True))
    cache, pages = paged([1, 1], [3, 0], 2, 12, F32)
    turns = random(2, 6, dtype=F32)
    qkv = random(2, 8, 12, dtype=F32)
    kernels.rope_write_kv(qkv[:, :6].clone(), qkv[:, 6:], turns, turns, cache, pages)
    with pytest.raises(AssertionError, match="padding rows"):
        kernels.rope_write_kv(qkv[:, :6], qkv[:, 6:], turns, turns, cache, replace(pages, skips=True))
    assert not module.calls


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("heads", "half"), [(4, 32), (4, 8), (0, 32)])
def test_heads_that_are_normalised(computes, wide, heads, half):
    module, kernels = computes
    dtype, dim, kv_heads = torch.bfloat16, 64, 2
    ops, n = select_ops("cpu", dtype, dim, use_native=False, only="reference"), heads + kv_heads
    cache, batch = paged([1, 1, 5], [3, 0, 9], kv_heads, dim, dtype)
    other = KV(*(part.clone() for part in cache))
    qkv, turns = random(7, n + kv_heads, dim, dtype=dtype), random(7, half, dtype=F32, seed=1)
    norms = HeadNorms(*(random(dim, dtype=F32 if wide else dtype, seed=i) for i in (2, 3)), 1e-6)
    args = norms, turns.cos(), turns.sin()
    was = qkv.clone()
    got = kernels.norm_rope_write_kv(qkv[:, :n], qkv[:, n:], *args, cache, batch, ops)
    assert module.calls == ["write_heads"] and torch.equal(qkv, was)
    close(got, reference.norm_rope_write_kv(qkv[:, :n], qkv[:, n:], *args, other, batch, ops))
    for kept, wanted in zip(cache, other):
        close(kept, wanted)


def test_heads_of_a_tower_that_are_normalised(computes):
    module, kernels = computes
    ops = select_ops("cpu", torch.bfloat16, 64, use_native=False, only="reference")
    qkv, turns = random(7, 10, 64, dtype=torch.bfloat16), random(7, 32, dtype=F32, seed=1)
    norms = HeadNorms(*(random(64, dtype=torch.bfloat16, seed=i) for i in (2, 3)), 1e-6)
    args = qkv[:, :8], 2, norms, turns.cos(), turns.sin(), ops
    for got, want in zip(kernels.norm_rope(*args), reference.norm_rope(*args)):
        close(got, want)
    assert module.calls == ["norm_rope"]


def test_blocks_of_any_size_are_copied_whole(computes):
    _, kernels = computes
    to, source = torch.zeros(4, 20, dtype=torch.uint8), torch.arange(80).view(4, 20).to(torch.uint8)
    kernels.copy_blocks(to, torch.tensor([3, 1]), source, torch.tensor([0, 2]))
    assert torch.equal(to[[3, 1]], source[[0, 2]]) and not to[[0, 2]].any()
