"""The model that ships answers questions about pictures it never saw, whichever way it is laid out."""

from __future__ import annotations

import pytest
from PIL import Image

from hydrainfer import LLM, SamplingParams, builtin
from training.builtin import plain
from training.builtin.samples import FOLDER

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(180)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
SAMPLES = [
    ("shapes.png", "What is in this picture?", "A red circle, a blue square and a green star."),
    ("shapes.png", "What colour is the square?", "Blue."),
    ("shapes.png", "Is there a yellow star?", "No."),
    ("stars.png", "How many stars are there?", "Four."),
    ("night.png", "What is in this picture?", "A red circle and a yellow star."),
    ("night.png", "What shape is red?", "A circle."),
    ("digit.png", "What digit is this?", "2."),
    ("astronaut.jpg", "What is in this picture?", "I only know shapes and digits."),
]


def user(picture, question):
    parts = [{"type": "image", "image": picture}] if picture is not None else []
    return [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]


def answers(llm, chats):
    return [out.outputs[0].text.strip() for out in llm.chat(chats, GREEDY, use_tqdm=False)]


@pytest.mark.parametrize("layout", ["1EPD", "1E1P1D"])
def test_it_answers(layout):
    every = plain.cases(11, 8)  # by a script that shares nothing with the training pictures
    drawn = [c for c in every if c.kind in ("exists", "colour", "shape")]  # what it is good at there
    with LLM(layout=layout, threads=1) as llm:
        said = answers(llm, [user(str(FOLDER / name), q) for name, q, _ in SAMPLES])
        assert said == [a for _, _, a in SAMPLES]
        said = answers(llm, [user(c.picture, c.question) for c in drawn])
        wrong = [(c.question, c.answer, x) for c, x in zip(drawn, said) if c.answer != x]
        assert len(wrong) <= len(drawn) // 10, wrong
        assert answers(llm, [user(None, "Hello")]) == ["Hello! Show me a picture of shapes or a digit."]


def test_it_is_small_and_its_sample_is_a_picture():
    assert sum(f.stat().st_size for f in builtin.MODEL.iterdir()) <= 12e6
    with Image.open(builtin.PICTURE) as picture:
        assert min(picture.size) >= 200
