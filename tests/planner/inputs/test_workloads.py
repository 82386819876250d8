"""Workloads as numbers of tokens: of the paper's five datasets, of recordings, of conversations."""

import base64
import io
import json

import pytest
from PIL import Image

from hydrainfer.builtin import MODEL
from hydrainfer.core import ConfigError
from hydrainfer.planner.inputs.models import prompts_of
from hydrainfer.planner.inputs.workloads import PromptRules, summary, trace_of, words_to_tokens
from hydrainfer.planner.simulation import as_requests, at_rate
from hydrainfer.workload.sources import (
    ChatRequest,
    Dialogues,
    DrawnPicture,
    FilePicture,
    Recording,
    Workload,
    read_workload,
    write_recording,
)

pytestmark = pytest.mark.cpu
DATASETS = ("textcaps", "pope", "mme", "vizwiz", "textvqa")
BLIND = PromptRules("blind", None, lambda text, n: words_to_tokens(text), 4096)


@pytest.fixture(scope="module")
def next_():
    return prompts_of("llava-next-7b")


@pytest.mark.parametrize("dataset", DATASETS)
def test_the_papers_datasets(next_, dataset):
    """Figure 9: with LLaVA-NeXT-7B pictures are most of a prompt everywhere; answers are a word or two for MME and
    POPE, a phrase for TextVQA, a sentence for TextCaps, and longest for VizWiz."""
    trace = trace_of(read_workload(dataset), next_, 400, seed=1)
    assert not any(t.parts for t in trace), "nothing is said or shown twice"
    s = summary(trace)
    assert 1400 < s["picture_mean"] < 2900 and s["text_mean"] < 0.05 * s["prompt_mean"]
    low, high = {"mme": (1, 3), "pope": (2, 3), "textvqa": (4, 8), "textcaps": (24, 36), "vizwiz": (60, 90)}[dataset]
    assert low <= s["output_mean"] <= high


def test_the_same_seed_is_the_same_trace(next_):
    workload = read_workload("textcaps")
    assert trace_of(workload, next_, 50, 3) == trace_of(workload, next_, 50, 3) != trace_of(workload, next_, 50, 4)


def test_arrivals_are_one_a_second_until_they_are_stretched(next_):
    trace = trace_of(read_workload("pope"), next_, 2000, seed=0)
    assert trace[0].arrival_s == 0 and 1800 < trace[-1].arrival_s < 2200
    assert at_rate(trace, 8.0)[-1].arrival_s == pytest.approx(2000 / 8.0)
    assert len(as_requests(trace)) == 2000


def test_text_is_counted_by_the_models_own_tokenizer():
    prompts = prompts_of(str(MODEL))
    assert prompts.picture(640, 480) == 64
    assert (
        prompts.text("three red circles", 1) == prompts.text("three red circles", 2) - 1
    )  # a newline beside a picture
    assert prompts.text("three red circles and more", 1) > prompts.text("three red circles", 1)


def test_a_model_without_eyes():
    workload = Workload(dataset="text", n_pictures=0, words=30, output_tokens={"default": 7})
    (request,) = trace_of(workload, BLIND, 1)
    assert request.pictures == () and request.n_output == 7 and request.n_text == words_to_tokens("x " * 33)
    with pytest.raises(ConfigError, match="blind cannot see"):
        trace_of(Workload(dataset="seen"), BLIND, 1)


def test_answers_are_as_long_as_those_of_the_model_a_name_begins_with(next_):
    workload = Workload(dataset="d", output_tokens={"default": 1, "llava": 2, "llava-next": 3})
    assert trace_of(workload, next_, 1)[0].n_output == 3
    assert trace_of(workload, next_._replace(name="LLaVA-1.5-13b"), 1)[0].n_output == 2
    assert trace_of(workload, next_._replace(name="qwen"), 1)[0].n_output == 1


def test_pictures_that_see_themselves_whole_are_not_cut():
    workload = Workload(dataset="seen", dialogues=Dialogues(turns=2))
    for name, whole in (("gemma-3-4b", True), ("llava-1.5-7b", False)):
        requests = as_requests(trace_of(workload, prompts_of(name), 4))
        assert {m.whole for r in requests for m in r.media} == {whole}


