"""The model that ships answers questions about pictures it never saw, whichever way it is laid out."""

from __future__ import annotations

import json
import shlex

import httpx
import pytest
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from hydrainfer import LLM, SamplingParams, StructuredOutputsParams, builtin
from hydrainfer.cli import app
from hydrainfer.config import load
from hydrainfer.core import ConfigError
from hydrainfer.scheduler import Worth
from hydrainfer.serving import serve_in_background
from hydrainfer.workload.sources import read_recording
from tests.equivalence.mixed import settled_stats
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


def answers(llm, chats, sampling=GREEDY):
    return [out.outputs[0].text.strip() for out in llm.chat(chats, sampling, use_tqdm=False)]


@pytest.mark.parametrize("layout", ["1EPD", "1E1P1D"])
def test_the_builtin_model_answers(layout):
    every = plain.cases(11, 8)  # by a script that shares nothing with the training pictures
    drawn = [c for c in every if c.kind in ("exists", "colour", "shape")]  # what it is good at there
    with LLM(layout=layout, threads=1) as llm:
        said = answers(llm, [user(str(FOLDER / name), q) for name, q, _ in SAMPLES])
        assert said == [a for _, _, a in SAMPLES]
        asked = [(f"USER: <image>\n{q} ASSISTANT:", Image.open(FOLDER / name)) for name, q, _ in SAMPLES]
        prompts = [{"prompt": text, "multi_modal_data": {"image": picture}} for text, picture in asked]  # as of vLLM
        said = [out.outputs[0].text.strip() for out in llm.generate(prompts, GREEDY, use_tqdm=False)]
        assert said == [a for _, _, a in SAMPLES]
        said = answers(llm, [user(c.picture, c.question) for c in drawn])
        wrong = [(c.question, c.answer, x) for c, x in zip(drawn, said) if c.answer != x]
        assert len(wrong) <= len(drawn) // 10, wrong
        assert answers(llm, [user(None, "Hello")]) == ["Hello! Show me a picture of shapes or a digit."]
        stars = [user(str(FOLDER / "stars.png"), "How many stars are there?")] * 20
        assert answers(llm, stars, None) == ["Four."] * 20  # its generation_config.json says: do not sample
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0)
        warm = answers(llm, stars[:1] * 8, SamplingParams(temperature=2.0, max_tokens=40))
        assert len(set(warm)) > 1, warm


@pytest.mark.parametrize("layout", ["1EPD", "1E1P1D"])
def test_its_mtp_layer_guesses_nearly_all_of_a_description(layout, monkeypatch):
    """Behind pictures, from the first token on, also where another instance has computed the prompt."""
    chats = [user(c.picture, "Describe the picture.") for c in plain.cases(12, 3)]
    with LLM(threads=1, drafts="off") as llm:
        said = answers(llm, chats)
    monkeypatch.setattr(Worth, "guesses", lambda worth, lucks, most: 2)
    monkeypatch.setattr(Worth, "share", lambda worth, n_decodes, lucks, offers: list(offers))
    with LLM(layout=layout, launcher="inproc", threads=1, drafts="mtp") as llm:
        assert answers(llm, chats) == said
        counts = settled_stats(llm).drafts["mtp"]
    assert counts.n_drafts >= 10
    assert counts.by_position[0] >= 0.9 * counts.n_drafts
    assert counts.n_accepted >= 1.2 * counts.n_drafts  # and one token more of each step


FORMS = [
    {"guided_choice": ["red", "green"], "min_tokens": 20},
    {"guided_choice": ["red"], "ignore_eos": True, "n": 3},
    {"structured_outputs": {"choice": ["red", "reddish"]}, "min_tokens": 20, "ignore_eos": True, "n": 2},
    {"guided_choice": [f"word{i}" for i in range(1500)], "temperature": 1.0, "n": 4},
    {"guided_choice": ['"\\n"', ".*|/", "é😀"], "temperature": 1.0, "n": 4, "min_tokens": 20},
]


