"""Every variant of every operator equals its plain-torch reference, for every dtype and awkward sizes."""

from __future__ import annotations

import dataclasses
import math
import os
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from hydrainfer.ops import (
    KV,
    OPERATORS,
    AttentionBatch,
    Segments,
    packing,
    reference,
    select,
    select_ops,
    stepping,
    variants,
    visible,
)
from hydrainfer.ops.build import _build_folder, build_resampler, load_kernels
from hydrainfer.ops.cpu.products import ways
from hydrainfer.ops.memory import empty_rows, rows_in_steps, with_more_rows
from hydrainfer.ops.reference import write_kv

pytestmark = pytest.mark.cpu

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 4e-3}
DTYPES = list(TOLERANCE)
BLOCK_TOKENS = 4


def compiled() -> bool:
    return load_kernels(torch.device("cpu"))[0] is not None


@pytest.fixture(scope="module", params=["native-cpu", "torch"])
def pair(request):
    """`pair(dtype, head_dim)` → (fast set, reference set)."""
    if request.param == "native-cpu" and not compiled():
        pytest.skip("no compiler here")

    def get(dtype: torch.dtype, head_dim: int = 64):
        fast = select_ops("cpu", dtype, head_dim, use_native=request.param == "native-cpu")
        return fast, select_ops("cpu", dtype, head_dim, use_native=False, only="reference")

    return get


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.float(), want.float(), rtol=tolerance, atol=tolerance)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "way"), [(d, way) for d in DTYPES for way in (*ways(d, None), "native-cpu", "measured")]
)
@pytest.mark.parametrize(("inner", "outer"), [(64, 48), (67, 31), (768, 200)])
@pytest.mark.parametrize("biased", [True, False])
def test_linear(dtype, way, inner, outer, biased):
    only = None if way == "measured" else way
    fast, reference = (select_ops("cpu", dtype, 64, only=name) for name in (only, "reference"))
    if dict(fast.describe())["linear"] != way:
        pytest.skip("no compiler here")
    weight = random(outer, inner, dtype=dtype, seed=1) / inner**0.5
    bias = random(outer, dtype=dtype, seed=2) if biased else None
    for rows in [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 24, 25, 50, 100]:
        x, out = random(rows, inner, dtype=dtype), random(rows, outer, dtype=dtype, seed=3)
        close(fast.linear(x, weight, bias), reference.linear(x, weight, bias))
        want = reference.linear_add(out.clone(), x, weight, bias)
        got = out.clone()
        assert fast.linear_add(got, x, weight, bias) is got
        close(got, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_many_rows_have_few_numbers_of_them(dtype):
    """Whatever is fastest here, as if that were oneDNN."""
    found, met = select_ops("cpu", dtype, 64, use_native=False), set()

    def linear(x, weight, bias=None):
        met.add(x.shape[0])
        return found.linear(x, weight, bias)

    products = SimpleNamespace(compiles=lambda x, weight: True)
    ops = stepping(dataclasses.replace(found, linear=linear, products=products))
    weight, bias = random(48, 64, dtype=dtype, seed=1) / 8, random(48, dtype=dtype, seed=2)
    for rows in (1, 64, 65, 100, 577, 600):
        x, out = random(rows, 64, dtype=dtype), random(rows, 48, dtype=dtype, seed=3)
        close(ops.linear(x, weight, bias), reference.linear(x, weight, bias))
        want = reference.linear_add(out.clone(), x, weight, bias)
        assert ops.linear_add(out, x, weight, bias) is out
        close(out, want)
    assert met == {1, 64, 72, 104, 608}
    products.compiles = lambda x, weight: False
    ops.linear(random(65, 64, dtype=dtype), weight)
    assert 65 in met, "what compiles nothing takes any number"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_by_packed_weights_have_few_numbers_of_rows(dtype, monkeypatch):
    """Whatever is fastest for so many rows: oneDNN computes all products of a packed weight."""
    if "onednn" not in ways(dtype, None):
        pytest.skip("oneDNN does not multiply these here")
    found, met = select_ops("cpu", dtype, 64, use_native=False), set()
    multiply = select.packed_linear
    monkeypatch.setattr(select, "packed_linear", lambda x, *rest: met.add(x.shape[0]) or multiply(x, *rest))
    products = SimpleNamespace(packs=lambda weight: True, compiles=lambda x, weight: False)
    ops = stepping(packing(dataclasses.replace(found, products=products)))
    weight = random(48, 64, dtype=dtype, seed=1) / 8
    for rows in range(16, 257):
        assert len(ops.linear(random(rows, 64, dtype=dtype), weight)) == rows
    assert len(met) < 50


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("inner", "outer"), [(64, 48), (67, 31), (768, 256)])
def test_products_by_packed_weights(dtype, inner, outer):
    found = select_ops("cpu", dtype, 64, use_native=False)
    if "onednn" not in ways(dtype, None):
        pytest.skip("oneDNN does not multiply these here")
    ops = packing(dataclasses.replace(found, products=SimpleNamespace(packs=lambda weight: True)))
    plain = random(outer, inner, dtype=dtype, seed=1) / inner**0.5
    weight, bias = plain.clone(), random(outer, dtype=dtype, seed=2)
    for rows in (1, 7, 64, 577):
        for b in (bias, None):
            x, out = random(rows, inner, dtype=dtype), random(rows, outer, dtype=dtype, seed=3)
            close(ops.linear(x, weight, b), reference.linear(x, plain, b))
            want = reference.linear_add(out.clone(), x, plain, b)
            assert ops.linear_add(out, x, weight, b) is out
            close(out, want)
    assert weight.is_mkldnn and weight.shape == plain.shape and weight.nbytes >= plain.nbytes
    kept = plain.clone()
    packing(dataclasses.replace(found, products=SimpleNamespace(packs=lambda weight: False))).linear(x, kept)
    assert torch.equal(kept, plain), "another way than oneDNN's takes weights as they are"


