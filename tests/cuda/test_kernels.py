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

from hydrainfer.ops import KV, AttentionBatch, reference
from hydrainfer.ops.build import nvcc

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(120)]

SOURCES = Path(__file__).parents[2] / "kernels" / "cuda"
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
DTYPES = list(TOLERANCE)


@pytest.fixture(scope="module")
def machine_code(tmp_path_factory):
    """(what ptxas says, the PTX) of all kernels, for sm_90."""
    compiler = nvcc()
    if compiler is None:
        pytest.skip("no nvcc")
    import tvm_ffi.libinfo

    ptx = tmp_path_factory.mktemp("nvcc") / "ops.ptx"
    includes = [f"-I{path}" for path in tvm_ffi.libinfo.include_paths()]
    flags = ["-std=c++17", "-O3", "-arch=sm_90", "-ptx", "-Werror", "all-warnings", *includes]
    made = subprocess.run([compiler, *flags, SOURCES / "ops.cu", "-o", ptx], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    command = [Path(compiler).parent / "ptxas", "-v", "-arch=sm_90", ptx, "-o", ptx.with_suffix(".cubin")]
    said = subprocess.run(command, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    return said.stderr, ptx.read_text()


def test_nothing_spills_and_registers_leave_room(machine_code):
    """With 64 registers or fewer an SM of sm_90 holds four blocks of 256 threads at least: enough to hide loads."""
    said, _ = machine_code
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said)
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", said)]
    assert len(spills) == len(registers) >= 7
    assert set(spills) == {("0", "0", "0")}
    assert max(registers) <= 64


def test_every_kernel_moves_16_bytes_at_once(machine_code):
    _, ptx = machine_code
    kernels = ptx.split(".visible .entry ")[1:]
    assert len(kernels) >= 7
    for kernel in kernels:
        name = kernel.split("(")[0]
        assert re.search(r"ld\.global(\.nc)?\.v4", kernel) and re.search(r"st\.global\.v4", kernel), name
        assert not re.search(r"st\.global\.[uf]", kernel), f"{name} writes less than 16 bytes at a time"


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    made = tmp_path_factory.mktemp("check") / "check"
    here = Path(__file__).parent
    base = [compiler, "-std=c++20", "-O1", "-g", f"-I{here}", f"-I{SOURCES}", here / "check.cpp", "-o", made]
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 64), (28, 4, 128), (4, 2, 16), (8, 1, 256)])
def test_rope_and_the_write_of_keys_and_values(program, dtype, heads, kv_heads, dim):
    rows, blocks, size, spare = 5, 4, 4, 16  # `spare`: other layers' bytes between the blocks
    qkv = random(rows, heads + 2 * kv_heads, dim, dtype=dtype)
    angles = random(rows, dim // 2, seed=1)  # of each row by itself, as M-RoPE's
    cos, sin = angles.cos(), angles.sin()
    store = random(blocks, 2 * size * kv_heads * dim + spare, dtype=dtype, seed=2)
    slots = torch.tensor([3, 0, 15, 8, 6])
    n = [rows, qkv.stride(0), store.stride(0), heads, kv_heads, dim, size]
    made, _, _, cache, _ = run(program, "rope", dtype, n, [qkv, cos, sin, store, slots])

    want, kept = qkv.clone(), store.clone()
    view = kept[:, :-spare].unflatten(1, (2, size, kv_heads, dim))
    reference.rope(want[:, : heads + kv_heads], cos, sin)
    batch = AttentionBatch([1] * rows, [0] * rows, rows, size, slots, slots, slots, slots)
    fresh = KV(want[:, heads : heads + kv_heads], want[:, heads + kv_heads :])
    reference.write_kv(KV(view[:, 0], view[:, 1]), fresh, batch)
    for got, wanted in ((made, want), (cache, kept)):
        torch.testing.assert_close(got, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    untouched = torch.ones(blocks * size, dtype=torch.bool)
    untouched[slots] = False
    got = cache[:, :-spare].unflatten(1, (2, size, kv_heads, dim)).transpose(1, 2).flatten(0, 1)
    was = store[:, :-spare].unflatten(1, (2, size, kv_heads, dim)).transpose(1, 2).flatten(0, 1)
    assert torch.equal(got[untouched], was[untouched]) and torch.equal(cache[:, -spare:], store[:, -spare:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(0, 64), (1, 64), (3, 1000), (7, 2048)])
def test_silu_and_mul(program, dtype, rows, width):
    gate_up = random(rows, 2 * width, dtype=dtype)
    out = torch.zeros(rows, width, dtype=dtype)
    made = run(program, "silu", dtype, [rows, width], [gate_up, out])[1]
    torch.testing.assert_close(made, reference.silu_and_mul(gate_up), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


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
