"""A new family is one file, here `tests/toy_family.py`: all rooms serve it then. Pictures with text inside, too."""

from __future__ import annotations

import json
from typing import NamedTuple

import pytest
import torch

from hydrainfer import LLM, SamplingParams
from hydrainfer.core import CheckpointError, InvalidRequest
from hydrainfer.families import FAMILIES
from hydrainfer.planner.inputs import prompts_of, shape_of, trace_of
from hydrainfer.planner.simulation import as_requests
from hydrainfer.processor import load_description
from hydrainfer.processor.text import check_text
from hydrainfer.workload.sources import ChatRequest, DrawnPicture
from tests import toy_family
from tests.checkpoints import make_llava
from tests.equivalence.criterion import compare_greedy
from tests.equivalence.mixed import settled_stats
from tests.equivalence.reference import Reference
from tests.equivalence.test_families import CHUNKED, N_NEW
from tests.families.chats import image, text, user
from tests.toy_family import LINED, SCALE, TOY, pooled

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(300)]

PICTURES = ([image(0)], [image(3), image(1)])
GREEDY = SamplingParams(temperature=0.0, max_tokens=N_NEW)
OPTIONS = CHUNKED | {"launcher": "inproc", "threads": 1, "native_kernels": False, "image_backend": "pillow"}


N_ROWS = {"pooled": 4, "lined": 16}


@pytest.fixture(params=["pooled", "lined"])
def family(request):
    return request.param


@pytest.fixture
def checkpoint(tmp_path, monkeypatch, family):
    monkeypatch.setitem(FAMILIES, "ToyForConditionalGeneration", {"pooled": TOY, "lined": LINED}[family])
    config = make_llava(tmp_path, seed=7) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": ["ToyForConditionalGeneration"]}))
    return tmp_path


class ToyReference(Reference):
    """transformers' LLaVA with the same twists, on prompts that were made already."""

    def __init__(self, path, family) -> None:
        super().__init__(path)
        self._answers = {}
        if family == "pooled":
            self.model.model.multi_modal_projector.register_forward_hook(lambda _m, _in, rows: pooled(rows))
            self.model.get_input_embeddings().register_forward_hook(lambda _m, _in, x: x * SCALE)

    def greedy(self, messages, n_new):
        ids = tuple(messages[0])
        if ids not in self._answers:
            self._answers[ids] = super().greedy(messages, n_new)
        return self._answers[ids]

    def inputs(self, messages):
        (_, pictures), ids = messages, torch.tensor([messages[0]])
        rgb = [p["image"].convert("RGB") for p in pictures]
        pixels = self.processor.image_processor(rgb, return_tensors="pt")["pixel_values"]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}


def check(outputs, pictures, reference, family):
    """The answers are those of transformers on the same ids and pictures."""
    decided = 0
    for shown, out in zip(pictures, outputs, strict=True):
        prompt_ids = list(out.prompt_token_ids)
        assert prompt_ids.count(reference.model.config.image_token_id) == N_ROWS[family] * len(shown)
        _, ids, gaps = reference.greedy((prompt_ids, shown), N_NEW)
        decided += compare_greedy(list(out.outputs[0].token_ids), ids, gaps)
        assert len(set(ids)) > 3
    assert decided


@pytest.mark.parametrize("layout", ["1EPD", "1E1P1D"])
def test_tokens_are_those_of_transformers_with_the_same_twists(checkpoint, family, layout):
    reference = ToyReference(checkpoint, family)
    chats = [[user(*pictures, text("What is in this picture?"))] for pictures in PICTURES]
    with LLM(checkpoint, layout=layout, **OPTIONS) as llm:
        outputs = llm.chat(chats, GREEDY, use_tqdm=False)
    check(outputs, PICTURES, reference, family)


@pytest.mark.parametrize("family", ["lined"], indirect=True)
@pytest.mark.parametrize("chunk", [1, 7, 24, 4096])
def test_texts_inside_pictures_are_tokens_like_others(checkpoint, family, chunk):
    """Pictures at four distances from a block's start, in chunks, each asked again when it is cached: then the prompt
    goes on inside the picture, at a placeholder or at a text."""
    reference, placeholder = ToyReference(checkpoint, family), 2000
    shown = [[image(i)] for i in (0, 3, 1, 4)]
    prompts = [
        {"prompt_token_ids": [1, *[9] * i, placeholder], "multi_modal_data": {"image": one["image"]}}
        for i, (one,) in enumerate(shown)
    ]
    with LLM(checkpoint, **OPTIONS | {"token_budget": chunk}) as llm:
        for n_found in (0, 24 + 3 * 28):  # up to the first text before the last row, to its last, and to the last row
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
            check(outputs, shown, reference, family)
            assert settled_stats(llm).tokens_found == n_found
    row, (pad, *words) = [placeholder] * 4, outputs[0].prompt_token_ids[10:13]
    last = [*row[:3], pad, *words, pad, placeholder, pad]
    assert list(outputs[0].prompt_token_ids) == [1, *row, pad, *row, pad, *words, pad, *row, pad, *last]
    assert outputs[1].prompt.count("<image>") == outputs[1].prompt.count("<pad>") == 1


@pytest.mark.parametrize("family", ["lined"], indirect=True)
def test_marks_of_pictures_are_reserved_and_known_to_the_tokenizer(checkpoint, monkeypatch):
    model = load_description(checkpoint)
    with pytest.raises(InvalidRequest, match="holds <pad>, which stands for a picture"):
        check_text("a <pad> of my own", model, "prompt")
    monkeypatch.setattr(toy_family, "MARKS", ("<row>",))
    with pytest.raises(CheckpointError, match=r"tokenizer.json has no token <row>, which this model's pictures need"):
        load_description(checkpoint)


class Fixed(NamedTuple):
    """A workload of these requests."""

    requests: list
    dataset: str = "fixed"

    def chats(self, n, seed, like):
        return self.requests


def test_the_planner_counts_it(checkpoint, family):
    shape, prompts = shape_of(str(checkpoint)), prompts_of(str(checkpoint))
    assert prompts.picture(640, 480) == shape.vision.picture_tokens == N_ROWS[family]
    assert shape.vision.rows_per_token == (16 + 1) / N_ROWS[family]
    chat = ChatRequest(text="What?", pictures=(DrawnPicture(1, 640, 480),) * 2, max_tokens=4)
    n_inner = {"pooled": 0, "lined": 2 + 2 * 4}[family]
    for shared in (1, 2):  # with parts only if prompts begin alike
        trace = trace_of(Fixed([chat] * shared), prompts, shared)
        assert trace[0].n_text == prompts.text("What?", 2) + 2 * n_inner and trace[0].pictures == (N_ROWS[family],) * 2
        (request, *_) = as_requests(trace)
        assert request.n_prompt == trace[0].n_prompt and [m.n_tokens for m in request.media] == [N_ROWS[family]] * 2
