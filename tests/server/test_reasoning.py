"""Reasoning through HTTP, for templates as Qwen3's and DeepSeek's: whole, streamed, with tools and with a form."""

import json
import re

import pytest

from hydrainfer.core import Grammar, Reasoning
from hydrainfer.processor import load_description
from hydrainfer.server.protocols.responses_chat import chat_of
from tests.checkpoints import make_llava
from tests.server.conftest import ServerUnderTest
from tests.server.test_tools import ADD, SAID, USER, WEATHER, add_marks
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
TWO = [{"type": "text", "text": "Two."}]
THOUGHT, ANSWER = "The user asks\nfor three.", "It is three."


@pytest.fixture(scope="module", params=TEMPLATES)
def any_server(request, tmp_path_factory):
    path = make_llava(tmp_path_factory.mktemp("llava"), image_size=56, context=2048)
    add_marks(path, ["<think>", "</think>"], special=False)
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
    with thinker.openai() as client:
        yield client.chat.completions


def streamed(chunks):
    deltas = [c.choices[0].delta for c in chunks if c.choices]
    thought = "".join(getattr(d, "reasoning_content", None) or "" for d in deltas)
    assert thought == "".join(getattr(d, "reasoning", None) or "" for d in deltas)
    calls = "".join(c.function.arguments for d in deltas for c in d.tool_calls or [])
    return thought, "".join(d.content or "" for d in deltas), calls


def test_reasoning_is_apart_from_the_answer_whole_and_streamed(client):
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


EFFORTS = {
    "/v1/chat/completions": (lambda e: {"reasoning_effort": e}, ["none", "minimal", "low", "xhigh", "max"]),
    "/v1/responses": (lambda e: {"reasoning": {"effort": e}}, ["none", "minimal", "high"]),
    "/v1/messages": (lambda e: {"output_config": {"effort": e}}, ["low", "max"]),
    "/api/chat": (lambda e: {"think": e}, ["low", "medium", "high", True]),
    "/api/generate": (lambda e: {"think": e, "prompt": "hi"}, ["low", "medium", "high", False]),
}
"""How each path is told an effort, and efforts that it takes."""


@pytest.mark.parametrize("path", EFFORTS)
def test_an_unknown_effort_is_refused_with_the_known_ones(thinker, path):
    told, known = EFFORTS[path]
    for effort in known:
        answer = thinker.post(path, **{**hi(path), **told(effort)})
        assert answer.status_code == 200, answer.text
    for effort in ("hgih", "", 3, ["high"]):
        refused = thinker.post(path, **{**hi(path), **told(effort)})
        assert refused.status_code == 400, refused.text
        assert re.search("effort|think", refused.text) and all(str(word).lower() in refused.text for word in known)


def test_earlier_reasoning_is_shown_to_templates_that_want_it(client, thinker):
    past = {"role": "assistant", "content": "Two.", "reasoning_content": "zq thought"}
    client.create(model="tiny", messages=[USER, past, USER])
    ids = list(thinker.engine.submitted[-1].prompt_ids)
    shown = "zq thought" in thinker.model.tokenizer.decode(ids, skip_special_tokens=False)
    assert shown == (not thinker.begins)
    cut = thinker.post(messages=[USER, {**past, "content": None}, USER])  # as it answers where a limit cut the thought
    assert cut.status_code == 200, cut.text
    bad = thinker.post(messages=[USER, {**past, "reasoning_content": "<image>"}, USER])
    assert bad.status_code == 400 and bad.json()["error"]["code"] == "placeholder_in_text"


