"""What CUDA computes against the references on the same device: kernels, FlashInfer, torch. Not yet run on a GPU."""

from __future__ import annotations

import pytest
import torch

from hydrainfer.ops import KV, AttentionBatch, block_copier, reference, select_ops
from tests.ops.test_variants import BATCHES, close, paged, random

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

CUDA = torch.device("cuda", 0)


def moved(cache: KV, batch: AttentionBatch) -> tuple[KV, AttentionBatch]:
    for name in ("tables", "lengths", "slots", "starts"):
        setattr(batch, name, getattr(batch, name).to(CUDA))
    return KV(*(x.to(CUDA) for x in cache)), batch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (28, 4)])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("shape", BATCHES)
def test_a_layer(dtype, heads, kv_heads, head_dim, shape):
    """Rope, the write of keys and values, attention, by whatever is chosen here."""
    ops = select_ops(CUDA, dtype, head_dim)
    counts, contexts, *seen = BATCHES[shape]
    cache, batch = moved(*paged(counts, contexts, kv_heads, head_dim, dtype, *seen))
    ops.prepare(batch)
    qkv = random(sum(counts), heads + 2 * kv_heads, head_dim, dtype=dtype, seed=7).to(CUDA)
    turns = random(sum(counts), head_dim // 2, dtype=torch.float32, seed=8).to(CUDA)
    other, turned, n = KV(*(x.clone() for x in cache)), qkv.clone(), heads + kv_heads
    ops.rope_write_kv(turned[:, :n], turned[:, n:], turns.cos(), turns.sin(), cache, batch)
    reference.rope_write_kv(qkv[:, :n], qkv[:, n:], turns.cos(), turns.sin(), other, batch)
    close(turned, qkv)
    for kept, want in zip(cache, other):
        close(kept, want)
    q, kv, scale = qkv[:, :heads], KV(qkv[:, heads:n], qkv[:, n:]), head_dim**-0.5
    for sinks in (None, random(heads, dtype=torch.float32, seed=9).to(CUDA)):
        close(ops.attention(q, kv, other, batch, scale, sinks), reference.attention(q, kv, other, batch, scale, sinks))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_silu_and_mul(dtype):
    gate_up = random(33, 2 * 18944, dtype=dtype).to(CUDA)
    close(select_ops(CUDA, dtype, 128).silu_and_mul(gate_up), reference.silu_and_mul(gate_up))


def test_blocks_of_a_migration():
    copy = block_copier(CUDA)
    assert copy is not None, "the CUDA kernels did not build here"
    to, source = (torch.randint(0, 256, (40, 917504), dtype=torch.uint8, device=CUDA) for _ in range(2))
    into, ids = (torch.randperm(40, device=CUDA)[:17] for _ in range(2))
    want = to.clone()
    want[into] = source[ids]
    copy(to, into, source, ids)
    assert torch.equal(to, want)
