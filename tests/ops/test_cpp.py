"""The kernels' C++ by itself: the matrix kernel is right with each instruction set that it is written for and touches
nothing but its arrays; the pool does everything once and has no races."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import pytest

from hydrainfer.config.shipped import shipped
from hydrainfer.machine import instruction_sets
from hydrainfer.ops.build import _compiler

pytestmark = pytest.mark.cpu
X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86-64")


def check(name: str, flags: tuple[str, ...], tmp_path: Path) -> None:
    """Build tests/ops/NAME.cpp with these flags and run it."""
    compiler = _compiler()
    if compiler is None:
        pytest.skip("no compiler here")
    source, program = Path(__file__).with_name(f"{name}.cpp"), tmp_path / name
    common = ("-std=c++17", "-O1", "-pthread", "-ffp-contract=fast", f"-I{shipped('kernels') / 'cpu'}")
    built = subprocess.run([compiler, *common, *flags, source, "-o", program], capture_output=True, text=True)
    if built.returncode and "san" in built.stderr and "cannot find" in built.stderr:
        pytest.skip("this compiler comes without the sanitizer")
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([program], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@X86
@pytest.mark.parametrize(
    ("needs", "flags"),
    [
        pytest.param("avx2", ("-march=x86-64-v3",), id="AVX2"),
        pytest.param("avx512f", ("-march=x86-64-v4",), id="AVX-512"),
        pytest.param("avx512_bf16", ("-march=x86-64-v4", "-mavx512bf16"), id="AVX-512 BF16"),
    ],
)
def test_linear_is_right(needs, flags, tmp_path):
    if needs not in instruction_sets():
        pytest.skip("not on this processor")
    check("linear_check", flags, tmp_path)


@pytest.mark.slow
def test_linear_stays_within_its_arrays(tmp_path):
    check("linear_check", ("-march=native", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"), tmp_path)


@pytest.mark.parametrize("flags", [(), ("-fsanitize=thread",)], ids=["plain", "ThreadSanitizer"])
def test_the_pool_does_everything_once(flags, tmp_path):
    check("pool_check", flags, tmp_path)
