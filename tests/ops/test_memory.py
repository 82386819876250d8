"""Weights lie in pages that the system may make huge."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hydrainfer.ops import weights
from hydrainfer.ops.memory import give_back

pytestmark = pytest.mark.cpu
SMAPS, HUGE = Path("/proc/self/smaps"), Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(not (SMAPS.exists() and HUGE.exists()), reason="a system without huge pages of this kind")
def test_large_weights_ask_for_huge_pages():
    weight = weights((1024, 2048), torch.float32, torch.device("cpu"))
    assert weight.shape == (1024, 2048) and weight.dtype == torch.float32
    inside, flags = False, ""
    for line in SMAPS.read_text().splitlines():
        first, dash, rest = line.split(" ")[0].partition("-")
        if dash and not line.startswith("VmFlags"):
            inside = int(first, 16) <= weight.data_ptr() + weight.nbytes // 2 < int(rest, 16)
        elif inside and line.startswith("VmFlags"):
            flags = line
    assert " hg" in flags


@pytest.mark.skipif(not SMAPS.exists(), reason="no way to see what a process holds")
def test_pages_given_back_are_no_longer_held():
    def held() -> int:
        return sum(int(line.split()[1]) for line in SMAPS.read_text().splitlines() if line.startswith("Rss:")) << 10

    large, small = torch.ones(64 << 20, dtype=torch.uint8), torch.ones(1000)
    before = held()
    give_back(large)
    give_back(small)
    assert held() < before - (60 << 20)
    assert not large[1 << 20] and small.all(), "a small one keeps its numbers: it shares its page"
