"""What a device computes against the references on the same device: kernels, FlashInfer, torch; and the sampler against
the CPU's; pictures by graphs against those without."""

from __future__ import annotations

import pytest
import torch

from hydrainfer.core import Role, SamplingParams
from hydrainfer.models import load_model
from hydrainfer.models.patches import Cut, arrange
from hydrainfer.ops import (
    KV,
    AttentionBatch,
    DeltaLayer,
    GridRows,
    HeadNorms,
    PagedAttention,
    ScanBatch,
    ScanRows,
    Segments,
    block_copier,
    reference,
    select_ops,
)
from hydrainfer.runtime import capture_passes_for
from hydrainfer.runtime.graphs import PassGraphs
from hydrainfer.runtime.sampler import choose
from hydrainfer.runtime.sampling import plan_sampling
from tests.checkpoints_qwen import make_qwen
from tests.ops.test_variants import BATCHES, BLOCK_TOKENS, close, paged, random
from tests.runtime.test_graphs import pictures_of
from tests.runtime.test_sampler import some_logits, work

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

DTYPES = (torch.float32, torch.bfloat16)  # the main path is in bfloat16; FlashInfer's modules are carried for no other


def moved(cache: KV, batch: AttentionBatch, device: torch.device) -> tuple[KV, AttentionBatch]:
    for name in ("tables", "lengths", "slots", "starts"):
        setattr(batch, name, getattr(batch, name).to(device))
    return KV(*(x.to(device) for x in cache)), batch


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (28, 4)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("shape", BATCHES)
def test_a_layer(device, dtype, heads, kv_heads, head_dim, shape):
    """Rope, the write of keys and values, attention, by whatever is chosen here."""
    counts, contexts, *seen = BATCHES[shape]
    window, whole = seen[0] if seen else 0, len(seen) > 1
    plain = PagedAttention("kv", dtype, heads, kv_heads, head_dim, head_dim, head_dim**-0.5, BLOCK_TOKENS, window)
    layers = [plain._replace(whole=whole and head_dim == 256)]  # the modules that are carried
    layers += [plain._replace(sinks=True)] * (head_dim == 64)
    ops = select_ops(device, dtype, head_dim, attentions=layers)
    cache, batch = moved(*paged(counts, contexts, kv_heads, head_dim, dtype, *seen), device)
    ops.prepare(batch)
    qkv = random(sum(counts), heads + 2 * kv_heads, head_dim, dtype=dtype, seed=7).to(device)
    turns = random(sum(counts), head_dim // 2, dtype=torch.float32, seed=8).to(device)
    other, turned, n = KV(*(x.clone() for x in cache)), qkv.clone(), heads + kv_heads
    ops.rope_write_kv(turned[:, :n], turned[:, n:], turns.cos(), turns.sin(), cache, batch)
    reference.rope_write_kv(qkv[:, :n], qkv[:, n:], turns.cos(), turns.sin(), other, batch)
    close(turned, qkv)
    for kept, want in zip(cache, other):
        close(kept, want)
        kept.copy_(want)
    q, kv, scale = qkv[:, :heads], KV(qkv[:, heads:n], qkv[:, n:]), head_dim**-0.5
    for sinks in (None, random(heads, dtype=torch.float32, seed=9).to(device)):
        close(ops.attention(q, kv, cache, batch, scale, sinks), reference.attention(q, kv, other, batch, scale, sinks))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 33])
