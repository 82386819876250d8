"""Tools through HTTP: as the official client and LangChain send them, for the templates of all families."""

import json
from functools import partial

import openai
import pydantic
import pytest
from tokenizers import Tokenizer

from hydrainfer.core import Grammar
from hydrainfer.processor import load_description
from tests.checkpoints import make_llava
from tests.server.conftest import ServerUnderTest, image_part
from tests.server.tool_templates import (
    FUNCTION_GEMMA,
    HARMONY,
    HARMONY_MARKS,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_ARGS,
    PYTHONIC,
    QWEN_CODER,
)

pytestmark = pytest.mark.cpu
CALLS = [("get_weather", '{"city": "Köln \\"}"}'), ("add", '{"a": [1, 2]}')]
SAID = {
    "hermes": "\n".join(f'<tool_call>\n{{"name": "{n}", "arguments": {a}}}\n</tool_call>' for n, a in CALLS),
    "llama3_json": "; ".join(f'{{"name": "{n}", "parameters": {a}}}' for n, a in CALLS),
    "mistral": "[TOOL_CALLS] [" + ", ".join(f'{{"name": "{n}", "arguments": {a}}}' for n, a in CALLS) + "]",
    "qwen3_coder": "\n".join(
        f"<tool_call>\n<function={n}>\n<parameter={k}>\n{v}\n</parameter>\n</function>\n</tool_call>"
        for n, k, v in (("get_weather", "city", 'Köln "}'), ("add", "a", "[1, 2]"))
    ),
    "mistral_args": "".join(f"[TOOL_CALLS]{n}[ARGS]{a}" for n, a in CALLS),
    "functiongemma": '<start_function_call>call:get_weather{city:<escape>Köln "}<escape>}<end_function_call>'
    "<start_function_call>call:add{a:[1, 2]}<end_function_call>",
    "harmony": "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{a}<|call|>" for n, a in CALLS
    ),
    "pythonic": "[get_weather(city='Köln \"}'), add(a=[1, 2])]",
}
TEMPLATES = {
    "hermes": HERMES,
    "llama3_json": LLAMA,
    "mistral": MISTRAL,
    "qwen3_coder": QWEN_CODER,
    "mistral_args": MISTRAL_ARGS,
    "functiongemma": FUNCTION_GEMMA,
    "pythonic": PYTHONIC,
    "harmony": HARMONY,
}
JSON = ("hermes", "llama3_json", "mistral", "harmony")
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ADD = {"type": "function", "function": {"name": "add", "strict": True}}
USER = {"role": "user", "content": "How is it in Köln?"}


@pytest.fixture(scope="module", params=TEMPLATES)
def any_server(request, tmp_path_factory):
    path = make_llava(tmp_path_factory.mktemp("llava"), image_size=56, context=2048)
    if request.param == "harmony":
        add_marks(path, HARMONY_MARKS)
    server = ServerUnderTest(load_description(path, chat_template=TEMPLATES[request.param]))
    server.format = request.param
    yield server
    server.close()


def add_marks(path, marks, *, special=True):
    """Give a checkpoint's tokenizer tokens for these."""
    words = Tokenizer.from_file(str(path / "tokenizer.json"))
    (words.add_special_tokens if special else words.add_tokens)(list(marks))
    words.save(str(path / "tokenizer.json"))


@pytest.fixture
def tools_server(any_server):
    any_server.say = SAID[any_server.format]
    any_server.engine.submitted.clear()
    yield any_server
    any_server.check_idle()


@pytest.fixture
def client(tools_server):
    with tools_server.openai() as client:
        yield client.chat.completions


def pairs(calls):
    return [(c.function.name, c.function.arguments) for c in calls]


