"""/v1/responses with the official client."""

import json

import openai
import pydantic
import pytest

from hydrainfer.core import ErrorInfo, InvalidRequest, Output, Unavailable
from hydrainfer.processor import load_description
from hydrainfer.server import Tenants
from hydrainfer.server.protocols.places import name_fields, placed
from hydrainfer.server.protocols.responses_chat import chat_of
from tests.checkpoints import make_llava
from tests.server.conftest import ServerUnderTest, data_url, picture
from tests.server.test_tools import SAID as CALLED
from tests.server.tool_templates import HERMES

pytestmark = pytest.mark.cpu
SAID = "Hello from the engine, 你好 😀."
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ADD = {"type": "function", "name": "add"}


@pytest.fixture(scope="module")
def hermes_server(tmp_path_factory):
    path = make_llava(tmp_path_factory.mktemp("llava"), image_size=56, context=2048)
    server = ServerUnderTest(load_description(path, chat_template=HERMES))
    yield server
    server.close()


@pytest.fixture
def tools_server(hermes_server):
    hermes_server.say = CALLED["hermes"]
    hermes_server.engine.submitted.clear()
    yield hermes_server
    hermes_server.check_idle()


def responses(server):
    return server.openai().responses


def ask():
    image = {"type": "input_image", "image_url": data_url(picture()), "detail": "auto"}
    return [{"role": "user", "content": [{"type": "input_text", "text": "what is this?"}, image]}]


def test_a_whole_response_has_the_shape_of_openais(server):
    answer = responses(server).create(model="tiny", input=ask(), instructions="be brief", metadata={"a": "b"})
    assert answer.output_text == SAID and answer.status == "completed" and answer.error is None
    (item,) = answer.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    request = server.engine.submitted[-1]
    assert openai.types.responses.ResponseUsage.model_validate(answer.usage.model_dump()) == answer.usage
    assert answer.usage.input_tokens == len(request.prompt_ids) and len(request.media) == 1
    assert answer.usage.output_tokens == len(server.model.tokenizer.encode(SAID).ids) + 1
    assert (answer.instructions, answer.metadata, answer.model) == ("be brief", {"a": "b"}, "tiny")
    assert "be brief" in server.prompt()


def test_a_response_becomes_the_request_of_the_chat_that_it_means(server):
    """The same request under both paths is the same prompt and sampling."""
    responses(server).create(model="tiny", input="hi", max_output_tokens=7, temperature=0.5, top_p=0.9)
    server.chat("hi", max_completion_tokens=7, temperature=0.5, top_p=0.9)
    ours, theirs = server.engine.submitted
    assert (ours.prompt_ids, ours.sampling, ours.max_tokens) == (theirs.prompt_ids, theirs.sampling, theirs.max_tokens)


