"""E, P and D as three processes on one device, whose blocks move by CUDA IPC: the tokens of one instance."""

from __future__ import annotations

import pytest

from benchmarks.gpu.processes import in_processes
from tests.gpu.alike import check_alike
from tests.gpu.test_whole import answers

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

KINDS = ("llava", "qwen3_5")  # keys and values; those and states


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transport", ["one-sided", "tcp"])
def test_three_processes_give_the_tokens_of_one(device, models, kind, transport):
    one = answers(kind, models, device)
    by_device = {"cuda": "cuda-ipc", "cpu": "shared-memory"}
    options = {"transport": by_device[device.type] if transport == "one-sided" else transport}
    if device.type == "cuda":
        options |= {"gpu_share": 0.25}
    with in_processes():
        three = answers(kind, models, device, layout="1E1P1D", launcher="ray", **options)
    print(check_alike(three, one))
