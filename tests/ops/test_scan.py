"""Convolutions and the delta rule: every variant leaves what the reference does, row by row, in any pieces."""

from itertools import pairwise

import pytest
import torch

from hydrainfer.ops import DeltaLayer, ScanBatch, ScanRows, delta_chunks, reference, variants
from hydrainfer.ops.build import load_kernels
from hydrainfer.ops.select import Need

pytestmark = pytest.mark.cpu

HEADS, KEY_HEADS, KEY_DIM, DIM = 6, 2, 12, 20
COUNTS = [1, 1, 1, 5, 64, 65, 150]  # three decodes, then chunks
LEAST_DIFFERENCE = 2e-5


def inputs(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    q, k = (torch.nn.functional.normalize(torch.randn(n, KEY_HEADS, KEY_DIM, generator=g), dim=-1) for _ in range(2))
    v, beta = torch.randn(n, HEADS, DIM, generator=g), torch.rand(n, HEADS, generator=g)
    decay = -torch.rand(n, HEADS, generator=g) * torch.logspace(-4, 1, HEADS)  # from hardly to at once
    return q, k, v, decay, beta


def batch_of(counts, fresh):
    """Request i goes on from block i, or if `fresh` from nothing, and leaves its state in block i + 10; chunks of more
    than 64 rows in two pieces."""
    pieces, row = [], 0
    n_decodes = counts.count(1)
    for i, count in enumerate(counts):
        if i >= n_decodes:
            cut = count // 3 if count > 64 else 0
            source = -1 if fresh else i
            if cut:
                pieces.append(ScanRows(slice(row, row + cut), source, i + 20))
                source = i + 20
            pieces.append(ScanRows(slice(row + cut, row + count), source, i + 10))
        row += count
    here = torch.arange(n_decodes)
    return ScanBatch(n_decodes, here - 1 if fresh else here, here + 10, pieces)


@pytest.mark.parametrize("fresh", [False, True])
def test_delta_rule_in_chunks(fresh):
    blocks = torch.randn(30, 2, HEADS, KEY_DIM, DIM, generator=torch.Generator().manual_seed(1))  # of two layers
    before = blocks[:, 1]
    batch, rows = batch_of(COUNTS, fresh), inputs(sum(COUNTS))
    states, wanted = blocks.clone()[:, 1], before.clone()
    got, want = (f(*rows, s, batch) for f, s in ((delta_chunks.delta_rule, states), (reference.delta_rule, wanted)))
    assert (got - want).abs().max() < LEAST_DIFFERENCE and (states - wanted).abs().max() < LEAST_DIFFERENCE
    untouched = [i for i in range(30) if i not in {p.target for p in batch.pieces} | set(batch.targets.tolist())]
    assert torch.equal(states[untouched], before[untouched])


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize(("dtype", "dim", "difference"), [(torch.float32, 20, 2e-5), (torch.bfloat16, 96, 4e-2)])
@pytest.mark.parametrize("variant", ["native-cpu", "torch-chunks"])
def test_gated_delta(variant, dtype, dim, difference, fresh):
    made = next(v for v in variants("gated_delta") if v.name == variant)
    need = Need(torch.device("cpu"), dtype, 64, load_kernels(torch.device("cpu"))[0])
    if not made.supports(need):
        pytest.skip("no compiler here")
    g, n, width = torch.Generator().manual_seed(3), sum(COUNTS), 4
    channels = 2 * KEY_HEADS * KEY_DIM + HEADS * dim

    def random(*shape, kind=dtype):
        return torch.randn(shape, generator=g).to(kind)

    rates, steps = torch.linspace(-6.0, 1.5, HEADS), random(HEADS, kind=torch.float32)
    layer = DeltaLayer(random(channels, width), random(dim), rates, steps, 1e-6)
    rows = random(n, channels + HEADS * dim + 2 * HEADS).split([channels, HEADS * dim, HEADS, HEADS], 1)
    kept = random(30, 2, width - 1, channels), random(30, 2, HEADS, KEY_DIM, dim, kind=torch.float32)  # of two layers
    batch, ours, wanted = batch_of(COUNTS, fresh), *([part.clone()[:, 1] for part in kept] for _ in range(2))
    got, want = made.make(need)(*rows, layer, *ours, batch), reference.gated_delta(*rows, layer, *wanted, batch)
    for one, other in zip((got, *ours), (want, *wanted)):
        torch.testing.assert_close(one.float(), other.float(), rtol=difference, atol=difference)
    untouched = [i for i in range(30) if i not in {p.target for p in batch.pieces} | set(batch.targets.tolist())]
    assert all(torch.equal(part[untouched], before[untouched, 1]) for part, before in zip(ours, kept))


def test_convolutions_have_few_numbers_of_rows(monkeypatch):
    """oneDNN compiles code for each, and keeps it."""
    lengths, columns, none = set(), 4, torch.empty(0, dtype=torch.int64)
    conv1d = torch.nn.functional.conv1d
    monkeypatch.setattr(reference.F, "conv1d", lambda x, *a, **k: lengths.add(x.shape[2]) or conv1d(x, *a, **k))
    for n in range(17, 417):
        batch = ScanBatch(0, none, none, [ScanRows(slice(0, n), -1, 0)])
        reference.short_conv(torch.zeros(n, columns), torch.zeros(columns, 3), None, torch.zeros(1, 2, columns), batch)
    assert len(lengths) < 60


@pytest.mark.parametrize("width", [2, 4, 7])
def test_a_convolution_in_pieces_is_that_of_the_whole(width):
    g, n, columns = torch.Generator().manual_seed(2), 40, 5
    x, weight, bias = (torch.randn(*shape, generator=g) for shape in ((n, columns), (columns, width), (columns,)))
    padded = torch.cat([torch.zeros(width - 1, columns), x])
    want = torch.stack([(padded[i : i + width] * weight.t()).sum(0) + bias for i in range(n)])
    for cuts in ((0, n), (0, 1, 2, 3, n), (0, 7, 8, 30, n)):
        tails, got, source = torch.full((3, width - 1, columns), torch.nan), [], -1
        for i, (start, stop) in enumerate(pairwise(cuts)):
            target, rows = i % 2, x[start:stop]
            if stop - start == 1:
                batch = ScanBatch(1, torch.tensor([source]), torch.tensor([target]), ())
            else:
                none = torch.empty(0, dtype=torch.int64)
                batch = ScanBatch(0, none, none, [ScanRows(slice(0, stop - start), source, target)])
            got.append(reference.short_conv(rows, weight, bias, tails, batch))
            source = target
        assert (torch.cat(got) - want).abs().max() < 1e-5