def test_rows(device, dtype, rows):
    """Products, norms and activations of 7B widths."""
    ops = select_ops(device, dtype, 128)
    x, weight = (random(n, 3584, dtype=dtype, seed=n).to(device) for n in (rows, 512))
    weight, out = weight / 60, random(rows, 512, dtype=dtype, seed=3).to(device)
    close(ops.linear(x, weight), reference.linear(x, weight))
    close(ops.linear_add(out.clone(), x, weight), reference.linear_add(out.clone(), x, weight))
    close(ops.rms_norm(x, x[0], 1e-5), reference.rms_norm(x, x[0], 1e-5))
    norm = random(3584, dtype=torch.float32, seed=4).to(device)
    close(ops.rms_norm_wide(x, norm, 1e-5), reference.rms_norm_wide(x, norm, 1e-5))
    wide = random(rows, 2 * 18944, dtype=dtype, seed=2).to(device) * 20  # exp at its ends too
    for name in ("silu_and_mul", "gelu_tanh_and_mul"):
        close(getattr(ops, name)(wide), getattr(reference, name)(wide))
        odd = wide[:, :6840].contiguous()  # Qwen2.5-VL's tower: halves of 8 bytes' multiples
        close(getattr(ops, name)(odd), getattr(reference, name)(odd))
    close(ops.clamped_swiglu(wide, 7.0, 1.702), reference.clamped_swiglu(wide, 7.0, 1.702))
    close(ops.quick_gelu(wide.clone()), reference.quick_gelu(wide.clone()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wide", [False, True], ids=["norm", "wide norm"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "half"), [(32, 8, 128, 64), (8, 4, 256, 128), (16, 2, 256, 32)])
def test_heads_that_are_normalised(device, dtype, wide, heads, kv_heads, dim, half):
    """Qwen3's, Gemma 3's, and Qwen3.5's, which are rotated in part."""
    ops, n = select_ops(device, dtype, dim), heads + kv_heads
    cache, batch = moved(*paged([1, 1, 9], [30, 0, 5], kv_heads, dim, dtype), device)
    qkv = random(11, n + kv_heads, dim, dtype=dtype, seed=7).to(device)
    turns = random(11, half, dtype=torch.float32, seed=8).to(device)
    norms = HeadNorms(*(random(dim, dtype=torch.float32 if wide else dtype, seed=i).to(device) for i in (3, 4)), 1e-6)
    other, rows = KV(*(x.clone() for x in cache)), qkv.clone()
    args = norms, turns.cos(), turns.sin()
    got = ops.norm_rope_write_kv(rows[:, :n], rows[:, n:], *args, cache, batch, ops)
    want = reference.norm_rope_write_kv(
        qkv[:, :n], qkv[:, n:], *args, other, batch, select_ops(device, dtype, dim, only="reference")
    )
    close(got, want)
    for kept, wanted in zip(cache, other):
        close(kept, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_of_a_tower_that_are_normalised(device, dtype):
    """LFM3-VL's."""
    ops, plain = select_ops(device, dtype, 64), select_ops(device, dtype, 64, only="reference")
    qkv = random(77, 20, 64, dtype=dtype).to(device)
    turns = random(77, 32, dtype=torch.float32).to(device)
    norms = HeadNorms(*(random(64, dtype=dtype, seed=i).to(device) for i in (2, 3)), 1e-6)
    args = qkv[:, :16], 4, norms, turns.cos(), turns.sin()
    for got, want in zip(ops.norm_rope(*args, ops), reference.norm_rope(*args, plain)):
        close(got, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "dim"), [(16, 80), (16, 72), (16, 64)], ids=str)
def test_rope_of_a_tower(device, dtype, heads, dim):
    ops = select_ops(device, dtype, 128)
    qkv = random(577, 3 * heads, dim, dtype=dtype).to(device)
    turns, want = random(577, dim // 2, dtype=torch.float32, seed=1).to(device), qkv.clone()
    ops.rope(qkv[:, : 2 * heads], turns.cos(), turns.sin())
    reference.rope(want[:, : 2 * heads], turns.cos(), turns.sin())
    close(qkv, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_convolution_over_grids_of_patches(device, dtype):
    """LFM3-VL's tower."""
    grids, channels = [(1, 8, 12), (2, 5, 3)], 768
    arrays = arrange(grids, Cut(2, 0)).arrays
    grid = GridRows(grids, 2, *(torch.from_numpy(arrays[name]).to(device) for name in ("places", "sizes")))
    rows = random(len(grid.places), 3 * channels, dtype=dtype).to(device)
    weight = random(channels, 1, 3, 3, dtype=dtype, seed=1).to(device) / 3
    close(select_ops(device, dtype, 64).grid_conv(rows, weight, grid), reference.grid_conv(rows, weight, grid))


def scans(device, *shapes) -> tuple[list[torch.Tensor], list[torch.Tensor], ScanBatch]:
    """States twice, and 33 rows of which some continue in place, some from nothing, some elsewhere; then a chunk."""
    kept = [random(80, 2, *shape, dtype=dtype, seed=i).to(device) for i, (dtype, *shape) in enumerate(shapes)]
    ours, theirs = ([x.clone()[:, 1] for x in kept] for _ in range(2))
    targets = torch.arange(33, device=device)
    sources = torch.where(targets % 3 == 0, targets, torch.where(targets % 3 == 1, -1, targets + 40))
    return ours, theirs, ScanBatch(33, sources, targets, [ScanRows(slice(33, 40), 75, 76)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "biased"), [(3, True), (4, False), (7, False)])
def test_a_step_of_a_short_convolution(device, dtype, width, biased):
    ops, channels = select_ops(device, dtype, 64), 2048
    (tails,), (wanted,), batch = scans(device, (dtype, width - 1, channels))
    x, weight = random(40, channels, dtype=dtype).to(device), random(channels, width, dtype=dtype, seed=1).to(device)
    bias = random(channels, dtype=dtype, seed=2).to(device) if biased else None
    got, want = (f(x, weight, bias, t, batch) for f, t in ((ops.short_conv, tails), (reference.short_conv, wanted)))
    close(got, want)
    assert torch.equal(tails, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "key_heads", "key_dim", "dim"), [(32, 16, 128, 128), (4, 4, 64, 32)], ids=str)
def test_a_step_of_the_delta_rule(device, dtype, heads, key_heads, key_dim, dim):
    ops, channels, values = select_ops(device, dtype, 256), 2 * key_heads * key_dim + heads * dim, heads * dim
    ours, theirs, batch = scans(device, (dtype, 3, channels), (torch.float32, heads, key_dim, dim))
    rows = random(40, channels + values + 2 * heads, dtype=dtype).to(device).split([channels, values, heads, heads], 1)
    conv, norm = random(channels, 4, dtype=dtype, seed=1) / 2, random(dim, dtype=dtype, seed=2)
    rates, biases = torch.linspace(-4.0, 1.0, heads), random(heads, dtype=torch.float32, seed=3)
    layer = DeltaLayer(*(x.to(device) for x in (conv, norm, rates, biases)), 1e-6)
    exact_layer = DeltaLayer(layer.conv.float(), layer.norm.float(), layer.log_rate, layer.step_bias, layer.eps)
    exact_states = [x.clone().float() for x in theirs]
    got = ops.gated_delta(*rows, layer, *ours, batch)
    want = reference.gated_delta(*rows, layer, *theirs, batch)
    exact = reference.gated_delta(*(x.float() for x in rows), exact_layer, *exact_states, batch)
    if dtype == torch.float32:
        close(got, want)
    error, usual = ((x.float() - exact).abs().max() for x in (got, want))
    assert error <= 1.2 * usual + 1e-4, "no further from float32 than the reference, which rounds elsewhere"
    for got, want in zip(ours, theirs):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2 if dtype != torch.float32 else 1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [[7], [4, 64, 8, 64, 4, 1, 8], [577, 577]], ids=str)
def test_attention_within_segments(device, dtype, lengths):
    ops = select_ops(device, dtype, 80)
    qkv, segments = random(sum(lengths), 3, 3, 80, dtype=dtype).to(device), Segments(lengths, device)
    args = (*qkv.unbind(1), segments, 80**-0.5)
    close(ops.attention_segments(*args), reference.attention_segments(*args))


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_pictures_of_any_sizes_by_graphs(device, tmp_path, family):
    if device.type == "cpu":
        pytest.skip("a CPU has no graphs (tests/runtime/test_graphs.py has a double of them)")
    path = make_qwen(family, tmp_path, vision={"num_heads": 1})
    model = load_model(path, Role.parse("E"), device, "bfloat16")
    some = [pictures_of(model.vision, grids) for grids in ([(1, 8, 8)], [(1, 2, 2), (1, 9, 4)], [(2, 4, 6), (1, 7, 7)])]
    capture = capture_passes_for(model)
    assert capture is not None, "torch's FlashAttention is missing"
    with torch.cuda.stream(torch.cuda.Stream(device)), torch.inference_mode():
        plain = [torch.cat(model.encode(pictures)) for pictures in some]
        PassGraphs(model.vision.passes, capture).capture_all()
        for pictures, want in zip(some, plain):
            difference = (torch.cat(model.encode(pictures)) - want).float()
            assert float(difference.pow(2).mean().sqrt() / want.float().std()) < 0.02


@pytest.mark.parametrize(
    "params", [{}, {"top_k": 5}, {"top_p": 0.8, "min_p": 0.05}, {"repetition_penalty": 1.2}], ids=str
)
def test_tokens_are_those_of_the_cpu(device, params):
    """The same logits and numbers drawn: the same tokens, wherever they are sampled."""
    SamplingParams(temperature=0.9, **params)  # wrong parameters fail here, not in `work`
    plan = plan_sampling([work(produced=(5, 5, 9), seed=seed, temperature=0.9, **params) for seed in range(64)])
    logits = some_logits(64)
    assert choose(logits.clone().to(device), plan).tolist() == choose(logits.clone(), plan).tolist()


def test_blocks_of_a_migration(device):
    copy = block_copier(device)
    if device.type == "cpu":
        pytest.skip("a CPU copies by copy_")
    assert copy is not None, "the CUDA kernels did not build here"
    to, source = (torch.randint(0, 256, (40, 917504), dtype=torch.uint8, device=device) for _ in range(2))
    into, ids = (torch.randperm(40, device=device)[:17] for _ in range(2))
    want = to.clone()
    want[into] = source[ids]
    copy(to, into, source, ids)
    assert torch.equal(to, want)
