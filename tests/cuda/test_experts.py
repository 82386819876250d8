"""Layers of experts on fake `cuda:0` tensors: nothing waits, nothing is copied from the host, and launches are few,
whatever the number of experts."""

from __future__ import annotations

import pytest
import torch

from hydrainfer.families import read_config
from hydrainfer.models.moe import Moe
from hydrainfer.ops import select_ops, torch_variants
from tests.cuda.fake import CUDA, fake_cuda
from tests.cuda.test_path import MODELS
from tests.cuda.test_path import kernels as kernels

pytestmark = pytest.mark.cpu

LAUNCHES = {"gpt-oss-20b": 24, "qwen3-next-80b-a3b": 25, "mimo-v2-flash": 22}  # router and shared expert included


@pytest.mark.parametrize("rows", [1, 4, 300])
@pytest.mark.parametrize("name", LAUNCHES)
def test_a_layer_of_experts_does_not_wait(monkeypatch, kernels, name, rows):
    """So that a CUDA graph may contain it."""
    text = read_config(MODELS / name).text
    with fake_cuda(monkeypatch) as recorder:
        ops = select_ops(CUDA, torch.bfloat16, text.head_dim)
        moe = Moe.make(text.experts, text.hidden, text.norm_eps, ops, torch.bfloat16, CUDA)
        x = torch.empty(rows, text.hidden, dtype=torch.bfloat16, device=CUDA)
        for part in (recorder.calls, recorder.copies, recorder.waits):
            part.clear()
        assert moe.run(x, ops).shape == x.shape
        assert not recorder.waits and not recorder.copies
        assert len(recorder.calls) + len(kernels.calls) <= LAUNCHES[name], recorder.calls


def test_experts_are_a_loop_where_grouped_products_would_wait(monkeypatch, kernels):
    """torch's read the ends of the groups on the host in other dtypes, and on other GPUs."""

    def variant(dtype: torch.dtype) -> str:
        return dict(select_ops(CUDA, dtype, 64).describe())["experts"]

    with fake_cuda(monkeypatch):
        assert [variant(d) for d in (torch.bfloat16, torch.float16, torch.float32)] == [
            "torch-grouped",
            "reference",
            "reference",
        ]
        monkeypatch.setattr(torch_variants, "has_grouped_products", lambda device: False)
        assert variant(torch.bfloat16) == "reference"


@pytest.mark.parametrize(("capability", "usable"), [((8, 9), False), ((9, 0), True), ((10, 3), True), ((12, 0), False)])
def test_gpus_with_grouped_products(monkeypatch, capability, usable):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert torch_variants.has_grouped_products(CUDA) is usable
