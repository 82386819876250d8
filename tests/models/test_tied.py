"""Tied heads: config.json says that the head is the token table, and the files decide, as in transformers."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from hydrainfer.core import Role
from hydrainfer.models import load_model
from hydrainfer.ops import Int8Weight, select_ops
from tests.checkpoints_next import make_llava_next
from tests.checkpoints_qwen import make_qwen
from tests.checkpoints_text import make_text
from tests.equivalence.criterion import LOGIT_TOLERANCE
from tests.models.teacher import teacher_forced

pytestmark = pytest.mark.cpu
IDS = torch.randint(3, 1500, (40,), generator=torch.Generator().manual_seed(0)).tolist()
TIED = {"tie_word_embeddings": True}
MAKE = {
    "llama": lambda out: make_text(out, "llama", 3, **TIED),
    "qwen2, shards": lambda out: make_text(out, "qwen2", 3, shards=3, **TIED),
    "gemma3": lambda out: make_text(out, "gemma3", 3, **TIED),
    "lfm3": lambda out: make_text(out, "lfm3", 3, **TIED),
    "llava-next": lambda out: make_llava_next(out, seed=4, config=TIED, text_config=TIED),
}


def store(path, head: str) -> None:
    """Store a head beside the token table: "trained" is another matrix, "copied" the same. "alone": the table is left
    out."""
    file = next(f for f in sorted(path.glob("*.safetensors")) if any("embed_tokens" in n for n in load_file(f)))
    tensors = load_file(file)
    table = next(name for name in tensors if "embed_tokens" in name)
    name = table.replace("model.embed_tokens", "lm_head")
    assert name != table and name not in tensors
    rows = tensors[table] if head != "alone" else tensors.pop(table)
    tensors[name] = rows.flip(0).contiguous() if head == "trained" else rows.clone()
    save_file(tensors, file, {"format": "pt"})
    index = path / "model.safetensors.index.json"
    if index.exists():
        text = index.read_text()
        new = f'"{name}": "{file.name}"'
        index.write_text(
            text.replace(f'"{table}": "{file.name}"', new if head == "alone" else f'"{table}": "{file.name}", {new}')
        )


@pytest.mark.parametrize("head", ["trained", "copied", "alone"])
@pytest.mark.parametrize("family", MAKE)
def test_logits_are_those_of_transformers(family, head, tmp_path):
    path = MAKE[family](tmp_path)
    store(path, head)
    auto = transformers.AutoModelForImageTextToText if family == "llava-next" else transformers.AutoModelForCausalLM
    reference = auto.from_pretrained(path, dtype=torch.float32).eval()
    model = load_model(path, Role.parse("PD"))
    with torch.inference_mode():
        want = reference(torch.tensor([IDS])).logits[0]
    assert float((teacher_forced(model, IDS) - want).abs().max()) < LOGIT_TOLERANCE
    assert model.config.text.tied == (head != "trained") == (model.language.head is model.language.table)


@pytest.mark.parametrize("head", ["trained", "copied", "alone"])
def test_in_8_bits(head, tmp_path):
    path = make_text(tmp_path, "qwen2", 3, **TIED)
    store(path, head)
    wide = load_model(path, Role.parse("PD"))
    ops = select_ops(torch.device("cpu"), torch.float32, wide.config.text.head_dim, quantization="int8")
    narrow = load_model(path, Role.parse("PD"), ops=ops)
    assert isinstance(narrow.language.head, Int8Weight)
    assert isinstance(narrow.language.table, Int8Weight) == (head != "trained")
    want = teacher_forced(wide, IDS)
    error = (teacher_forced(narrow, IDS) - want).square().mean().sqrt() / want.std()
    assert error < 0.05


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_a_head_that_only_the_text_config_calls_tied(family, tmp_path):
    """vLLM goes by `text_config`; transformers may make a head of random numbers."""
    path = make_qwen(family, tmp_path, 3, tied=True, published=False)
    want = teacher_forced(load_model(path, Role.parse("PD")), IDS)
    file = path / "config.json"
    config = json.loads(file.read_text())
    assert "lm_head.weight" not in load_file(path / "model.safetensors")
    config |= {"tie_word_embeddings": False, "text_config": config["text_config"] | TIED}
    file.write_text(json.dumps(config))
    assert torch.equal(teacher_forced(load_model(path, Role.parse("PD")), IDS), want)