@pytest.mark.parametrize("more", [{"layout": "1EPD", "drafts": "off"}, {"layout": "1E1P1D", "launcher": "inproc"}])
def test_its_answers_end_with_their_form(more):
    """At the first end token behind a finished grammar, whole and streamed, whatever asks for more tokens."""
    with serve_in_background(load({"port": 0, "threads": 1, **more}), Console(quiet=True)) as (url, _):
        for form in FORMS:
            body = {"messages": user(None, "Hello"), "seed": 5, "max_tokens": 40, "return_token_ids": True, **form}
            whole = httpx.post(url + "/v1/chat/completions", json=body, timeout=60).json()["choices"]
            choices = form.get("guided_choice") or form["structured_outputs"]["choice"]
            for choice in whole:
                ended = choice["finish_reason"], choice["message"]["content"] in choices, choice["token_ids"].index(2)
                assert ended == ("stop", True, len(choice["token_ids"]) - 1), choice
            assert _streamed(url, body) == [(c["message"]["content"], c["token_ids"]) for c in whole]
    with LLM(threads=1, **more) as llm:
        form = StructuredOutputsParams(choice=["red"])
        (out,) = llm.chat(user(None, "Hello"), SamplingParams(min_tokens=9, structured_outputs=form), use_tqdm=False)
        assert (out.outputs[0].text, out.outputs[0].finish_reason) == ("red", "stop")
        assert list(out.outputs[0].token_ids).index(2) == len(out.outputs[0].token_ids) - 1


def _streamed(url, body):
    """The text and the tokens of each choice of a streamed answer."""
    answers = [("", [])] * body.get("n", 1)
    with httpx.stream("POST", url + "/v1/chat/completions", json={**body, "stream": True}, timeout=60) as stream:
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            for part in json.loads(line.removeprefix("data: "))["choices"]:
                text, ids = answers[part["index"]]
                answers[part["index"]] = (
                    text + (part["delta"].get("content") or ""),
                    ids + (part.get("token_ids") or []),
                )
    return answers


def test_its_answers_are_traced_and_replayed(tmp_path):
    """The README's line, of which 512 tokens of answer are more than the model's context; then the line it prints."""
    out, long = tmp_path / "a [b] trace.jsonl", tmp_path / "long.yaml"
    long.write_text("dataset: long\nn_pictures: 0\nwords: 2000\n")
    run = CliRunner().invoke
    with serve_in_background(load({"port": 0, "threads": 1}), Console(quiet=True)) as (url, _):
        result = run(app, ["trace", "textcaps", "--url", url, "--requests", "8", "--out", str(out)])
        assert result.exit_code == 0 and "failed" not in result.output, result.output
        assert f"wrote {out}: 8 requests, answers of up to" in result.output
        recording = read_recording(out)
        assert len(recording.chats) == 8 and recording.n_failed == 0 and recording.n_cut_short < 8
        command, *words = shlex.split(result.output.splitlines()[-1].removeprefix("next: "))
        again = run(app, [*words, "--rate", "4", "--min-seconds", "0", "--json"])
        assert command == "hydrainfer" and again.exit_code == 0, again.output
        (bench,) = json.loads(again.stdout)["runs"]
        n_ok = bench["report"]["n_ok"]
        assert n_ok == 2 and bench["report"]["n_wrong_length"] == 0, "the last run of a search takes four times as many"

        refused = ["trace", str(long), "--url", url, "--requests", "3", "--out", str(tmp_path / "none.jsonl")]
        with pytest.raises(ConfigError, match=r"none of 3 requests was answered.*maximum context length"):
            run(app, refused, catch_exceptions=False)
        assert not (tmp_path / "none.jsonl").exists()


def test_the_builtin_model_is_small_and_its_sample_is_a_picture():
    assert sum(f.stat().st_size for f in builtin.MODEL.iterdir()) <= 12e6
    with Image.open(builtin.PICTURE) as picture:
        assert min(picture.size) >= 200
