"""`kernels/cuda` without a GPU: by nvcc for what the machine code is like, by a C++ compiler and under sanitizers for
what it computes."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from hydrainfer.models.patches import Cut, arrange
from hydrainfer.ops import KV, AttentionBatch, DeltaLayer, GridRows, ScanBatch, reference
from hydrainfer.ops.build import nvcc

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(120)]

SOURCES = Path(__file__).parents[2] / "kernels" / "cuda"
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
DTYPES = list(TOLERANCE)


@pytest.fixture(scope="module")
def machine_code(tmp_path_factory):
    """(what ptxas says, the PTX) of all kernels, for sm_90."""
    return machine_code_for("sm_90", tmp_path_factory.mktemp("nvcc"))


def machine_code_for(arch: str, folder: Path) -> tuple[str, str]:
    compiler = nvcc()
    if compiler is None:
        pytest.skip("no nvcc")
    import tvm_ffi.libinfo

    ptx = folder / "ops.ptx"
    includes = [f"-I{path}" for path in tvm_ffi.libinfo.include_paths()]
    flags = ["-std=c++17", "-O3", f"-arch={arch}", "-ptx", "-Werror", "all-warnings", *includes]
    made = subprocess.run([compiler, *flags, SOURCES / "ops.cu", "-o", ptx], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    command = [Path(compiler).parent / "ptxas", "-v", f"-arch={arch}", ptx, "-o", ptx.with_suffix(".cubin")]
    said = subprocess.run(command, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    return said.stderr, ptx.read_text()


def resources(said: str) -> dict[str, tuple[int, int]]:
    """The bytes of stack and the registers of a thread, by kernel."""
    found = {}
    for part in said.split("Compiling entry function '")[1:]:
        stack = sum(map(int, re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", part)))
        found[part.split("'")[0]] = stack, int(re.findall(r"Used (\d+) registers", part)[0])
    return found


def test_nothing_spills_and_registers_leave_room(machine_code):
    """With 64 registers or fewer an SM of sm_90 holds four blocks of 256 threads at least: enough to hide loads. A
    thread of the delta rule, which holds a part of a state, may have twice as many, and so may one of a convolution
    over 7 or 9 rows: they have 13 loads and more on their way at once."""
    found = resources(machine_code[0])
    assert len(found) >= 30
    for name, (stack, registers) in found.items():
        assert not stack, name
        assert registers <= (128 if "delta_step" in name or re.search("conv_step.*Li7E|grid_conv", name) else 64), name


def test_kernels_compile_for_the_gpus_before(tmp_path):
    assert len(resources(machine_code_for("sm_80", tmp_path)[0])) >= 30


def test_every_kernel_moves_16_bytes_at_once(machine_code):
    """Except heads and rows whose halves are multiples of 8 bytes only."""
    _, ptx = machine_code
    kernels = ptx.split(".visible .entry ")[1:]
    assert len(kernels) >= 30
    for kernel in kernels:
        name = kernel.split("(")[0]
        pack = r"v4\.u16" if re.search("(write_heads|act_and_mul).*Li8E", name) else r"v4\.[uf]32"
        assert re.search(rf"ld\.global(\.nc)?\.{pack}", kernel) and re.search(rf"st\.global\.{pack}", kernel), name
        assert not re.search(r"st\.global\.[ufb]", kernel), f"{name} writes numbers one at a time"


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    made = tmp_path_factory.mktemp("check") / "check"
    here = Path(__file__).parent
    base = [
        compiler,
        "-std=c++20",
        "-O1",
        "-g",
        "-pthread",
        f"-I{here}",
        f"-I{SOURCES}",
        here / "check.cpp",
        "-o",
        made,
    ]
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    said = subprocess.run([*base, *sanitizers, "-Wno-unknown-pragmas"], capture_output=True, text=True)
    if (said.returncode and "sanitize" in said.stderr + said.stdout) or "cannot find" in said.stderr:
        said = subprocess.run([*base, "-Wno-unknown-pragmas"], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    return made


def run(program, what: str, dtype: torch.dtype, numbers: list[int], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors (which are dense) after the kernel."""
    raw = [t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in tensors]
    sent = struct.pack(f"<{len(numbers) + 2}q", len(numbers), *numbers, len(raw))
    sent += b"".join(struct.pack("<q", len(each)) + each for each in raw)
    name = str(dtype).removeprefix("torch.")
    said = subprocess.run([program, what, name], input=sent, capture_output=True, timeout=60)
    assert said.returncode == 0, said.stderr.decode()
    out, found = said.stdout, []
    for t, each in zip(tensors, raw):
        made = torch.empty(t.shape, dtype=t.dtype)
        made.view(-1).view(torch.uint8).numpy()[:] = np.frombuffer(out[: len(each)], np.uint8)
        found.append(made)
        out = out[len(each) :]
    return found


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Rounded once, as the kernels do."""
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", ["no norm", "norm", "wide norm"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "half"),
    [(4, 4, 64, 32), (28, 4, 128, 64), (4, 2, 16, 8), (8, 1, 256, 128), (4, 2, 256, 32), (0, 2, 64, 32)],
)
def test_heads_and_the_write_of_keys_and_values(program, dtype, norm, heads, kv_heads, dim, half):
    rows, blocks, size, spare = 5, 4, 4, 16  # `spare`: other layers' bytes between the blocks
    qkv, n = random(rows, heads + 2 * kv_heads, dim, dtype=dtype), heads + kv_heads
    angles = random(rows, half, seed=1)  # of each row by itself, as M-RoPE's
    cos, sin = angles.cos(), angles.sin()
    store = random(blocks, 2 * size * kv_heads * dim + spare, dtype=dtype, seed=2)
    slots = torch.tensor([3, 0, 15, -1, 6])  # a row of padding
    wide = norm == "wide norm"
    norms = [random(dim, dtype=torch.float32 if wide else dtype, seed=seed) for seed in (3, 4)]
    if norm == "no norm":
        norms = [weight[:0] for weight in norms]
    numbers = [rows, qkv.stride(0), store.stride(0), heads, kv_heads, dim, size, half, wide]
    sent = [qkv, cos, sin, store, slots, *norms, qkv.new_zeros(rows, n, dim)]
    made, _, _, cache, _, _, _, to = run(program, "heads", dtype, numbers, sent)

    want, kept = qkv.float(), store.clone()
    if norm != "no norm":
        assert torch.equal(made, qkv), "what is normalised is left as it was, since other threads still sum it up"
        made = torch.cat([to, qkv[:, n:]], 1)
        want[:, :heads] = rms(want[:, :heads], norms[0], 1e-5)
        want[:, heads:n] = rms(want[:, heads:n], norms[1], 1e-5)
    view = kept[:, :-spare].unflatten(1, (2, size, kv_heads, dim))
    reference.rope(want[:, :n], cos, sin)
    want = want.to(dtype)
    real = slots >= 0
    batch = AttentionBatch([1] * rows, [0] * rows, rows, size, slots, slots, slots[real], slots)
    reference.write_kv(KV(view[:, 0], view[:, 1]), KV(want[real, heads:n], want[real, n:]), batch)
    for got, wanted in ((made, want), (cache, kept)):
        torch.testing.assert_close(got, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    untouched = torch.ones(blocks * size, dtype=torch.bool)
    untouched[slots[real]] = False
    got = cache[:, :-spare].unflatten(1, (2, size, kv_heads, dim)).transpose(1, 2).flatten(0, 1)
    was = store[:, :-spare].unflatten(1, (2, size, kv_heads, dim)).transpose(1, 2).flatten(0, 1)
    assert torch.equal(got[untouched], was[untouched]) and torch.equal(cache[:, -spare:], store[:, -spare:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "dim", "half"), [(2, 80, 40), (3, 72, 36), (2, 64, 32), (1, 128, 16)])
def test_rope_of_a_tower(program, dtype, heads, dim, half):
    """Queries and keys of rows that also have values, which stay as they are."""
    qkv, angles = random(7, 3 * heads, dim, dtype=dtype), random(7, half, seed=1)
    numbers = [7, qkv.stride(0), 2 * heads, dim, half]
    made = run(program, "rope", dtype, numbers, [qkv, angles.cos(), angles.sin()])[0]
    want = qkv.clone()
    reference.rope(want[:, : 2 * heads], angles.cos(), angles.sin())
    torch.testing.assert_close(made, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(made[:, 2 * heads :], qkv[:, 2 * heads :])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_and_rope_of_a_tower(program, dtype):
    heads, kv_heads, dim, half = 6, 2, 64, 32
    qkv, angles, n = random(7, heads + 2 * kv_heads, dim, dtype=dtype), random(7, half, seed=1), heads + kv_heads
    norms = [random(dim, dtype=dtype, seed=seed) for seed in (3, 4)]
    numbers = [7, qkv.stride(0), n * dim, heads, kv_heads, dim, half]
    sent = [qkv, *norms, angles.cos(), angles.sin(), qkv.new_zeros(7, n, dim)]
    to = run(program, "norm_rope", dtype, numbers, sent)[5]
    want = torch.cat([rms(qkv[:, :heads], norms[0], 1e-5), rms(qkv[:, heads:n], norms[1], 1e-5)], 1)
    reference.rope(want, angles.cos(), angles.sin())
    torch.testing.assert_close(to, want.to(dtype), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", ["silu_and_mul", "gelu_tanh_and_mul", "clamped_swiglu"])
@pytest.mark.parametrize(("rows", "width"), [(0, 64), (1, 64), (3, 1000), (3, 60), (7, 2048)])
def test_gates(program, op, dtype, rows, width):
    if width == 60 and op == "clamped_swiglu":
        pytest.skip("which takes multiples of 16 bytes")
    gate_up = 4 * random(rows, 2 * width, dtype=dtype)
    out = torch.zeros(rows, width, dtype=dtype)
    made = run(program, op, dtype, [rows, width], [gate_up, out])[1]
    more = (7.0, 1.702) if op == "clamped_swiglu" else ()
    want = getattr(reference, op)(gate_up.float(), *more).to(dtype)
    tolerance = max(TOLERANCE[dtype], 1e-5)  # 1 + tanh(x) cancels
    torch.testing.assert_close(made, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(0, 64), (1, 8), (3, 1000)])
def test_quick_gelu(program, dtype, rows, width):
    x = 4 * random(rows, width, dtype=dtype)
    made = run(program, "quick_gelu", dtype, [rows, width], [x])[0]
    want = reference.quick_gelu(x.float()).to(dtype)
    torch.testing.assert_close(made, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(0, 64), (1, 8), (3, 2560)])
def test_rms_norm_wide(program, dtype, rows, width):
    x, weight = random(rows, width, dtype=dtype), random(width, seed=1)
    made = run(program, "rms_norm_wide", dtype, [rows, width], [x, weight, torch.zeros_like(x)])[2]
    torch.testing.assert_close(made, rms(x, weight, 1e-6).to(dtype), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


SOURCES_OF_ROWS, TARGETS_OF_ROWS = [3, -1, 5, -1], [3, 0, 1, -1]  # in place, from nothing, elsewhere, padding


def scanned(blocks: torch.Tensor) -> tuple[list[torch.Tensor], ScanBatch, torch.Tensor]:
    """Sources and targets for the kernel; the batch of the rows that are no padding; blocks that nobody writes."""
    sent = [torch.tensor(ids) for ids in (SOURCES_OF_ROWS, TARGETS_OF_ROWS)]
    spared = torch.ones(len(blocks), dtype=torch.bool)
    spared[TARGETS_OF_ROWS[:-1]] = False
    return sent, ScanBatch(3, *(ids[:3] for ids in sent), []), spared


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [3, 4, 7])
@pytest.mark.parametrize(("biased", "silu"), [(True, False), (False, True)])
def test_a_step_of_a_short_convolution(program, dtype, width, biased, silu):
    channels, spare = 48, 16
    x, weight = random(4, channels + spare, dtype=dtype), random(channels, width, dtype=dtype, seed=1)
    bias = random(channels if biased else 0, dtype=dtype, seed=2)
    store = random(6, (width - 1) * channels + spare, dtype=dtype, seed=3)
    ids, batch, spared = scanned(store)
    numbers = [4, channels, x.stride(0), store.stride(0), width, silu]
    sent = [x, weight, bias, store, torch.zeros(4, channels, dtype=dtype), *ids]
    _, _, _, kept, out, _, _ = run(program, "conv", dtype, numbers, sent)

    want, tails = store.float(), [t.float() for t in (x[:3, :channels], weight, bias)]
    view = want[:, :-spare].unflatten(1, (width - 1, channels))
    made = reference.short_conv(tails[0], tails[1], tails[2] if biased else None, view, batch)
    made = torch.nn.functional.silu(made) if silu else made
    torch.testing.assert_close(out[:3], made.to(dtype), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(kept, want.to(dtype)) and torch.equal(kept[spared], store[spared])
    assert out[3].isfinite().all()


def grid_of(grids: list[tuple[int, int, int]], merge: int) -> GridRows:
    arrays = arrange(grids, Cut(merge, 0)).arrays
    return GridRows(grids, merge, *(torch.from_numpy(arrays[name]) for name in ("places", "sizes")))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("grids", "merge"), [([(1, 1, 1)], 1), ([(2, 3, 2), (1, 1, 4)], 2), ([(1, 2, 3)], 3)], ids=str)
def test_a_convolution_over_grids_of_patches(program, dtype, grids, merge):
    """As a tower's: a frame does not see the next one, nor a picture another."""
    channels, n = 24, sum(t * h * w for t, h, w in grids) * merge**2
    rows, weight = random(n, 3 * channels, dtype=dtype), random(channels, 1, 3, 3, dtype=dtype, seed=1)
    grid = grid_of(grids, merge)
    sent = [rows, weight, grid.places, grid.sizes, torch.zeros(n, channels, dtype=dtype)]
    out = run(program, "grid", dtype, [n, channels, merge], sent)[4]
    want = reference.grid_conv(rows.float(), weight.float(), grid).to(dtype)
    torch.testing.assert_close(out, want, rtol=TOLERANCE[dtype], atol=4 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "key_heads", "key_dim", "dim"), [(4, 2, 128, 128), (6, 2, 16, 8), (2, 1, 32, 64)], ids=str
)
def test_a_step_of_the_delta_rule(program, dtype, heads, key_heads, key_dim, dim):
    keys, values, spare = 2 * key_heads * key_dim, heads * dim, 8
    mixed, behind = random(4, keys + values, dtype=dtype), random(4, values + 2 * heads, dtype=dtype, seed=1)
    norm, rates, biases = random(dim, dtype=dtype, seed=2), torch.linspace(-4.0, 1.0, heads), random(heads, seed=3)
    biases[-1] += 25.0  # where softplus is the number itself
    store = random(6, heads * key_dim * dim + spare, seed=4)
    ids, batch, spared = scanned(store)
    numbers = [4, store.stride(0), heads, key_heads, key_dim, dim]
    sent = [mixed, behind, norm, rates, biases, store, torch.zeros(4, values, dtype=dtype), *ids]
    _, _, _, _, _, kept, out, _, _ = run(program, "delta", dtype, numbers, sent)

    want, layer = store.clone(), DeltaLayer(torch.ones(1), norm.float(), rates, biases, 1e-6)
    view = want[:, :-spare].unflatten(1, (heads, key_dim, dim))
    gate, beta, step = behind[:3].float().split([values, heads, heads], 1)
    made = reference.delta_heads(mixed[:3].float(), gate, beta, step, layer, view, batch)
    torch.testing.assert_close(out[:3], made.to(dtype), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(kept, want, rtol=1e-5, atol=1e-5)
    assert torch.equal(kept[spared], store[spared]) and out[3].isfinite().all()


@pytest.mark.parametrize("block_bytes", [16, 4096, 16 * 1025, 1 << 16])
@pytest.mark.parametrize("ids", [[], [3], [5, 0, 2]])
def test_blocks_of_a_migration(program, block_bytes, ids):
    draw = torch.Generator().manual_seed(0)
    to, source = (torch.randint(0, 256, (n, block_bytes), dtype=torch.uint8, generator=draw) for n in (7, 6))
    into = [6, 1, 0][: len(ids)]
    numbers = [len(ids), block_bytes]
    made = run(program, "blocks", torch.float32, numbers, [to, source, *(torch.tensor(x).long() for x in (into, ids))])
    want = to.clone()
    want[into] = source[ids]
    assert torch.equal(made[0], want) and torch.equal(made[1], source)
