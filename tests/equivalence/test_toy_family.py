"""A new family is one file, here `tests/toy_family.py`: all rooms serve it then."""

from __future__ import annotations

import json

import pytest
import torch

from hydrainfer import LLM, SamplingParams
from hydrainfer.families import FAMILIES
from hydrainfer.planner.inputs import prompts_of, shape_of
from tests.checkpoints import make_llava
from tests.equivalence.criterion import compare_greedy
from tests.equivalence.reference import Reference
from tests.equivalence.test_families import CHUNKED, N_NEW
from tests.families.chats import image, text, user
from tests.toy_family import TOY, pooled

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(300)]

PICTURES = ([image(0)], [image(3), image(1)])

OPTIONS = CHUNKED | {"threads": 1, "native_kernels": False, "image_backend": "pillow"}


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    monkeypatch.setitem(FAMILIES, "ToyForConditionalGeneration", TOY)
    config = make_llava(tmp_path, seed=7) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": ["ToyForConditionalGeneration"]}))
    return tmp_path


class ToyReference(Reference):
    """transformers' LLaVA with the same twists, on prompts that were made already."""

    def __init__(self, path) -> None:
        super().__init__(path)
        self.model.model.multi_modal_projector.register_forward_hook(lambda _m, _in, rows: pooled(rows))

    def inputs(self, messages):
        (_, pictures), ids = messages, torch.tensor([messages[0]])
        rgb = [p["image"].convert("RGB") for p in pictures]
        pixels = self.processor.image_processor(rgb, return_tensors="pt")["pixel_values"]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}


@pytest.mark.parametrize("layout", ["1EPD", "1E1P1D"])
def test_tokens_are_those_of_transformers_with_the_same_twists(checkpoint, layout):
    reference = ToyReference(checkpoint)
    chats = [[user(*pictures, text("What is in this picture?"))] for pictures in PICTURES]
    greedy = SamplingParams(temperature=0.0, max_tokens=N_NEW)
    with LLM(checkpoint, layout=layout, launcher="inproc", **OPTIONS) as llm:
        outputs = llm.chat(chats, greedy, use_tqdm=False)
    decided = 0
    for pictures, out in zip(PICTURES, outputs):
        prompt_ids = list(out.prompt_token_ids)
        assert prompt_ids.count(reference.model.config.image_token_id) == 4 * len(pictures)
        _, ids, gaps = reference.greedy((prompt_ids, pictures), N_NEW)
        decided += compare_greedy(list(out.outputs[0].token_ids), ids, gaps)
        assert len(set(ids)) > 3
    assert decided


def test_the_planner_counts_it(checkpoint):
    shape, prompts = shape_of(str(checkpoint)), prompts_of(str(checkpoint))
    assert prompts.picture(640, 480) == shape.vision.picture_tokens == 4
    assert shape.vision.rows_per_token == (16 + 1) / 4
