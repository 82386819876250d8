"""Weights in 8 bits: how far they are from the wide ones, and that every way multiplies by the same numbers."""

from __future__ import annotations

import pytest
import torch

from hydrainfer.ops import Int8Weight, select_ops
from hydrainfer.ops.build import load_kernels
from hydrainfer.ops.cpu import int8
from hydrainfer.ops.cpu.int8 import int8_ways
from tests.ops.test_variants import DTYPES, close, compiled, random

pytestmark = pytest.mark.cpu


def eight_bits(wide: torch.Tensor) -> Int8Weight:
    weight = Int8Weight.empty(tuple(wide.shape), wide.device)
    weight.take(wide)
    return weight


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 8, 13, 50])
@pytest.mark.parametrize(("inner", "outer"), [(64, 48), (67, 31), (768, 200)])
def test_products(dtype, native, rows, inner, outer):
    if native and not compiled():
        pytest.skip("no compiler here")
    ops = select_ops("cpu", dtype, 64, use_native=native, quantization="int8")
    weight = eight_bits(random(outer, inner, dtype=torch.float32, seed=1) / inner**0.5)
    x, bias = random(rows, inner, dtype=dtype), random(outer, dtype=dtype, seed=2)
    want = torch.nn.functional.linear(x.float(), weight.wide(torch.float32)).to(dtype)
    before = random(rows, outer, dtype=dtype, seed=3)
    kernels = load_kernels(torch.device("cpu"))[0] if native else None
    for way in (*int8_ways(select_ops("cpu", dtype, 64, use_native=native).products, kernels).values(), ops):
        close(way.linear(x, weight), want)
        close(way.linear(x, weight, bias), want + bias)
        close(way.linear(x, weight[5:30], bias[5:30]), (want + bias)[:, 5:30])
        close(way.linear_add(before.clone(), x, weight, bias), before + want + bias)


def test_the_error_is_half_a_step():
    wide = random(40, 300, dtype=torch.float32)
    wide[3] = 0
    weight = eight_bits(wide)
    steps = wide.abs().amax(1) / 127
    assert ((weight.wide(torch.float32) - wide).abs() <= 0.501 * steps[:, None]).all()
    assert weight.values.abs().amax(1).tolist() == [0 if i == 3 else 127 for i in range(40)]
    assert weight.nbytes < 0.3 * wide.nbytes
    for part, whole in zip(weight.split([10, 30]), (weight[:10], weight[10:])):
        assert torch.equal(part.values, whole.values) and torch.equal(part.scales, whole.scales)


def test_widened_weights_are_prepared_as_they_are_multiplied(monkeypatch):
    """Slice by slice, the last of which may be smaller."""
    monkeypatch.setattr(int8, "_SLICE_BYTES", 4 * 64 * 30)
    asked, met = [], []

    class Wide:
        def prepare(self, part):
            asked.append(tuple(part.shape))

        def compiles(self, x, part):
            return tuple(part.shape) == (10, 64)

        def linear(self, x, part, bias=None):
            met.append(tuple(part.shape))
            return torch.nn.functional.linear(x, part, bias)

    products, x = int8.Int8Products(Wide(), torch.float32, None), torch.ones(300, 64)
    for rows, parts in ((70, {(30, 64), (10, 64)}), (60, {(30, 64)}), (20, {(20, 64)})):
        weight = eight_bits(random(rows, 64, dtype=torch.float32))
        asked.clear(), met.clear()
        products.prepare(weight)
        products.linear(x, weight)
        assert set(asked) == set(met) == parts
        assert products.compiles(x, weight) == (rows == 70)


def test_the_choice_is_said():
    said = select_ops("cpu", torch.float32, 64, use_native=False, quantization="int8").products.describe()
    assert said[-1] == "8 bits: widened"
