"""All experts of a layer in one call: what each alone makes of its rows, summed."""

import pytest
import torch

from hydrainfer.ops import ExpertWeights, reference, select_ops, torch_variants
from hydrainfer.ops.build import load_kernels

pytestmark = pytest.mark.cpu

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
GROUPED = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}
N_EXPERTS, CHOSEN = 6, 3


def weights_of(width, inner, dtype, g, limit):
    def random(*shape):
        return (torch.randn(shape, generator=g) / shape[-1] ** 0.5).to(dtype)

    biases = (random(N_EXPERTS, 2 * inner), random(N_EXPERTS, width)) if limit else (None, None)
    matrices = random(N_EXPERTS * 2 * inner, width), random(N_EXPERTS * width, inner)
    return ExpertWeights(N_EXPERTS, *matrices, *biases, limit, 1.7 if limit else 1.0)


@pytest.mark.parametrize("limit", [0.0, 0.4], ids=["silu", "clamped, biases"])
@pytest.mark.parametrize(("width", "inner"), [(64, 48), (67, 37), (256, 200)])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_one_call_is_each_expert_by_itself(dtype, width, inner, limit):
    if load_kernels(torch.device("cpu"))[0] is None:
        pytest.skip("no compiler here")
    together = select_ops("cpu", dtype, 64, only="native-cpu")
    assert dict(together.describe())["experts"] == "native-cpu"
    alone, g = select_ops("cpu", dtype, 64, only="reference"), torch.Generator().manual_seed(1)
    e = weights_of(width, inner, dtype, g, limit)
    for n in (0, 1, 2, 5, 16, 33):
        x, out = (torch.randn(n, width, generator=g).to(dtype) for _ in range(2))
        scores = torch.rand(n, N_EXPERTS, generator=g)
        scores[:, 0] = 0  # an expert that nobody chooses
        weights, chosen = scores.to(dtype).topk(CHOSEN)
        want = reference.experts(out.clone(), x, weights, chosen, e, alone)
        got = together.experts(out, x, weights, chosen, e, together)
        assert got is out
        torch.testing.assert_close(got.float(), want.float(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_the_number_of_threads_changes_no_bit():
    if load_kernels(torch.device("cpu"))[0] is None:
        pytest.skip("no compiler here")
    ops, g = select_ops("cpu", torch.float32, 64, only="native-cpu"), torch.Generator().manual_seed(1)
    e, x = weights_of(64, 1408, torch.float32, g, 0.0), torch.randn(2, 64, generator=g)
    weights, chosen = torch.rand(2, N_EXPERTS, generator=g).topk(CHOSEN)
    found, before = [], torch.get_num_threads()
    for n in (1, 2, 3, 4):
        torch.set_num_threads(n)
        found.append(ops.experts(torch.zeros_like(x), x, weights, chosen, e, ops))
    torch.set_num_threads(before)
    assert all(torch.equal(found[0], one) for one in found)


@pytest.mark.parametrize("limit", [0.0, 0.4], ids=["silu", "clamped, biases"])
@pytest.mark.parametrize("dtype", GROUPED)
def test_grouped_products_are_each_expert_by_itself(dtype, limit):
    """The reference computes in float64 with the same weights."""
    ops, wide = (select_ops("cpu", d, 64, only="reference") for d in (dtype, torch.float64))
    g = torch.Generator().manual_seed(2)
    e = weights_of(64, 48, dtype, g, limit)
    exact = e._replace(**{f: t.double() for f, t in e._asdict().items() if isinstance(t, torch.Tensor)})
    for n in (0, 1, 2, 5, 16, 33, 400):
        x, out = (torch.randn(n, 64, generator=g).to(dtype) for _ in range(2))
        scores = torch.rand(n, N_EXPERTS, generator=g)
        scores[:, [1, 3, 5]] -= torch.tensor([1.0, 1.0, 0.9])  # two that nobody chooses, one that few do
        weights, chosen = scores.to(dtype).topk(CHOSEN)
        want = reference.experts(out.double(), x.double(), weights.double(), chosen, exact, wide)
        got = torch_variants.experts_grouped(out, x, weights, chosen, e, ops)
        assert got is out
        torch.testing.assert_close(got.double(), want, rtol=GROUPED[dtype], atol=GROUPED[dtype])


def test_rows_that_grouped_products_do_not_take_go_to_each_expert():
    """Rows of 37 numbers are no multiple of 16 bytes, which torch refuses on a GPU and on a CPU."""
    ops, g = select_ops("cpu", torch.bfloat16, 64, only="reference"), torch.Generator().manual_seed(2)
    e, x = weights_of(64, 37, torch.bfloat16, g, 0.0), torch.randn(5, 64, generator=g).bfloat16()
    weights, chosen = torch.rand(5, N_EXPERTS, generator=g).bfloat16().topk(CHOSEN)
    want = reference.experts(torch.zeros_like(x), x, weights, chosen, e, ops)
    assert torch.equal(torch_variants.experts_grouped(torch.zeros_like(x), x, weights, chosen, e, ops), want)