def test_a_whole_answer_has_its_tool_calls(client, tools_server):
    answer = client.create(model="tiny", messages=[USER], tools=[WEATHER, ADD], n=2)
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        assert pairs(choice.message.tool_calls) == CALLS
        assert {c.type for c in choice.message.tool_calls} == {"function"}
    ids = [c.id for choice in answer.choices for c in choice.message.tool_calls]
    assert len(set(ids)) == 4
    prompt = tools_server.prompt()
    assert "get_weather" in prompt and "The weather in a city." in prompt
    sampling = tools_server.engine.submitted[-1].sampling
    assert sampling.grammar is None and not sampling.skip_special_tokens


@pytest.mark.parametrize("step_s", [0.0, 0.02])
def test_streamed(client, tools_server, step_s, monkeypatch):
    monkeypatch.setattr(tools_server.engine, "step_s", step_s)
    usage = {"include_usage": True}
    chunks = list(client.create(model="tiny", messages=[USER], tools=[WEATHER, ADD], stream=True, stream_options=usage))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens > 20
    calls, reasons = [], []
    for chunk in chunks[:-1]:
        choice = chunk.choices[0]
        reasons.append(choice.finish_reason)
        assert not choice.delta.content
        for call in choice.delta.tool_calls or []:
            if call.index == len(calls):
                assert call.id and call.type == "function"
                calls.append([call.function.name, call.function.arguments])
            else:
                assert call.index == len(calls) - 1 and call.id is None
                calls[-1][1] += call.function.arguments
    assert [tuple(c) for c in calls] == CALLS
    assert reasons == [None] * (len(reasons) - 1) + ["tool_calls"]
    assert step_s == 0.0 or len(chunks) > (8 if tools_server.format in JSON else 3), "arguments of JSON come in pieces"


def test_the_client_s_own_stream_and_parser(client):
    class GetWeather(pydantic.BaseModel):
        city: str

    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    with client.stream(model="tiny", messages=[USER], tools=[tool], parallel_tool_calls=False) as stream:
        message = stream.get_final_completion().choices[0].message
    (call,) = message.tool_calls
    assert call.function.parsed_arguments == GetWeather(city='Köln "}')
    answer = client.parse(model="tiny", messages=[USER], tools=[tool], parallel_tool_calls=False)
    assert answer.choices[0].message.tool_calls[0].function.parsed_arguments == GetWeather(city='Köln "}')


def test_results_of_tools_reach_the_template(client, tools_server):
    """The whole loop: ask, call, answer, as agents send it (LangChain: content "" or null, and a tool's name)."""
    tools = [WEATHER, ADD]
    first = client.create(model="tiny", messages=[USER], tools=tools, parallel_tool_calls=False).choices[0].message
    (call,) = first.tool_calls
    tools_server.say = "It rains in Köln."
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain, 12 °C"}
    said = first.model_dump(exclude_none=True)
    for asked, answered in (
        (said, result),
        ({**said, "content": None}, {**result, "name": "get_weather"}),
        ({**said, "content": ""}, {**result, "content": [{"type": "text", "text": "rain, 12 °C"}]}),
    ):
        answer = client.create(model="tiny", messages=[USER, asked, answered], tools=tools).choices[0]
        assert (answer.message.content, answer.message.tool_calls) == ("It rains in Köln.", None)
        assert answer.finish_reason == "stop"
        prompt = tools_server.prompt()
        assert json.loads(call.function.arguments)["city"].split()[0] in prompt
        assert "rain, 12 °C" in prompt


def test_half_a_character_in_a_call_goes_back(tools_server):
    """A model may write the escape of one half of a surrogate pair. The prompt then has a question mark."""

    def asked(city):
        function = {"name": "get_weather", "arguments": f'{{"city": "{city}"}}'}
        call = {"id": "abcdefghi", "type": "function", "function": function}
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        returned = {"role": "tool", "tool_call_id": "abcdefghi", "content": "rain"}
        body = {"messages": [USER, said, returned], "tools": [WEATHER]}
        assert tools_server.post(**body).status_code == 200
        return tools_server.post("/tokenize", **body).json()["tokens"]

    assert asked("\\ud83d") == asked("?") == list(tools_server.engine.submitted[0].prompt_ids)