def test_a_recording_keeps_its_times_and_answers(tmp_path, next_):
    picture = tmp_path / "p.jpg"
    Image.new("RGB", (640, 480)).save(picture, exif=_turned())
    chats = tuple(
        ChatRequest(text="why?", pictures=pictures, max_tokens=4 + i, at_s=10.0 + 0.5 * i)
        for i, pictures in enumerate([(FilePicture(str(picture)),), (DrawnPicture(1, 640, 480),), ()])
    )
    write_recording(tmp_path / "r.jsonl", Recording(dataset="d", chats=chats))
    trace = trace_of(read_workload(str(tmp_path / "r.jsonl")), next_, 3)
    assert [t.arrival_s for t in trace] == [0.0, 0.5, 1.0] and [t.n_output for t in trace] == [4, 5, 6]
    assert [t.pictures for t in trace] == [(next_.picture(480, 640),), (next_.picture(640, 480),), ()]
    assert [t.content for t in trace] == [str(picture), "", ""]  # a file may come again, a drawn one does not


@pytest.mark.parametrize(
    ("name", "alone", "together"), [("llava-onevision-7b", 2929, 730), ("smolvlm2-2.2b", 1053, 1053)]
)
def test_pictures_of_one_prompt_may_have_other_tokens_than_a_single_one(tmp_path, name, alone, together):
    """LLaVA-OneVision cuts only the picture of a prompt that has no other, so that prompts of one and of two pictures
    share no beginning."""
    shown = DrawnPicture(1, 640, 480), DrawnPicture(2, 448, 448)
    chats = tuple(ChatRequest(text="why?", pictures=shown[:n], max_tokens=4, at_s=float(n)) for n in (1, 2))
    write_recording(tmp_path / "r.jsonl", Recording(dataset="d", chats=chats))
    one, two = trace_of(read_workload(str(tmp_path / "r.jsonl")), prompts_of(name), 2)
    assert one.pictures == (alone,) and two.pictures[0] == together
    assert bool(one.parts) == (alone == together), "parts are kept where prompts share a beginning"


def test_conversations(tmp_path, next_):
    out = io.BytesIO()
    Image.new("RGB", (336, 336)).save(out, "PNG")
    url = "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is it?"}]
    body = {
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": parts}],
        "max_tokens": 9,
    }
    (tmp_path / "r.json").write_text(json.dumps(body))
    workload = Workload(dataset="d", reader="openai-jsonl", path=str(tmp_path / "r.json"))
    (request,) = trace_of(workload, next_, 1)
    assert request.pictures == (next_.picture(336, 336),) and request.n_output == 9 and len(request.content) == 64
    parts[0]["image_url"]["url"] = url.replace("/", "%2F").replace("+", "%2B")
    (tmp_path / "r.json").write_text(json.dumps(body))
    assert trace_of(workload, next_, 1)[0].content == request.content
    parts[0]["image_url"]["url"] = "https://example.org/a.png"
    (tmp_path / "r.json").write_text(json.dumps(body))
    with pytest.raises(ConfigError, match="planning needs data: URLs"):
        trace_of(workload, next_, 1)


def test_workloads_that_cannot_be_planned_for_are_refused(tmp_path, next_):
    with pytest.raises(ConfigError, match=r"request 0 has \d+ tokens with its answer, but llava-next-7b takes 4096"):
        trace_of(Workload(dataset="d", words=3000, questions=("{words}",)), next_, 1)
    (tmp_path / "p.jpg").write_bytes(b"no picture")
    chat = ChatRequest(text="?", pictures=(FilePicture(str(tmp_path / "p.jpg")),))
    write_recording(tmp_path / "r.jsonl", Recording(dataset="d", chats=(chat,)))
    with pytest.raises(ConfigError, match="no picture that can be read"):
        trace_of(read_workload(str(tmp_path / "r.jsonl")), next_, 1)
    with pytest.raises(ConfigError, match="has no requests"):
        trace_of(Workload(dataset="d"), next_, 0)


def _turned():
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


def test_a_drawn_length_is_that_of_the_trace_in_words_and_tokens():
    """An English word counts 4/3 tokens, in the drawing and where a model has no tokenizer."""
    blind = BLIND._replace(n_context=1 << 20)
    workload = read_workload("long")
    trace = trace_of(workload, blind, 300, seed=5)
    drawn = [len(chat.text.split()) * 4 / 3 for chat in workload.chats(300, 5)]
    assert [t.n_prompt for t in trace] == pytest.approx(drawn, abs=1)
    assert {t.n_output for t in trace} == {1024} and not any(t.parts for t in trace)
    with pytest.raises(ConfigError, match=r"tokens with its answer, but blind takes 4096"):
        trace_of(workload, BLIND, 300, seed=5)
