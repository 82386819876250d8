"""The memory that an instance keeps free on a GPU: by formula, against what passes of fake tensors hold at once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hydrainfer.assemble.sizes import GIB
from hydrainfer.assemble.workspace import Rows, _patch_bytes, _row_bytes, _sampled_bytes, workspace_bytes
from hydrainfer.core import Role
from hydrainfer.families import read_config
from hydrainfer.models import PatchedPicture, tower_of
from hydrainfer.runtime import ROWS
from hydrainfer.runtime.sampler import sample
from hydrainfer.runtime.sampling import Draw, SamplingPlan
from tests.cuda.fake import CUDA, fake_cuda
from tests.cuda.test_path import FakeRig, kernels, whole  # noqa: F401 - a fixture

pytestmark = pytest.mark.cpu
MODELS = Path(__file__).parents[2] / "configs" / "models"
USUAL = Rows(batch=2048, sampled=96, n_context=32_768, embeddings=4096)


class Peak(TorchDispatchMode):
    """The most bytes that new tensors on the device have held at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.device.type == "cuda":
                storage = x.untyped_storage()
                if storage._cdata not in before:
                    self.held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.held = {key: one for key, one in self.held.items() if not one[0].expired()}
        self.most = max(self.most, sum(n for _, n in self.held.values()))
        return out


def configs():
    return [pytest.param(read_config(path), id=path.name) for path in sorted(MODELS.iterdir())]


@pytest.mark.parametrize("config", configs())
def test_the_workspace_follows_the_budgets(config):
    whole_role = Role.parse("PD" if config.vision is None else "EPD")

    def needs(role=whole_role, **rows):
        return workspace_bytes(config, role, "bfloat16", USUAL._replace(**rows))

    assert GIB < needs() < 5 * GIB
    assert needs() < needs(batch=8192) and needs() < needs(sampled=512) and needs() < needs(n_context=1 << 20)
    assert workspace_bytes(config, whole_role, "float32", USUAL) > needs()
    if config.vision is not None:
        assert GIB <= max(needs(Role.parse("E")), needs(Role.parse("PD"))) < needs()


def test_every_paged_cache_has_wrappers_of_its_own():
    """FlashInfer's: one for each graph."""
    two = read_config(MODELS / "gpt-oss-20b")
    one = replace(two, text=replace(two.text, windows=(0,) * two.text.layers))
    both, alone = (workspace_bytes(config, Role.parse("PD"), "bfloat16", USUAL) for config in (two, one))
    assert both - alone > len(ROWS) * (8 << 20)


@pytest.mark.parametrize("name", ["llava-1.5-7b", "qwen2-vl-7b", "qwen3-vl-8b"])
def test_a_prefill_holds_no_more_than_the_formula_says(name, monkeypatch, kernels):  # noqa: F811
    with fake_cuda(monkeypatch):
        rig = FakeRig(name, layers=3)
        try:
            seq = rig.sequence(n_text=2048)
            packed = rig.packed([whole(seq, start=len(seq.tokens) - 2048)])
            with Peak() as peak:
                rig.language._forward(packed)
        finally:
            rig.close()
        reserved = 2048 * _row_bytes(rig.model.config.text, 2)
        assert 0.3 * reserved < peak.most <= reserved, f"{peak.most / reserved:.2f}"


PICTURES = {  # pixels, grid: together as many patches as a pass has
    "llava-1.5-7b": (16, (336, 336, 3), None),
    "qwen2-vl-7b": (16, (1, 896, 896, 3), (1, 32, 32)),
    "qwen3-vl-8b": (16, (1, 1024, 1024, 3), (1, 32, 32)),
}


@pytest.mark.parametrize("name", list(PICTURES))
def test_a_pass_of_the_tower_holds_no_more_than_the_formula_says(name, monkeypatch, kernels):  # noqa: F811
    n, shape, grid = PICTURES[name]
    with fake_cuda(monkeypatch):
        rig = FakeRig(name, layers=1)
        try:
            pictures = [PatchedPicture(np.zeros(shape, np.uint8), grid)] * n
            with Peak() as peak:
                rig.model.encode(pictures)
        finally:
            rig.close()
        config = rig.model.config
        size = tower_of(config).pass_size(config.vision)
        n_embeddings = sum(rig.model.vision.rows(picture) for picture in pictures)
        reserved = size.rows * _patch_bytes(size, 2) + n_embeddings * config.embed_width * 2
        assert 0.3 * reserved < peak.most <= reserved, f"{peak.most / reserved:.2f}"


@pytest.mark.parametrize("n", [1, 64, 256])
@pytest.mark.parametrize("told", [False, True], ids=["tokens", "logprobs"])
@pytest.mark.parametrize("top_k, top_p", [(0, 1.0), (50, 0.9), (2000, 0.9)])
def test_sampling_holds_no_more_than_the_formula_says(n, told, top_k, top_p, monkeypatch):
    """With a bias, so that what is told is of other logits than what is drawn, and one greedy row of many. The sums in
    float64 of filters, for which torch has a copy that is not seen here, are of 8 bytes."""
    vocab = 32_000
    draws = [Draw(i, 1.0, top_k, top_p, 0.0, i) for i in range(max(1, n - 1))]
    likely = [(i, 5) for i in range(n)] if told else []
    plan = SamplingPlan(draws=draws, biases=[(0, (1,), (1.0,))], logprobs=likely)
    with fake_cuda(monkeypatch), Peak() as peak:
        sample(torch.empty(n, vocab, device=CUDA), plan)
    unseen = 8 * min(n, 64) if top_k > 1024 else 0
    held = peak.most / vocab + unseen
    assert 0.3 * _sampled_bytes(n) < held <= _sampled_bytes(n), f"{held / _sampled_bytes(n):.2f}"
