"""Launches per layer of a decode step and of a vision tower, for published shapes: counted on fake tensors, and written
in docs/measured.md."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from hydrainfer.families import read_config
from hydrainfer.models import PatchedPicture
from hydrainfer.models.decoder import Decoder
from hydrainfer.models.lfm3_tower import Lfm3Vision
from hydrainfer.models.vit_parts import Block
from tests.cuda.fake import fake_cuda
from tests.cuda.test_path import MODELS, PICTURES, FakeRig, decode, kernels

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(300)]
assert kernels, "a fixture"

DOCS = Path(__file__).parents[2] / "docs" / "measured.md"
MORE_PICTURES = {
    "gemma-3-4b": ((896, 896, 3), None),
    "lfm3-vl-2b": ((1, 256, 384, 3), (1, 8, 12)),
    "qwen3.5-9b": ((1, 128, 192, 3), (1, 4, 6)),
}
LIMITS = {  # launches per layer of a decode step, and of the tower
    "llama-3.1-8b": (11, None),
    "llava-1.5-7b": (11, 11),
    "qwen2-vl-7b": (11, 11),
    "qwen2.5-vl-7b": (11, 11),
    "qwen3-vl-8b": (13, 11),
    "gemma-3-4b": (18, 11),
    "lfm3-vl-2b": (20, 11),
    "qwen3.5-9b": (20, 11),
    "gpt-oss-20b": (30, None),
    "qwen3-next-80b-a3b": (40, None),
}
N_LAYERS = {"qwen3-next-80b-a3b": 4}  # not 48: after four they repeat, and each has 512 experts to make
LAYERS = ((Decoder, "_layer"), (Block, "run"), (Lfm3Vision, "_run"))


class Counts:
    """The launches within each call of a layer."""

    def __init__(self, monkeypatch, recorder, kernels) -> None:
        self.found: list[int] = []
        for cls, name in LAYERS:
            monkeypatch.setattr(cls, name, self._counting(getattr(cls, name), recorder, kernels))

    def _counting(self, layer, recorder, kernels):
        def run(*args):
            before = len(recorder.calls) + len(kernels.calls)
            made = layer(*args)
            self.found.append(len(recorder.calls) + len(kernels.calls) - before)
            return made

        return run

    def mean(self) -> float:
        mean = sum(self.found) / len(self.found)
        self.found.clear()
        return mean


def attention(q, fresh, cache, batch, scale, sinks=None, cap=0.0) -> torch.Tensor:
    """One launch, as FlashInfer's: this one fills its result."""
    return torch.zeros((*q.shape[:2], cache.values.shape[3]), dtype=q.dtype, device=q.device)


def counted(name: str, monkeypatch, kernels) -> tuple[float, float | None]:
    for more, picture in MORE_PICTURES.items():
        monkeypatch.setitem(PICTURES, more, picture)
    with fake_cuda(monkeypatch) as recorder:
        rig = FakeRig(name, N_LAYERS.get(name) or read_config(MODELS / name).text.layers)
        ops = dataclasses.replace(rig.model.language._ops, prepare=lambda batch: None, attention=attention)
        rig.model.language._ops = rig.model.ops = ops
        counts = Counts(monkeypatch, recorder, kernels)
        work = [decode(rig) for _ in range(4)]
        for one in work:
            one.seq.n_computed = one.start
        rig.hidden(work)
        in_decode, in_tower = counts.mean(), None
        if rig.model.vision is not None:
            rig.model.vision.encode([PatchedPicture(rig.pixels, rig.grid)])
            in_tower = counts.mean()
        rig.close()
    return in_decode, in_tower


def row(name: str, in_decode: float, in_tower: float | None) -> str:
    return f"| {name} | {in_decode:.1f} | {'' if in_tower is None else f'{in_tower:.1f}'} |"


@pytest.mark.parametrize("name", list(LIMITS))
def test_launches_per_layer(monkeypatch, kernels, name):
    found = counted(name, monkeypatch, kernels)
    for launches, limit in zip(found, LIMITS[name]):
        assert launches is None or launches <= limit, found
    assert row(name, *found) in DOCS.read_text(), f"docs/measured.md should have: {row(name, *found)}"
