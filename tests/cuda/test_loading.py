"""Checkpoints of every family, loaded to fake `cuda:0`: every weight arrives there, and no tensor is on the wrong
device."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from hydrainfer.checkpoint import locate
from hydrainfer.core import Role
from hydrainfer.families import read_config
from hydrainfer.models import load_model
from hydrainfer.ops import select_ops
from tests import checkpoints_qwen
from tests.checkpoints import make_llava
from tests.checkpoints_fp8 import make_fp8
from tests.checkpoints_gemma import make_gemma
from tests.checkpoints_next import make_llava_next
from tests.checkpoints_qwen import make_qwen
from tests.checkpoints_text import KINDS, make_text
from tests.cuda.fake import CUDA, fake_cuda
from tests.gguf_files import spell_as_published, write_text, write_vision
from tests.models.test_moe import make_mxfp4

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(120)]


def _gguf(out: Path, kind: str) -> Path:
    checkpoint = spell_as_published(make_llava(out / "checkpoint"))
    vision = write_vision(checkpoint, out / "mmproj.gguf")
    return locate(str(write_text(checkpoint, out / "model.gguf", kind)), mmproj=str(vision))


def _fp8(out: Path, kind: str, how: str) -> Path:
    return make_fp8(out, partial(make_text, kind=kind), how)[0]


def _mxfp4(out: Path) -> Path:
    return make_mxfp4(out)[0]


CHECKPOINTS = {
    "llava": make_llava,
    "llava_next": make_llava_next,
    "gemma": make_gemma,
    **{family: partial(make_qwen, family) for family in checkpoints_qwen.FAMILIES},
    **{f"text {kind}": partial(make_text, kind=kind) for kind in KINDS},
    "as transformers saves it": partial(make_qwen, "qwen3_vl_moe", published=False),
    "gpt_oss, MXFP4": _mxfp4,
    "gpt_oss, FP8": partial(_fp8, kind="gpt_oss", how="row"),
    "qwen3, FP8": partial(_fp8, kind="qwen3", how="blocks"),
    "gguf, F32": partial(_gguf, kind="F32"),
    "gguf, Q8_0": partial(_gguf, kind="Q8_0"),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_loads_to_a_gpu(name, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = CHECKPOINTS[name](tmp_path)
    config = read_config(path)
    role = Role.parse("PD" if config.vision is None else "EPD")
    with fake_cuda(monkeypatch, real_cpu=True) as recorder:
        ops = select_ops(CUDA, torch.bfloat16, config.text.head_dim, use_native=False)
        model = load_model(path, role, CUDA, "bfloat16", ops=ops)
        slots = model.slots().values()
        assert all(slot.into.device == CUDA for slot in slots)
        assert len(recorder.copies) >= len(slots)
