"""Experts: the weights as they are published, and rows that are multiplied together as each alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hydrainfer.core import CheckpointError, Role
from hydrainfer.models import load_model
from hydrainfer.ops import select_ops
from tests.checkpoints_text import make_text
from tests.models.test_loading import rewrite

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("kind", ["gpt_oss", "mimo", "qwen2_moe", "qwen3_moe"])
def test_rows_together_are_rows_alone(kind, tmp_path):
    """Whichever experts others choose."""
    model = load_model(make_text(tmp_path, kind), Role.parse("PD"))
    layer = next(layer.experts for layer in model.language.layers if layer.experts)
    rows = torch.randn(40, 64, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        together = layer.run(rows, model.ops)
        alone = torch.cat([layer.run(row[None], model.ops) for row in rows])
        assert layer.run(rows[:0], model.ops).shape == (0, 64)
        chosen = layer.route(rows)[1]
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)
    assert len(chosen.unique()) > layer.experts.chosen, "all rows go the same way"


def test_eight_bits_are_near(tmp_path):
    path, rows = make_text(tmp_path, "mimo"), torch.randn(9, 64, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        wide, narrow = (
            load_model(path, Role.parse("PD"), ops=select_ops("cpu", torch.float32, 24, quantization=kind))
            for kind in ("none", "int8")
        )
        want, got = (m.language.layers[1].experts.run(rows, m.ops) for m in (wide, narrow))
    assert 0 < float((got - want).std() / want.std()) < 0.05


@pytest.mark.parametrize("inner", [32, 64], ids=["gates square", "down square"])
def test_matrices_either_way_round(inner, tmp_path):
    """Also where one of the two kinds has as many rows as columns."""
    from safetensors.torch import load_file, save_file

    published, turned = (make_text(tmp_path / name, "gpt_oss", intermediate_size=inner) for name in ("a", "b"))
    tensors = load_file(turned / "model.safetensors")
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, turned / "model.safetensors")
    want, got = (load_model(path, Role.parse("PD")).language.layers[0].experts.matrices for path in (published, turned))
    assert torch.equal(got.gate_up, want.gate_up)
    assert torch.equal(got.down, want.down)


def make_mxfp4(folder: Path) -> tuple[Path, Path]:
    """A checkpoint of GPT-OSS as it is published, in MXFP4: two files, of which the scales come first; and the same
    numbers as bfloat16, made by transformers."""
    from safetensors.torch import load_file, save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    published, plain = (make_text(folder / name, "gpt_oss", intermediate_size=64) for name in ("a", "b"))
    tensors = load_file(plain / "model.safetensors")
    blocks, scales, draw = {}, {}, torch.Generator().manual_seed(0)
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        count, inner, outer = tensors[name].shape
        blocks[f"{name}_blocks"] = torch.randint(0, 256, (count, outer, inner // 32, 16), generator=draw).byte()
        scales[f"{name}_scales"] = torch.randint(120, 127, (count, outer, inner // 32), generator=draw).byte()
        pair = blocks[f"{name}_blocks"], scales[f"{name}_scales"]
        tensors[name] = convert_moe_packed_tensors(*pair, dtype=torch.bfloat16).float()
    assert len(blocks) == 6
    save_file(tensors, plain / "model.safetensors")
    (published / "model.safetensors").unlink()
    rest = {n: t for n, t in tensors.items() if not n.endswith(("gate_up_proj", "down_proj"))}
    parts = {"model-1.safetensors": scales | rest, "model-2.safetensors": blocks}
    for file, content in parts.items():
        save_file(content, published / file)
    index = {name: file for file, content in parts.items() for name in content}
    (published / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    rewrite(published, {"quantization_config": {"quant_method": "mxfp4"}})
    return published, plain


def test_published_weights_of_gpt_oss(tmp_path):
    published, plain = make_mxfp4(tmp_path)
    for dtype in ("float32", "bfloat16"):
        ours, theirs = (load_model(path, Role.parse("PD"), dtype=dtype) for path in (published, plain))
        for a, b in zip(ours.language.layers, theirs.language.layers, strict=True):
            for one, other in zip(a.experts.matrices[1:3], b.experts.matrices[1:3], strict=True):
                assert torch.equal(one, other)


def test_mxfp4_is_not_made_smaller_again(tmp_path):
    path = make_text(tmp_path, "gpt_oss")
    rewrite(path, {"quantization_config": {"quant_method": "mxfp4"}})
    with pytest.raises(CheckpointError, match="int8"):
        load_model(path, Role.parse("PD"), ops=select_ops("cpu", torch.float32, 16, quantization="int8"))
