"""The kernels are right with each instruction set that they are written for, and touch nothing but their arrays."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import pytest

from hydrainfer.config.shipped import shipped
from hydrainfer.machine import instruction_sets
from hydrainfer.ops.build import _compiler

pytestmark = pytest.mark.cpu
ASAN = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86-64")
@pytest.mark.parametrize(
    ("needs", "flags"),
    [
        pytest.param("avx2", ("-march=x86-64-v3",), id="AVX2"),
        pytest.param("avx512f", ("-march=x86-64-v4",), id="AVX-512"),
        pytest.param("avx512_bf16", ("-march=x86-64-v4", "-mavx512bf16"), id="AVX-512 BF16"),
        pytest.param("amx_bf16", ("-march=x86-64-v4", "-mavx512bf16", "-mamx-bf16"), id="AMX BF16"),
        pytest.param("avx2", ("-march=native", *ASAN), id="AddressSanitizer"),
    ],
)
@pytest.mark.parametrize("check", ["linear", "product", "attention", "layer"])
def test_kernels_are_right(check, needs, flags, tmp_path):
    compiler = _compiler()
    if compiler is None or needs not in instruction_sets():
        pytest.skip("no compiler, or not on this processor")
    source, program = Path(__file__).with_name(f"{check}_check.cpp"), tmp_path / check
    include = f"-I{shipped('kernels') / 'cpu'}"
    command = [compiler, "-std=c++17", "-O1", "-fopenmp", "-ffp-contract=fast", *flags, include, source, "-o", program]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode and "sanitize" in " ".join(flags) and "asan" in built.stderr:
        pytest.skip("this compiler comes without AddressSanitizer")
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
