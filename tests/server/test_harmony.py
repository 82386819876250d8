"""gpt-oss's channels through HTTP: reasoning, answer and calls, whole and streamed, in every protocol."""

import json

import llguidance
import pytest

from hydrainfer.core import Grammar
from hydrainfer.processor import load_description
from hydrainfer.processor.text.lark import rules_of
from tests.checkpoints import make_llava
from tests.server.conftest import ServerUnderTest
from tests.server.test_reasoning import streamed
from tests.server.test_tools import USER, WEATHER, add_marks, pairs
from tests.server.tool_templates import HARMONY, HARMONY_MARKS

pytestmark = pytest.mark.cpu
THOUGHT, ANSWER, ARGUMENTS = "They ask\nfor a number.", "It is 3.", '{"city": "Köln"}'
THINKS = f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant"
SAYS = THINKS + f"<|channel|>final<|message|>{ANSWER}"
CALLS = THINKS + f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"


@pytest.fixture(scope="module")
def any_server(tmp_path_factory):
    path = make_llava(tmp_path_factory.mktemp("llava"), image_size=56, context=2048)
    add_marks(path, HARMONY_MARKS)
    server = ServerUnderTest(load_description(path, chat_template=HARMONY))
    yield server
    server.close()


@pytest.fixture
def harmony(any_server):
    any_server.say = SAYS
    any_server.engine.submitted.clear()
    yield any_server
    any_server.check_idle()


@pytest.fixture
def client(harmony):
    with harmony.openai() as client:
        yield client


def test_a_chat(client, harmony):
    ask = {"model": "tiny", "messages": [USER]}
    said = client.chat.completions.create(**ask, reasoning_effort="high").choices[0].message
    assert (said.reasoning_content, said.content, said.tool_calls) == (THOUGHT, ANSWER, None)
    assert "Reasoning: high" in harmony.prompt()
    own = {"chat_template_kwargs": {"reasoning_effort": "a word of the template's own"}}
    assert client.chat.completions.create(**ask, extra_body=own).choices[0].message.content == ANSWER
    assert "Reasoning: a word of the template's own" in harmony.prompt()
    assert streamed(client.chat.completions.create(**ask, stream=True)) == (THOUGHT, ANSWER, "")


def test_a_call(client, harmony):
    harmony.say = CALLS
    ask = {"model": "tiny", "messages": [USER], "tools": [WEATHER]}
    choice = client.chat.completions.create(**ask).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.reasoning_content == THOUGHT
    assert (choice.message.content, pairs(choice.message.tool_calls)) == (None, [("get_weather", ARGUMENTS)])
    assert streamed(client.chat.completions.create(**ask, stream=True)) == (THOUGHT, "", ARGUMENTS)
    harmony.say = SAYS
    result = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "rain"}
    past = [USER, choice.message.model_dump(exclude_none=True), result]
    answer = client.chat.completions.create(model="tiny", messages=past, tools=[WEATHER])
    assert answer.choices[0].message.content == ANSWER
    prompt = harmony.prompt()
    assert f"analysis<|message|>{THOUGHT}<|end|>" in prompt and "to=functions.get_weather" in prompt
    spoken = {**past[1], "content": "I look."}
    answer = client.chat.completions.create(model="tiny", messages=[USER, spoken, result], tools=[WEATHER])
    assert answer.choices[0].message.content == ANSWER, "beside calls the template takes one of the two"


def test_a_form_is_of_the_whole_answer(client, harmony):
    client.chat.completions.create(model="tiny", messages=[USER], extra_body={"guided_regex": "[a-z]+"})
    sampling = harmony.engine.submitted[-1].sampling
    assert sampling.reasoning is None and "<|channel|>" in sampling.grammar.text and "[a-z]+" in sampling.grammar.text
    assert not sampling.skip_special_tokens
    bad = harmony.chat(guided_grammar='root ::= "x"')
    assert bad.status_code == 400 and "Lark" in bad.text


def test_other_protocols(client, harmony):
    answer = client.responses.create(model="tiny", input="hi")
    assert [item.type for item in answer.output] == ["reasoning", "message"] and answer.output_text == ANSWER
    assert 5 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens
    said = harmony.post("/api/chat", messages=[USER], stream=False, think="low").json()["message"]
    assert (said["thinking"], said["content"]) == (THOUGHT, ANSWER)
    harmony.say = CALLS
    tool = {"name": "get_weather", "input_schema": WEATHER["function"]["parameters"], "description": ""}
    body = {"messages": [USER], "max_tokens": 99, "tools": [tool], "thinking": {"type": "adaptive"}}
    said = harmony.post("/v1/messages", **body).json()
    thought, call = said["content"]
    assert (thought["thinking"], call["input"], said["stop_reason"]) == (THOUGHT, json.loads(ARGUMENTS), "tool_use")


@pytest.mark.parametrize(
    ("pattern", "said"), [(r"\\/x", "\\/x"), (r"a\/b/c", "a/b/c"), ("a\nb\\\nc", "a\nb\nc"), (r"\d", "7")]
)
def test_a_regular_expression_means_the_same_in_lark(pattern, said):
    words = llguidance.LLTokenizer("byte")
    text = "\n".join(["start: form", *rules_of("form", Grammar("regex", pattern))])
    matcher = llguidance.LLMatcher(words, llguidance.LLMatcher.grammar_from_lark(text))
    assert matcher.consume_tokens(words.tokenize_str(said)) and matcher.is_accepting(), matcher.get_error()