@pytest.mark.parametrize("step_s", [0.0, 0.003])
def test_streamed(server, step_s, monkeypatch):
    monkeypatch.setattr(server.engine, "step_s", step_s)
    events = list(responses(server).create(model="tiny", input=ask(), stream=True))
    kinds = [e.type for e in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == SAID
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert events[-1].response.output_text == SAID == events[-4].text
    assert len({e.item_id for e in events if hasattr(e, "item_id")} | {events[2].item.id}) == 1


def test_the_client_s_own_stream_and_parser(server):
    with responses(server).stream(model="tiny", input="hi") as stream:
        assert stream.get_final_response().output_text == SAID

    class Sum(pydantic.BaseModel):
        sum: int

    server.say = '{"sum": 7}'
    answer = responses(server).parse(model="tiny", input="3 + 4?", text_format=Sum)
    assert answer.output_parsed == Sum(sum=7)
    assert "sum" in server.engine.submitted[-1].sampling.grammar.text


def test_cut_off(server):
    answer = responses(server).create(model="tiny", input="hi", max_output_tokens=3)
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    (item,) = answer.output
    assert item.status == "incomplete" and SAID.startswith(answer.output_text) and answer.output_text
    events = list(responses(server).create(model="tiny", input="hi", max_output_tokens=3, stream=True))
    assert events[-1].type == "response.incomplete"
    assert events[-2].item.status == events[-1].response.output[0].status == "incomplete"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("cut", ["max_output_tokens", "stop"])
def test_only_the_call_that_was_cut_is_incomplete(tools_server, cut, stream):
    n = len(tools_server.model.tokenizer.encode(tools_server.say.partition("[1, 2]")[0]).ids)
    ask = {"max_output_tokens": n} if cut == "max_output_tokens" else {"extra_body": {"stop": ["[1, 2]"]}}
    made = responses(tools_server).create(model="tiny", input="?", tools=[WEATHER, ADD], stream=stream, **ask)
    if stream:
        events = list(made)
        made = events[-1].response
        assert [e.item for e in events if e.type == "response.output_item.done"] == made.output
    whole, half = made.output
    assert made.status == ("incomplete" if cut == "max_output_tokens" else "completed")
    assert (whole.status, json.loads(whole.arguments)) == ("completed", {"city": 'Köln "}'})
    assert half.status == "incomplete" and half.arguments.startswith('{"a"') and "2" not in half.arguments


def test_a_call_that_was_whole_at_the_last_token_is_completed(tools_server):
    n = len(tools_server.model.tokenizer.encode(tools_server.say.rpartition("\n</tool_call>")[0]).ids)
    answer = responses(tools_server).create(model="tiny", input="?", tools=[WEATHER, ADD], max_output_tokens=n)
    assert answer.status == "incomplete" and [item.status for item in answer.output] == ["completed"] * 2


@pytest.mark.parametrize("stream", [False, True])
def test_tools(tools_server, stream):
    made = responses(tools_server).create(model="tiny", input="Köln?", tools=[WEATHER, ADD], stream=stream)
    if stream:
        events = list(made)
        done = [e for e in events if e.type == "response.function_call_arguments.done"]
        pieces = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
        assert "".join(e.arguments for e in done) == "".join(pieces)
        made = events[-1].response
    calls = made.output
    assert [c.type for c in calls] == ["function_call"] * 2 and [c.name for c in calls] == ["get_weather", "add"]
    assert json.loads(calls[0].arguments) == {"city": 'Köln "}'} and calls[0].call_id != calls[1].call_id
    assert "get_weather" in tools_server.prompt()


def test_results_of_functions_reach_the_template(tools_server):
    first = responses(tools_server).create(model="tiny", input="Köln?", tools=[WEATHER, ADD])
    tools_server.say = "It rains."
    outputs = [{"type": "function_call_output", "call_id": c.call_id, "output": f"rain {c.name}"} for c in first.output]
    given = [{"role": "user", "content": "Köln?"}, *first.output, *outputs]
    answer = responses(tools_server).create(model="tiny", input=given, tools=[WEATHER, ADD], tool_choice="auto")
    assert answer.output_text == "It rains."
    prompt = tools_server.prompt()
    assert prompt.index('"get_weather", "arguments"') < prompt.index("rain get_weather") < prompt.index("rain add")


def test_half_a_character_in_a_call_goes_back(tools_server):
    call = {"type": "function_call", "call_id": "a", "name": "add", "arguments": '{"a": "\\ud83d"}'}
    given = [{"role": "user", "content": "?"}, call, {"type": "function_call_output", "call_id": "a", "output": "1"}]
    assert tools_server.post("/v1/responses", input=given).status_code == 200
    assert '{"a": "?"}' in tools_server.prompt()


def test_arguments_that_are_no_json_object_go_back(tools_server):
    call = {"type": "function_call", "call_id": "a", "name": "add", "arguments": '{"a": [1,'}
    given = [{"role": "user", "content": "?"}, call, {"type": "function_call_output", "call_id": "a", "output": "1"}]
    assert tools_server.post("/v1/responses", input=given).status_code == 200
    assert '{"INVALID_JSON": "{\\"a\\": [1,"}' in tools_server.prompt()


@pytest.mark.parametrize("then", ["Then.", [{"type": "output_text", "text": "Then."}]])
def test_a_text_behind_a_call_goes_back_with_it(then):
    """Templates refuse a tool's message that follows another message than that of its call."""
    calls = [{"type": "function_call", "call_id": c, "name": "add"} for c in "ab"]
    outputs = [{"type": "function_call_output", "call_id": c, "output": "1"} for c in "ab"]
    so, then = ({"role": "assistant", "content": text} for text in ("So.", then))
    given = [{"role": "user", "content": "?"}, so, calls[0], then, calls[1], *outputs, so, then]
    turns = chat_of({"input": given})["messages"]
    assert [turn["role"] for turn in turns] == ["user", "assistant", "tool", "tool", "assistant", "assistant"]
    assert [part["text"] for part in turns[1]["content"]] == ["So.", "Then."]
    assert [call["id"] for call in turns[1]["tool_calls"]] == ["a", "b"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input.0.content.0.type"),
        ({"input": 3}, "input"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"temperature": 3}, "temperature"),
    ],
)
def test_unsupported_fields_of_responses_are_named(server, fields, param):
    said = server.post("/v1/responses", **{"input": "hi", **fields})
    assert said.status_code == 400 and said.json()["error"]["param"] == param


