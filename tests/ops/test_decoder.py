"""Layers in one call give the very numbers that the calls of each operator give."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hydrainfer.ops import KV, AttentionBatch, Int8Weight, PlainLayer
from hydrainfer.ops.build import load_kernels
from hydrainfer.ops.cpu.native import Kernels
from tests.ops.test_variants import DTYPES, paged, random

pytestmark = pytest.mark.cpu

EPS = 1e-5
N_LAYERS = 2


def matrix(rows: int, columns: int, dtype: torch.dtype, seed: int, int8: bool) -> Tensor | Int8Weight:
    wide = random(rows, columns, dtype=dtype, seed=seed) / columns**0.5
    if not int8:
        return wide
    narrow = Int8Weight.empty((rows, columns), torch.device("cpu"))
    narrow.take(wide)
    return narrow


def layer(seed: int, dtype: torch.dtype, shape: tuple[int, ...], *, int8: bool, special: bool) -> PlainLayer:
    """`special`: with all that a layer need not have."""
    hidden, inner, heads, kv_heads, dim, v_dim = shape
    shapes = (
        ((heads + kv_heads) * dim + kv_heads * v_dim, hidden),
        (hidden, heads * v_dim),
        (2 * inner, hidden),
        (hidden, inner),
    )

    def vector(width: int, number: int, of: torch.dtype = dtype) -> Tensor | None:
        return random(width, dtype=of, seed=seed + number) if special or number < 2 else None

    found: list = [
        vector(hidden, 0),
        vector(hidden, 1),
        vector(dim, 2),
        vector(dim, 3),
        vector(heads, 4, torch.float32),
    ]
    for i, (n, k) in enumerate(shapes):
        found += [matrix(n, k, dtype, seed + 10 + i, int8), vector(n, 20 + i)]
    return PlainLayer(*found)


def by_calls(k: Kernels, one: PlainLayer, heads: int, x: Tensor, turn: tuple, cache: KV, batch: AttentionBatch) -> None:
    """`Kernels.decoder` for one layer, by its operators."""
    int8 = isinstance(one.qkv, Int8Weight)
    linear, linear_add = (k.linear_int8, k.linear_int8_add) if int8 else (k.linear, k.linear_add)
    dim, (kv_heads, v_dim) = cache.keys.shape[3], cache.values.shape[2:]
    rows = linear(k.rms_norm(x, one.input_norm, EPS), one.qkv, one.qkv_bias)
    qk, values = rows.split([(heads + kv_heads) * dim, kv_heads * v_dim], 1)
    qk, values = qk.unflatten(1, (-1, dim)), values.unflatten(1, (-1, v_dim))
    for part, norm in ((qk[:, :heads], one.q_norm), (qk[:, heads:], one.k_norm)):
        if norm is not None:
            part.copy_(k.rms_norm(part.reshape(-1, dim).contiguous(), norm, EPS).view(part.shape))
    k.rope_write_kv(qk, values, *turn, cache, batch)
    mixed = k.attention(qk[:, :heads], cache, cache, batch, dim**-0.5, one.sinks)
    linear_add(x, mixed.flatten(1), one.out, one.out_bias)
    gate_up = linear(k.rms_norm(x, one.mlp_norm, EPS), one.gate_up, one.gate_up_bias)
    linear_add(x, k.silu_and_mul(gate_up), one.down, one.down_bias)


@pytest.mark.parametrize("int8", [False, True], ids=["", "int8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "window"),
    [
        pytest.param((64, 96, 4, 1, 16, 16), 0, id="one thread, one KV head"),
        pytest.param((136, 250, 6, 2, 20, 20), 0, id="no size a whole number of vectors"),
        pytest.param((192, 344, 8, 8, 64, 64), 5, id="a window"),
        pytest.param((128, 352, 6, 3, 72, 48), 0, id="values of fewer numbers"),
    ],
)
@pytest.mark.parametrize("special", [False, True], ids=["plain", "biases, norms, sinks"])
def test_as_its_operators(dtype, int8, shape, window, special, threads):
    kernels = load_kernels(torch.device("cpu"))[0]
    if kernels is None:
        pytest.skip("no compiler here")
    hidden, _, heads, kv_heads, dim, v_dim = shape
    layers = [layer(100 * i, dtype, shape, int8=int8, special=special) for i in range(N_LAYERS)]
    decode = kernels.decoder(layers, heads, EPS, dim**-0.5)
    for rows in (1, 2, 3, 4, 5, 8, 13, 17):
        contexts = [(37 * i + 3) % 61 for i in range(rows)]
        cache, batch = paged([1] * rows, contexts, kv_heads, dim, dtype, window, value_dim=v_dim)
        turns = random(rows, dim // (4 if special else 2), dtype=torch.float32, seed=8)
        turn = turns.cos(), turns.sin()
        caches = [KV(*(part.clone() for part in cache)) for _ in range(2 * N_LAYERS)]
        x, want = (random(rows, hidden, dtype=dtype) for _ in range(2))
        decode(x, *turn, caches[:N_LAYERS], batch)
        for one, kept in zip(layers, caches[N_LAYERS:]):
            by_calls(kernels, one, heads, want, turn, kept, batch)
        assert torch.equal(x, want) and x.isfinite().all()
        assert all(torch.equal(a, b) for i in range(N_LAYERS) for a, b in zip(caches[i], caches[N_LAYERS + i]))


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)
