"""Reasoning through HTTP, for templates as Qwen3's and DeepSeek's: whole, streamed, with tools and with a form."""

import json

import openai
import pytest
from tokenizers import Tokenizer

from hydrainfer.core import Grammar, Reasoning
from hydrainfer.processor import load_description
from tests.checkpoints import make_llava
from tests.server.conftest import ServerUnderTest
from tests.server.test_tools import ADD, SAID, USER, WEATHER
from tests.server.tool_templates import HERMES

pytestmark = pytest.mark.cpu
OPENED = '{{ "<think>\n" if enable_thinking is not defined or enable_thinking else "<think>\n\n</think>\n\n" }}'
SHOWN = (
    "{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}"
)
QWEN = HERMES + '{%- if enable_thinking is defined and not enable_thinking %}{{ "<think>\n\n</think>\n\n" }}{% endif %}'
TEMPLATES = {
    "qwen3": QWEN,
    "deepseek": HERMES.replace("{{ message.content }}\n{%- for call", SHOWN + "\n{%- for call") + OPENED,
}
THOUGHT, ANSWER = "The user asks\nfor three.", "It is three."


@pytest.fixture(scope="module", params=TEMPLATES)
def any_server(request, tmp_path_factory):
    path = make_llava(tmp_path_factory.mktemp("llava"), image_size=56, context=2048)
    words = Tokenizer.from_file(str(path / "tokenizer.json"))
    words.add_tokens(["<think>", "</think>"])
    words.save(str(path / "tokenizer.json"))
    server = ServerUnderTest(load_description(path, chat_template=TEMPLATES[request.param]))
    server.begins = "" if request.param == "deepseek" else "<think>\n"
    yield server
    server.close()


@pytest.fixture
def thinker(any_server):
    any_server.say = f"{any_server.begins}{THOUGHT}\n</think>\n\n{ANSWER}"
    any_server.engine.submitted.clear()
    yield any_server
    any_server.check_idle()


@pytest.fixture
def client(thinker):
    with openai.OpenAI(base_url=thinker.url + "/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client.chat.completions


def streamed(chunks):
    deltas = [c.choices[0].delta for c in chunks if c.choices]
    thought = "".join(getattr(d, "reasoning_content", None) or "" for d in deltas)
    assert thought == "".join(getattr(d, "reasoning", None) or "" for d in deltas)
    calls = "".join(c.function.arguments for d in deltas for c in d.tool_calls or [])
    return thought, "".join(d.content or "" for d in deltas), calls


def test_whole_and_streamed(client):
    for choice in client.create(model="tiny", messages=[USER], n=2).choices:
        said = choice.message
        assert (said.reasoning_content, said.reasoning, said.content) == (THOUGHT, THOUGHT, ANSWER)
    assert streamed(client.create(model="tiny", messages=[USER], stream=True)) == (THOUGHT, ANSWER, "")


def test_cut_off_within(client, thinker):
    n = len(thinker.model.tokenizer.encode(thinker.begins + THOUGHT).ids) - 2
    (choice,) = client.create(model="tiny", messages=[USER], max_tokens=n).choices
    assert choice.finish_reason == "length" and choice.message.content is None
    assert THOUGHT.startswith(choice.message.reasoning_content)


def test_not_asked_for(client, thinker):
    said = client.create(model="tiny", messages=[USER], extra_body={"include_reasoning": False}).choices[0].message
    assert said.content == ANSWER and not hasattr(said, "reasoning_content")
    thinker.say = ANSWER
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    said = client.create(model="tiny", messages=[USER], extra_body=off).choices[0].message
    assert said.content == ANSWER and not hasattr(said, "reasoning_content")


@pytest.mark.parametrize("stream", [False, True])
def test_with_tools(client, thinker, stream):
    thinker.say = f"{thinker.begins}I could <tool_call> it.</think>\n" + SAID["hermes"]
    made = client.create(model="tiny", messages=[USER], tools=[WEATHER, ADD], stream=stream)
    if stream:
        thought, content, calls = streamed(made)
    else:
        said = made.choices[0].message
        thought, content = said.reasoning_content, said.content or ""
        calls = "".join(c.function.arguments for c in said.tool_calls)
        assert made.choices[0].finish_reason == "tool_calls"
    assert (thought, content) == ("I could <tool_call> it.", "") and "Köln" in calls


def test_a_form_begins_behind_it(client, thinker):
    marks = [thinker.model.tokenizer.token_to_id(mark) for mark in ("<think>", "</think>")]
    client.create(model="tiny", messages=[USER], extra_body={"guided_regex": "[a-z]+"})
    sampling = thinker.engine.submitted[-1].sampling
    assert sampling.grammar == Grammar("regex", "[a-z]+")
    assert sampling.reasoning == Reasoning(*marks, begun=not thinker.begins)
    off = {"chat_template_kwargs": {"enable_thinking": False}, "guided_regex": "[a-z]+"}
    client.create(model="tiny", messages=[USER], extra_body=off)
    assert thinker.engine.submitted[-1].sampling.reasoning is None


def test_it_is_shown_to_templates_that_want_it(client, thinker):
    past = {"role": "assistant", "content": "Two.", "reasoning_content": "zq thought"}
    client.create(model="tiny", messages=[USER, past, USER])
    ids = list(thinker.engine.submitted[-1].prompt_ids)
    shown = "zq thought" in thinker.model.tokenizer.decode(ids, skip_special_tokens=False)
    assert shown == (not thinker.begins)
    bad = thinker.post(messages=[USER, {**past, "reasoning_content": "<image>"}, USER])
    assert bad.status_code == 400 and bad.json()["error"]["code"] == "placeholder_in_text"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/api/chat"])
def test_other_protocols_leave_it_out(thinker, path):
    body = {"messages": [USER], "input": "hi", "max_tokens": 99, "stream": False}
    said = thinker.post(path, **body)
    assert said.status_code == 200 and ANSWER in said.text and "for three" not in json.dumps(said.json())