def test_an_error_after_the_first_token(server):
    server.engine.step_s = 0.01
    error = ErrorInfo.of(Unavailable("no instance can decode now; retry later", retry_after_s=5.0))
    stream = responses(server).create(model="tiny", input="hi", stream=True)
    with pytest.raises(openai.APIError, match="no instance can decode"):
        for event in stream:
            if event.type == "response.output_text.delta":
                server.sessions.sink([Output(server.engine.submitted[0].id, finish_reason="error", error=error)])
    server.engine.step_s = 0.0
    server.engine.cancel([server.engine.submitted[0].id])


@pytest.mark.usefixtures("early_headers")
def test_the_gate_is_the_same(start):
    server = start(tenants=Tenants(["k"]), max_requests=1)
    assert server.post("/v1/responses", input="hi").status_code == 401
    headers = {"Authorization": "bearer k"}
    server.engine.hold.set()
    with server.http.stream("POST", "/v1/responses", json={"input": "hi", "stream": True}, headers=headers) as first:
        assert server.http.post("/v1/responses", json={"input": "hi"}, headers=headers).status_code == 429
        server.engine.hold.clear()
        first.read()
    server.check_idle()


@pytest.mark.parametrize("instructions", [None, "be brief"])
@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"role": "function", "content": "x"}, "input.4.role"),
        ({"role": "user", "content": []}, "input.4.content"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "ftp:x"}]}, "input.4.content.0.image_url"),
        ({"type": "function_call_output", "output": "x"}, "input.4.call_id"),
    ],
)
def test_errors_name_the_client_s_own_place(server, instructions, item, param):
    call = {"type": "function_call", "call_id": "a", "name": "add"}
    given = [{"role": "user", "content": "?"}, {"type": "reasoning", "content": []}, call]
    output = {"type": "function_call_output", "call_id": "a", "output": "1"}
    said = server.post("/v1/responses", input=[*given, output, item], instructions=instructions)
    error = said.json()["error"]
    assert said.status_code == 400 and error["param"] == param and "messages" not in error["message"]


@pytest.mark.parametrize("text", ["messages.99", "messages." + "9" * 5000])
def test_a_role_that_looks_like_a_field_path_is_named_with_its_own_path(text, server):
    said = server.post("/v1/responses", input=[{"role": text, "content": "?"}])
    assert said.status_code == 400 and said.json()["error"]["param"] == "input.0.role"


def test_names_of_places_are_only_those_that_there_are():
    error = InvalidRequest("messages.0.role is 'messages.7', messages." + "9" * 5000, param="messages.0.role")
    name_fields(error, {}, [placed({}, "input.3")])
    assert error.message.startswith("input.3.role is 'messages.7', messages.999") and error.param == "input.3.role"