@pytest.mark.parametrize("text", ['{"city": "Kö', "[1]", "null", "not JSON"])
def test_arguments_that_are_no_json_object_go_back(tools_server, text):
    """A chat goes on after the model has once written such arguments."""
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "get_weather", "arguments": text}}
    returned = {"role": "tool", "tool_call_id": "abcdefghi", "content": "try again"}
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, returned]
    assert tools_server.post(messages=messages, tools=[WEATHER]).status_code == 200
    assert "INVALID_JSON" in tools_server.prompt()


@pytest.mark.parametrize("depth", [900, 990])
def test_deeply_nested_tools_are_served_or_refused(tools_server, depth):
    """How deep is too deep depends on Python and on the template."""
    deep = "[" * depth + "]" * depth
    tool = {"type": "function", "function": {"name": "f", "parameters": {"default": "DEEP"}}}
    call = {"id": "abcdefghi", "function": {"name": "f", "arguments": f'{{"a": {deep}}}'}}
    said = {"role": "assistant", "tool_calls": [call]}
    for body in ({"messages": [USER], "tools": [tool]}, {"messages": [USER, said]}):
        content = json.dumps(body).replace('"DEEP"', deep).encode()
        assert tools_server.http.post("/v1/chat/completions", content=content).status_code in (200, 400)


def test_choices(client, tools_server):
    def grammar(**fields):
        client.create(model="tiny", messages=[USER], tools=[WEATHER, ADD], **fields)
        return tools_server.engine.submitted[-1].sampling.grammar

    assert grammar(tool_choice="auto") is None
    required = grammar(tool_choice="required")
    assert isinstance(required, Grammar) and "get_weather" in required.text and "add" in required.text
    named = grammar(tool_choice={"type": "function", "function": {"name": "add"}})
    assert "get_weather" not in named.text and "get_weather" in tools_server.prompt()
    answer = client.create(model="tiny", messages=[USER], tools=[WEATHER, ADD], tool_choice="none").choices[0]
    assert answer.message.content == SAID[tools_server.format] and answer.message.tool_calls is None
    assert "get_weather" not in tools_server.prompt()


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("response_format", {"type": "json_object"}),
        ("guided_choice", ["yes", "no"]),
        ("structured_outputs", {"regex": "[0-9]+"}),
    ],
)
def test_a_form_beside_required_calls_is_refused_by_its_own_name(tools_server, name, form):
    said = tools_server.post(messages=[USER], tools=[WEATHER], tool_choice="required", **{name: form})
    error = said.json()["error"]
    assert said.status_code == 400 and error["param"] == name and error["message"].endswith(f"tools or {name} out")


