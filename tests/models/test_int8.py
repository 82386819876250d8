"""A decoder in 8 bits: what it takes, and how far its logits are from those of the wide weights."""

from __future__ import annotations

import pytest
import torch

from hydrainfer import LLM, SamplingParams, builtin
from hydrainfer.assemble.sizes import quantization_of
from hydrainfer.config import ServeConfig
from hydrainfer.core import ConfigError, Role
from hydrainfer.models import DTYPES, load_model
from hydrainfer.ops import Int8Weight, select_ops
from tests.checkpoints_text import make_text
from tests.models.teacher import teacher_forced
from training.builtin import plain

pytestmark = pytest.mark.cpu
OF_THE_SPREAD = 0.06  # root mean square of the error of logits, as a share of their standard deviation; docs/models.md


def load(path, dtype, quantization):
    ops = select_ops("cpu", DTYPES[dtype], head_dim=64, quantization=quantization)
    return load_model(path, Role.parse("EPD"), dtype=dtype, ops=ops)


def error(path, dtype: str, ids: list[int]) -> tuple[float, float, float]:
    """(share of the spread, greatest, share of positions with the same best token) of logits in 8 bits, against those
    in float32."""
    want = teacher_forced(load(path, "float32", "none"), ids)
    got = teacher_forced(load(path, dtype, "int8"), ids)
    wrong = got - want
    same = (got.argmax(-1) == want.argmax(-1)).float().mean()
    return float(wrong.pow(2).mean().sqrt() / want.std()), float(wrong.abs().max()), float(same)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("kind", "tied"), [("llama", False), ("qwen2", True)])
def test_logits_of_random_weights(tmp_path, dtype, kind, tied, record_property):
    path = make_text(tmp_path, kind, 3, tie_word_embeddings=tied)
    ids = torch.randint(3, 1500, (90,), generator=torch.Generator().manual_seed(0)).tolist()
    share, worst, same = error(path, dtype, ids)
    record_property("error", share)
    print(f"{dtype}: {share:.2%} of the logits' spread, greatest {worst:.3f}, same best token {same:.0%}")
    assert share < OF_THE_SPREAD


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_of_the_built_in_model(dtype):
    share, worst, same = error(builtin.MODEL, dtype, torch.arange(3, 300).tolist())
    print(f"{dtype}: {share:.2%} of the logits' spread, greatest {worst:.3f}, same best token {same:.0%}")
    assert share < OF_THE_SPREAD


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_of_the_built_in_model_are_the_same(dtype):
    """In at least 98 of 100; counted."""
    asked = plain.cases(11, 20)
    image = [{"type": "image", "image": c.picture} for c in asked]
    text = [{"type": "text", "text": c.question} for c in asked]
    chats = [[{"role": "user", "content": list(parts)}] for parts in zip(image, text)]
    said = []
    for quantization in ("none", "int8"):
        with LLM(threads=1, dtype=dtype, quantization=quantization) as llm:
            outs = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=40), use_tqdm=False)
            said.append([out.outputs[0].token_ids for out in outs])
    same = sum(a == b for a, b in zip(*said))
    print(f"{dtype}: {same} of {len(asked)} answers are the same in 8 bits")
    assert same >= 0.98 * len(asked)


@pytest.mark.parametrize("tied", [True, False])
def test_the_decoders_matrices_are_in_8_bits(tmp_path, tied):
    path = make_text(tmp_path, "qwen2", 3, tie_word_embeddings=tied)
    narrow, wide = (load(path, "float32", kind) for kind in ("int8", "none"))
    kinds = {name: isinstance(slot.into, Int8Weight) for name, slot in narrow.slots().items()}
    of_layers = {n: is_narrow for n, is_narrow in kinds.items() if "layers" in n}
    assert all(is_narrow == n.endswith("proj.weight") for n, is_narrow in of_layers.items())
    assert kinds["text.embed_tokens.weight"] == tied and not kinds["text.norm.weight"]
    assert narrow.weight_bytes < (0.3 if tied else 0.6) * wide.weight_bytes
    ids = torch.tensor([5, 0, 1499])
    torch.testing.assert_close(narrow.embed(ids), wide.embed(ids), atol=0.02 if tied else 0, rtol=0)


@pytest.mark.parametrize("device", ["emulated", "cuda"])
def test_elsewhere_it_is_refused(device):
    kind = "cuda" if device == "cuda" else "cpu"
    with pytest.raises(ConfigError, match="--quantization int8 is for --device cpu") as refused:
        quantization_of(ServeConfig(model="", device=device, quantization="int8"), torch.device(kind))
    assert refused.value.param == "quantization"
    assert quantization_of(ServeConfig(model="", device=device), torch.device(kind)) == "none"