def test_numbers_of_rows_in_steps():
    steps = [rows_in_steps(n) for n in range(4097)]
    assert steps == sorted(steps) and steps[:18] == [*range(17), 18]
    assert all(n <= rows <= n * 1.12 for n, rows in enumerate(steps))
    assert len(set(steps[17:2049])) == 3 * 8 + 4 * 16


def test_more_rows_are_those_behind_where_there_are_any():
    roomy, tight = empty_rows((70, 4), torch.float32), torch.ones(70, 4)
    assert with_more_rows(roomy, 2).data_ptr() == roomy.data_ptr() and with_more_rows(roomy, 2).shape == (72, 4)
    for x in (tight, tight[2:], roomy[:, :3]):
        longer = with_more_rows(x, 2)
        assert longer.shape[0] == len(x) + 2 and longer.data_ptr() != x.data_ptr()
        assert torch.equal(longer[:-2].nan_to_num(), x.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 300])
@pytest.mark.parametrize("width", [64, 37, 768])
def test_rowwise(pair, dtype, rows, width):
    fast, reference = pair(dtype)
    x, weight = random(rows, width, dtype=dtype), random(width, dtype=dtype, seed=1)
    close(fast.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    wide = random(rows, 2 * width, dtype=dtype, seed=2) * 20  # exp at its ends too
    close(fast.silu_and_mul(wide), reference.silu_and_mul(wide))
    close(fast.quick_gelu(wide.clone()), reference.quick_gelu(wide.clone()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 6, 64, 80])
def test_rope_in_place_on_a_strided_view(pair, dtype, head_dim):
    fast, reference = pair(dtype, head_dim)
    angle = torch.rand(9, head_dim // 2) * 6
    whole = random(9, 7, head_dim, dtype=dtype)
    got, want = whole.clone(), whole.clone()
    fast.rope(got[:, :5], angle.cos(), angle.sin())
    reference.rope(want[:, :5], angle.cos(), angle.sin())
    close(got, want)
    assert torch.equal(got[:, 5:], whole[:, 5:])


def paged(
    counts,
    contexts,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    window: int = 0,
    spans=(),
    block_tokens=BLOCK_TOKENS,
    value_dim: int = 0,
):
    """A cache of one layer in a two-layer block, scattered tables, and the batch."""
    lengths = [a + b for a, b in zip(counts, contexts)]
    longest = -(-max(lengths, default=0) // block_tokens)
    n_blocks = longest * len(counts) + 3
    order = torch.randperm(n_blocks, generator=torch.Generator().manual_seed(5))[: longest * len(counts)]
    tables = order.view(len(counts), longest).to(torch.int32)
    dims = (head_dim, value_dim or head_dim)
    widths = [block_tokens * kv_heads * dim for dim in dims]
    blocks = random(n_blocks, 2, sum(widths), dtype=dtype, seed=6)[:, 1]
    cache = KV(*(x.unflatten(1, (block_tokens, kv_heads, dim)) for x, dim in zip(blocks.split(widths, 1), dims)))
    slots = [
        int(tables[i, p // block_tokens]) * block_tokens + p % block_tokens
        for i, (n, c) in enumerate(zip(counts, contexts))
        for p in range(c, c + n)
    ]
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    batch = AttentionBatch(
        counts=counts,
        contexts=contexts,
        n_decodes=sum(n == 1 for n in counts),
        block_tokens=block_tokens,
        tables=tables,
        lengths=torch.tensor(lengths, dtype=torch.int32),
        slots=torch.tensor(slots),
        starts=starts,
        window=window,
        spans=spans,
    )
    return cache, batch


BATCHES = {
    "decodes": ([1, 1, 1], [0, 3, 37]),
    "whole prompts": ([5, 17], [0, 0]),
    "tiles of a long prompt and of a long chunk": ([300, 150], [0, 11]),
    "chunks with context": ([2, 9], [1, 23]),
    "mixed": ([1, 1, 6, 3, 4], [16, 40, 0, 5, 4]),
    "edges of panels and of tiles of keys": ([1, 15, 16, 17, 48, 49, 96, 97], [96, 95, 80, 79, 96, 0, 1, 191]),
    "window of one": ([1, 1, 6, 3], [0, 40, 0, 5], 1),
    "window": ([1, 1, 1, 9, 3, 4], [2, 4, 40, 0, 5, 4], 5),
    "window, tiles": ([300, 150], [0, 31], 70),
    "pictures": ([1, 9, 7], [9, 0, 5], 0, [(1, 2, 6), (1, 6, 9), (2, 5, 11)]),
    "pictures in a window": ([1, 9, 300], [9, 0, 5], 4, [(1, 2, 9), (2, 100, 180)]),
    "pictures across tiles": ([300, 150], [0, 11], 0, [(0, 100, 270), (1, 11, 160)]),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "value_dim"),
    [
        (4, 4, 16, 16),
        (5, 1, 20, 20),
        (6, 2, 64, 64),
        (6, 2, 72, 48),
        (5, 1, 128, 128),
        (8, 2, 192, 128),
    ],
)
@pytest.mark.parametrize("shape", BATCHES)
def test_attention_and_cache_writes(pair, dtype, heads, kv_heads, head_dim, value_dim, shape):
    """Wide keys are turned in part only, and then heads have sinks. Scores are capped, but for heads of 64."""
    fast, reference = pair(dtype, head_dim)
    counts, contexts, *seen = BATCHES[shape]
    cache, batch = paged(counts, contexts, kv_heads, head_dim, dtype, *seen, value_dim=value_dim)
    fast.prepare(batch)
    special = head_dim != value_dim
    rows = random(sum(counts), (heads + kv_heads) * head_dim + kv_heads * value_dim, dtype=dtype, seed=7)
    qk, values = rows.split([(heads + kv_heads) * head_dim, kv_heads * value_dim], 1)
    qk, values = qk.unflatten(1, (-1, head_dim)), values.unflatten(1, (-1, value_dim))
    turns = random(sum(counts), head_dim // (6 if special else 2), dtype=torch.float32, seed=8)
    other, turned = KV(*(x.clone() for x in cache)), qk.clone()
    fast.rope_write_kv(turned, values, turns.cos(), turns.sin(), cache, batch)
    reference.rope_write_kv(qk, values, turns.cos(), turns.sin(), other, batch)
    close(turned, qk)
    for kept, want in zip(cache, other):
        close(kept, want)
        kept.copy_(want)
    q, kv, scale = qk[:, :heads], KV(qk[:, heads:], values), head_dim**-0.5
    sinks = random(heads, dtype=torch.float32, seed=9) * 3 if special else None
    more = scale, sinks, 0.0 if head_dim == 64 else 0.7
    close(fast.attention(q, kv, cache, batch, *more), reference.attention(q, kv, cache, batch, *more))


def test_a_sink_is_a_key_that_gives_nothing(pair):
    """A sink beside one token takes the share that a score of its size would."""
    fast, _ = pair(torch.float32)
    cache, batch = paged([1, 1], [0, 0], 1, 64, torch.float32)
    fast.prepare(batch)
    q, values = torch.zeros(2, 1, 64), random(2, 1, 64, dtype=torch.float32)
    fast.rope_write_kv(q.clone(), values, torch.ones(2, 32), torch.zeros(2, 32), cache, batch)
    for sink, share in ((0.0, 0.5), (math.log(3.0), 0.25), (-200.0, 1.0), (200.0, 0.0)):
        close(fast.attention(q, KV(q, values), cache, batch, 0.125, torch.tensor([sink])), values * share)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("context", [1, 15, 16, 17, 1023, 8000])
def test_attention_over_a_long_context(pair, dtype, context):
    """A chunk and two decodes, in blocks of 16 tokens."""
    fast, reference = pair(dtype)
    counts, contexts = [1, 1, 19], [context, context - 1, context]
    cache, batch = paged(counts, contexts, kv_heads=2, head_dim=64, dtype=dtype, block_tokens=16)
    q, *kv = random(sum(counts), 10, 64, dtype=dtype, seed=7).split([6, 2, 2], 1)
    kv = KV(*kv)
    write_kv(cache, kv, batch)
    q = q * 4  # so that some keys count, not only their average
    close(fast.attention(q, kv, cache, batch, 0.125), reference.attention(q, kv, cache, batch, 0.125))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [15, 16, 72, 80])
@pytest.mark.parametrize("lengths", [[7], [16, 16, 16], [4, 64, 8, 64, 4, 1, 8], [300, 12], [5, 0, 70, 0, 0]], ids=str)
def test_attention_within_segments(pair, dtype, head_dim, lengths):
    fast, reference = pair(dtype, head_dim)
    qkv = random(sum(lengths), 3, 3, head_dim, dtype=dtype)
    segments = Segments(lengths, qkv.device)
    scale = head_dim**-0.5
    close(
        fast.attention_segments(*qkv.unbind(1), segments, scale),
        reference.attention_segments(*qkv.unbind(1), segments, scale),
    )


def test_the_choice_is_said():
    ops = select_ops("cpu", torch.float32, 64, use_native=False)
    assert [op for op, _ in ops.describe()] == list(OPERATORS)
    assert dict(ops.describe())["attention"] == "torch-sdpa"
    assert all(variants(op)[-1].name == "reference" for op in OPERATORS)


def test_without_a_compiler_torch_runs_and_says_so(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    ops = select_ops("cpu", torch.float32, 64)
    assert dict(ops.describe())["rope"] == "reference"
    assert len(ops.notes) == 1 and "compiler" in ops.notes[0]


def test_a_failing_build_falls_back(monkeypatch, tmp_path):
    if not compiled():
        pytest.skip("no compiler here")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("hydrainfer.ops.build._FLAGS", ("-no-such-flag",))
    ops = select_ops("cpu", torch.float32, 64)
    assert dict(ops.describe())["rope"] == "reference"
    assert len(ops.notes) == 1 and "did not build" in ops.notes[0] and "\n" not in ops.notes[0]


def test_builds_that_nobody_uses_are_removed(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    used, unused = (_build_folder(key) for key in ("used", "unused"))
    (unused / "sources").mkdir()
    two_months_ago = time.time() - 60 * 86400
    for folder in (used, unused):
        os.utime(folder, (two_months_ago, two_months_ago))
    assert _build_folder("used") == used and used.exists() and not unused.exists()
    _build_folder("new")
    assert used.exists(), "it was used just now"


def test_two_environments_do_not_compile_in_turns(monkeypatch, tmp_path):
    """Both write their own folder of headers into the compiler's command. Headers that are upgraded in their place are
    others: a complete library is loaded without a look at them."""
    folders = []

    def load(*args, build_directory, **options):
        folders.append(build_directory)
        raise OSError("not now")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("tvm_ffi.cpp.load", load)
    for place in ("a", "b", "a"):
        monkeypatch.setattr("tvm_ffi.libinfo.find_include_path", lambda place=place: str(tmp_path / place))
        load_kernels(torch.device("cpu"))
    monkeypatch.setattr("tvm_ffi.__version__", "1000.0")
    load_kernels(torch.device("cpu"))
    assert folders[0] == folders[2] and len(set(folders)) == 3


def test_kernels_are_built_with_a_read_only_home(monkeypatch, tmp_path):
    if not compiled():
        pytest.skip("no compiler here")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/proc")  # where not even root may make a folder
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    library = Path(build_resampler())
    assert library.is_relative_to(tmp_path) and library.exists()
    compiling = Mock()  # ten seconds otherwise
    monkeypatch.setattr("tvm_ffi.cpp.load", compiling)
    kernels, notes = load_kernels(torch.device("cpu"))
    assert kernels is not None and notes == ()
    assert Path(compiling.call_args.kwargs["build_directory"]).parent == library.parent.parent


def test_who_sees_whom():
    """Rows see those before them, those of their picture, and in either case no further back than the window."""
    assert visible(2, 2, range(1, 5), torch.device("cpu")).tolist() == [
        [True, True, False, False],
        [True] * 3 + [False],
    ]
    window = visible(2, 2, range(1, 5), torch.device("cpu"), 2)
    assert window.tolist() == [[True, True, False, False], [False, True, True, False]]
    picture = visible(2, 2, range(1, 5), torch.device("cpu"), 2, [(2, 5)])
    assert picture.tolist() == [[True, True, True, True], [False, True, True, True]]