def test_a_text_is_a_text(client, tools_server):
    tools_server.say = "  No tool is needed, <tool \n"
    answer = client.create(model="tiny", messages=[USER], tools=[WEATHER]).choices[0]
    plain = client.create(model="tiny", messages=[USER]).choices[0]
    assert (answer.message.content, answer.finish_reason) == (plain.message.content, "stop")
    chunks = client.create(model="tiny", messages=[USER], tools=[WEATHER], stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == plain.message.content


def test_cut_off(client, tools_server):
    n = len(tools_server.model.tokenizer.encode(tools_server.say).ids) // 3
    choice = client.create(model="tiny", messages=[USER], tools=[WEATHER], max_tokens=n).choices[0]
    assert choice.finish_reason == "length"


@pytest.mark.parametrize(("stop", "reason"), [("Köln", "stop"), ("\n\n", "tool_calls")])
def test_a_stop_string_that_cuts_a_call_is_why_the_answer_ended(client, tools_server, stop, reason):
    """Half a call is none to be run."""
    if stop == "\n\n":
        tools_server.say += stop
    ask = partial(client.create, model="tiny", messages=[USER], tools=[WEATHER, ADD], stop=[stop])
    (whole,) = ask().choices
    last = [chunk.choices[0] for chunk in ask(stream=True)][-1]
    for choice in (whole, last):
        assert (choice.finish_reason, choice.model_extra["stop_reason"]) == (reason, stop)
    body = {"messages": [USER], "max_tokens": 200, "stop_sequences": [stop]}
    tools = [{"name": tool["function"]["name"], "input_schema": {"type": "object"}} for tool in (WEATHER, ADD)]
    answer = tools_server.post("/v1/messages", **body, tools=tools).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == {
        "stop": ("stop_sequence", stop),
        "tool_calls": ("tool_use", None),
    }[reason]


def test_tokens_and_their_probabilities(client, tools_server):
    options = {"logprobs": True, "extra_body": {"return_token_ids": True}}
    whole = client.create(model="tiny", messages=[USER], tools=[WEATHER], **options).choices[0]
    chunks = list(client.create(model="tiny", messages=[USER], tools=[WEATHER], stream=True, **options))
    assert [i for c in chunks for i in getattr(c.choices[0], "token_ids", [])] == whole.token_ids


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "x"}, "messages.1.tool_call_id"),
        ({"role": "tool", "tool_call_id": "a"}, "messages.1.content"),
        ({"role": "user", "content": "x", "tool_calls": [{}]}, "messages.1.tool_calls"),
        ({"role": "assistant", "tool_calls": "x"}, "messages.1.tool_calls"),
        ({"role": "assistant", "tool_calls": [{"id": "a"}]}, "messages.1.tool_calls.0.function.name"),
        (
            {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": ["x"]}}]},
            "messages.1.tool_calls.0.function.arguments",
        ),
        ({"role": "user", "content": None}, "messages.1.content"),
        ({"role": "assistant", "content": 5}, "messages.1.content"),
        ({"role": "function", "name": "f", "content": "x"}, "messages.1.role"),
    ],
)
def test_wrong_messages(tools_server, message, param):
    response = tools_server.post(messages=[USER, message], tools=[WEATHER])
    assert response.status_code == 400 and response.json()["error"]["param"] == param


def test_a_model_without_tools_says_so(server):
    call = {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]}
    for fields in ({"messages": [USER], "tools": [WEATHER]}, {"messages": [USER, call]}):
        said = server.post(**fields)
        assert said.status_code == 400 and said.json()["error"]["code"] == "unsupported_parameter"
        assert "chat template has no tools" in said.json()["error"]["message"]
    said = server.post("/v1/completions", prompt="x", tools=[WEATHER])
    assert said.status_code == 400 and said.json()["error"]["param"] == "tools"


def test_a_template_of_its_own_for_tools(tmp_path):
    """Hermes publishes two: `default` has no tools, `tool_use` has."""
    path = make_llava(tmp_path, image_size=56, context=2048)
    (path / "chat_template.json").unlink()  # which would come first
    (path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tool_use.jinja").write_text(HERMES)
    server = ServerUnderTest(load_description(path))
    server.say = SAID["hermes"]
    choice = server.post(messages=[USER], tools=[WEATHER, ADD]).json()["choices"][0]
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in choice["message"]["tool_calls"]] == CALLS
    assert "<tools>" in server.prompt() and "get_weather" in server.prompt()
    result = {"role": "tool", "tool_call_id": choice["message"]["tool_calls"][0]["id"], "content": "rain"}
    assert server.post(messages=[USER, choice["message"], result]).status_code == 200
    assert "<tool_response>\nrain" in server.prompt()
    assert server.post(messages=[USER]).json()["choices"][0]["message"]["content"] == SAID["hermes"]
    assert "user: How is it" in server.prompt()
    server.close()


def test_pictures_cannot_be_named_in_tools(tools_server):
    bad = {"type": "function", "function": {"name": "f", "description": "see <image>"}}
    said = tools_server.post(messages=[{"role": "user", "content": [image_part()]}], tools=[bad])
    assert said.status_code == 400 and said.json()["error"]["code"] == "placeholder_in_text"


def test_tokenize_counts_tools(tools_server):
    counts = [tools_server.post("/tokenize", messages=[USER], tools=t).json()["count"] for t in (None, [WEATHER])]
    assert counts[1] > counts[0] + 20