HI = {"messages": [USER], "max_tokens": 99, "stream": False}
UNTOLD = {"/v1/messages": {}, "/api/chat": {"think": False}, "/api/generate": {"think": False, "prompt": "hi"}}
TOLD = {
    "/v1/messages": {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    "/api/chat": {},
    "/api/generate": {"prompt": "hi", "think": True},
    "/v1/responses": {"reasoning": {"effort": "low"}},
}


def hi(path):
    """The least that a path takes."""
    return HI if path != "/v1/responses" else {"input": "hi", "max_output_tokens": 99, "stream": False}


@pytest.mark.parametrize("path", UNTOLD)
def test_other_protocols_leave_it_out(thinker, path):
    thinker.say = thinker.say if path == "/v1/messages" else ANSWER  # where it is turned off
    said = thinker.post(path, **hi(path), **UNTOLD[path])
    assert said.status_code == 200 and ANSWER in said.text and "for three" not in json.dumps(said.json())


def told(path, body):
    """(what it thought, what it said) in the words of each protocol."""
    if path == "/v1/messages":
        thought, text = body["content"]
        assert (thought["type"], thought["signature"], text["type"]) == ("thinking", "", "text")
        return thought["thinking"], text["text"]
    if path == "/v1/responses":
        thought, message = body["output"]
        assert (thought["type"], thought["summary"], message["type"]) == ("reasoning", [], "message")
        assert 0 < body["usage"]["output_tokens_details"]["reasoning_tokens"] < body["usage"]["output_tokens"]
        return thought["content"][0]["text"], message["content"][0]["text"]
    said = body.get("message", body)
    return said["thinking"], said.get("content", said.get("response"))


@pytest.mark.parametrize("path", TOLD)
def test_other_protocols_tell_it(thinker, path):
    said = thinker.post(path, **hi(path), **TOLD[path])
    assert said.status_code == 200 and told(path, said.json()) == (THOUGHT, ANSWER)


@pytest.mark.parametrize("path", TOLD)
def test_other_protocols_stream_it(thinker, path):
    lines = thinker.post(path, **{**hi(path), **TOLD[path], "stream": True}).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith(("data: {", "{"))]
    if path == "/v1/messages":
        begun = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
        assert begun == ["thinking", "text"]
        deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
        found = ["".join(d.get(kind, "") for d in deltas) for kind in ("thinking", "text")]
    elif path == "/v1/responses":
        assert told(path, events[-1]["response"]) == (THOUGHT, ANSWER)
        names = ("response.reasoning_text.delta", "response.output_text.delta")
        found = ["".join(e["delta"] for e in events if e["type"] == name) for name in names]
    else:
        said = [e.get("message", e) for e in events]
        found = ["".join(s.get("thinking", "") for s in said)]
        found.append("".join(s.get("content", s.get("response", "")) for s in said))
    assert found == [THOUGHT, ANSWER]


def test_the_openai_client_reads_reasoning_items(thinker):
    with thinker.openai() as client:
        whole = client.responses.create(model="tiny", input="hi", reasoning={"effort": "low"})
        with client.responses.stream(model="tiny", input="hi") as stream:
            streamed = stream.get_final_response()
        for answer in (whole, streamed):
            assert [item.type for item in answer.output] == ["reasoning", "message"]
            assert answer.output[0].content[0].text == THOUGHT and answer.output_text == ANSWER
        again = client.responses.create(model="tiny", input=[*whole.output, {"role": "user", "content": "so?"}])
        assert again.output_text == ANSWER


@pytest.mark.parametrize("path", TOLD)
def test_reasoning_of_earlier_turns_comes_back_to_the_template(thinker, path):
    past = {
        "/v1/messages": {"role": "assistant", "content": [{"type": "thinking", "thinking": "zq thought"}, *TWO]},
        "/api/chat": {"role": "assistant", "content": "Two.", "thinking": "zq thought"},
    }
    body = {"messages": [USER, past.get(path), USER]}
    if path == "/v1/responses":
        thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "zq thought"}]}
        body = {"input": [USER, thought, {"role": "assistant", "content": "Two."}, USER]}
    elif path not in past:
        return
    assert thinker.post(path, **{**hi(path), **body}).status_code == 200
    ids = list(thinker.engine.submitted[-1].prompt_ids)
    shown = "zq thought" in thinker.model.tokenizer.decode(ids, skip_special_tokens=False)
    assert shown == (not thinker.begins)


def test_a_thought_is_of_what_follows_it():
    def thought(text):
        return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}

    said = {"role": "assistant", "content": "Two."}
    call = {"type": "function_call", "call_id": "a", "name": "add", "arguments": "{}"}
    given = [USER, thought("one"), said, thought("two"), said, thought("three"), call, thought("four"), USER, said]
    messages = chat_of({"input": given})["messages"]
    thoughts = [m.get("reasoning_content") for m in messages]
    assert thoughts == [None, "one", "two\nthree", None, None] and len(messages[2]["tool_calls"]) == 1


def test_effort_turns_it_off_and_is_refused_where_nobody_reasons(thinker, server, client):
    thinker.say = ANSWER
    client.create(model="tiny", messages=[USER], reasoning_effort="none")
    prompt = thinker.prompt()
    assert prompt.rstrip().endswith("</think>")
    asked = {**TOLD, "/v1/chat/completions": {"reasoning_effort": "high"}, "/api/chat": {"think": True}}
    for path, more in asked.items():
        refused = server.post(path, **{**hi(path), **more})
        assert refused.status_code == 400 and "does not reason" in refused.text, path
