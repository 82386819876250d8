"""/v1/messages: as it is on the wire, and with the `anthropic` client where that is installed."""

import base64
import json
from types import SimpleNamespace

import pytest

from hydrainfer.core import ErrorInfo, Output, Unavailable
from hydrainfer.processor import FORMATS, Tools
from hydrainfer.server import Tenants
from hydrainfer.server.live.stream import Delta
from hydrainfer.server.protocols.messages_turn import MessageTurn
from hydrainfer.server.protocols.ollama_turn import ChatTurn
from hydrainfer.server.protocols.responses_turn import ResponseTurn
from tests.server.conftest import picture
from tests.server.test_responses import SAID, hermes_server, tools_server  # noqa: F401
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.cpu
WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ADD = {"name": "add", "input_schema": {"type": "object"}}
HI = {"model": "tiny", "max_tokens": 200, "messages": [{"role": "user", "content": "hi"}]}


def image():
    return {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(picture()).decode()},
    }


def ask(**fields):
    content = [image(), {"type": "text", "text": "what is this?"}]
    return {**HI, "messages": [{"role": "user", "content": content}], **fields}


@pytest.fixture
def client(server):
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client.messages


def events_of(response):
    lines = [block.split("\n") for block in response.text.strip().split("\n\n")]
    found = [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in lines]
    assert all(name == event["type"] for name, event in found)
    return [event for _, event in found]


def test_a_whole_message_has_the_shape_of_anthropics(server):
    answer = server.post("/v1/messages", **ask(system="be brief")).json()
    request = server.engine.submitted[-1]
    assert answer["content"] == [{"type": "text", "text": SAID}] and answer["type"] == "message"
    assert (answer["stop_reason"], answer["stop_sequence"], answer["role"]) == ("end_turn", None, "assistant")
    assert answer["usage"]["input_tokens"] == len(request.prompt_ids) and len(request.media) == 1
    assert answer["usage"]["output_tokens"] == len(server.model.tokenizer.encode(SAID).ids) + 1
    assert "be brief" in server.prompt()
    assert server.post("/v1/messages/count_tokens", **ask(system="be brief")).json() == {
        "input_tokens": len(request.prompt_ids)
    }


def test_a_message_becomes_the_request_of_the_chat_that_it_means(server):
    server.post("/v1/messages", **HI, temperature=0.5, top_p=0.9, top_k=5, stop_sequences=["zz"])
    server.chat("hi", max_tokens=200, temperature=0.5, top_p=0.9, top_k=5, stop=["zz"])
    ours, theirs = server.engine.submitted
    assert (ours.prompt_ids, ours.sampling, ours.max_tokens) == (theirs.prompt_ids, theirs.sampling, theirs.max_tokens)


def test_streamed(server):
    events = events_of(server.post("/v1/messages", **ask(stream=True)))
    kinds = [e["type"] for e in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "".join(e["delta"]["text"] for e in events if e["type"] == "content_block_delta") == SAID
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] > 1


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"max_tokens": 3}, ("max_tokens", None)),
        ({"stop_sequences": ["engine,"]}, ("stop_sequence", "engine,")),
    ],
)
def test_ends(server, fields, reason):
    answer = server.post("/v1/messages", **{**HI, **fields}).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == reason


@pytest.mark.parametrize("stream", [False, True])
def test_tools(tools_server, stream):  # noqa: F811
    response = tools_server.post("/v1/messages", **HI, tools=[WEATHER, ADD], stream=stream)
    if stream:
        blocks, inputs = [], []
        for event in events_of(response):
            if event["type"] == "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append(event["content_block"])
                inputs.append("")
            elif event["type"] == "content_block_delta":
                inputs[event["index"]] += event["delta"]["partial_json"]
            elif event["type"] == "message_delta":
                assert event["delta"]["stop_reason"] == "tool_use"
        content = [{**block, "input": json.loads(text)} for block, text in zip(blocks, inputs, strict=True)]
    else:
        assert response.json()["stop_reason"] == "tool_use"
        content = response.json()["content"]
    assert [(b["type"], b["name"], b["input"]) for b in content] == [
        ("tool_use", "get_weather", {"city": 'Köln "}'}),
        ("tool_use", "add", {"a": [1, 2]}),
    ]
    result = {"type": "tool_result", "tool_use_id": content[0]["id"]}
    tools_server.say = "It rains."
    for said in ("rain", [{"type": "text", "text": "rain"}, image()]):
        returned = [{**result, "content": said}, {"type": "tool_result", "tool_use_id": content[1]["id"]}]
        turns = [*HI["messages"], {"role": "assistant", "content": content}, {"role": "user", "content": returned}]
        made = tools_server.post("/v1/messages", **{**HI, "messages": turns}, tools=[WEATHER, ADD])
        assert made.json()["content"][0]["text"] == "It rains.", made.text
        assert "get_weather" in tools_server.prompt() and "rain" in tools_server.prompt()
        assert len(tools_server.engine.submitted[-1].media) == (said != "rain")


@pytest.mark.parametrize("made", [MessageTurn, ResponseTurn, ChatTurn])
@pytest.mark.parametrize(
    "pieces",
    [
        ('So <tool_call>{"name": "add", "arguments": {"a": ', "[1]}}</tool_call> Then", " on."),
        ('So <tool_call>{"name": "add", "arguments": {"a": [1]}}</tool_call> Then on.',),
    ],
)
def test_a_piece_that_ends_a_call_and_goes_on(made, pieces):
    """As when the client is slow: several tokens are one piece. Texts and calls keep their order."""
    prepared = SimpleNamespace(id="a-1", thinking=None, sampling=SimpleNamespace(logprobs=None, grammar=None))
    stream = SimpleNamespace(prepared=prepared, n_cached=[0], prompt_logprobs=[])
    options = {"asked": {}, "tools": Tools((), {"add": {}}, False, True), "how": FORMATS["hermes"]}
    turn = made(stream, SimpleNamespace(timings=False, progress=False, include_usage=True), "tiny", 0, None, **options)
    sent = b""
    for text in pieces:
        sent += turn.events([Delta(0, text)], [9])
    said = [(part.kind, part.text) for part in turn.parts]
    assert said == [("text", "So"), ("call", '{"a": [1]}'), ("text", " Then on.")]
    assert sent.index(b"So") < sent.index(b"[1]}") < sent.index(b"Then")
    if made is MessageTurn:
        assert sent.index(b"[1]}") < sent.rindex(b"content_block_stop") < sent.index(b"Then")


@pytest.mark.parametrize(
    ("choice", "says"), [({"type": "any"}, "add"), ({"type": "tool", "name": "get_weather"}, "get_weather")]
)
def test_tool_choice(tools_server, choice, says):  # noqa: F811
    tools_server.post("/v1/messages", **HI, tools=[WEATHER, ADD], tool_choice=choice)
    assert says in tools_server.engine.submitted[-1].sampling.grammar.text


@pytest.mark.parametrize(
    ("fields", "status", "kind"),
    [
        ({"model": "claude"}, 404, "not_found_error"),
        ({"max_tokens": None}, 400, "invalid_request_error"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, 400, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, 400, "invalid_request_error"),
        ({"messages": [*HI["messages"], {"role": "assistant", "content": "It is"}]}, 400, "invalid_request_error"),
        ({"messages": []}, 400, "invalid_request_error"),
        ({"messages": [3]}, 400, "invalid_request_error"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, 400, "invalid_request_error"),
        ({"tool_choice": {"type": "some"}}, 400, "invalid_request_error"),
        ({"temperature": 9}, 400, "invalid_request_error"),
    ],
)
def test_errors_have_their_shape(server, fields, status, kind):
    response = server.post("/v1/messages", **{**HI, **fields})
    assert response.status_code == status, response.text
    assert response.json()["type"] == "error" and response.json()["error"]["type"] == kind
    assert response.json()["error"]["message"]


@pytest.mark.usefixtures("early_headers")
def test_the_gate_is_the_same(start):
    server = start(tenants=Tenants(["k"]), max_requests=1)
    refused = server.post("/v1/messages", **HI)
    assert refused.status_code == 401 and refused.json()["error"]["type"] == "authentication_error"
    headers = {"x-api-key": "k"}
    assert server.http.post("/v1/messages/count_tokens", json=HI, headers=headers).json()["input_tokens"] > 0
    server.engine.hold.set()
    with server.http.stream("POST", "/v1/messages", json={**HI, "stream": True}, headers=headers) as first:
        refused = server.http.post("/v1/messages", json=HI, headers=headers)
        assert refused.status_code == 429 and refused.json()["error"]["type"] == "rate_limit_error"
        assert int(refused.headers["retry-after"]) >= 1
        server.engine.hold.clear()
        first.read()
    server.check_idle()


def test_an_error_after_the_first_token_is_an_event(server):
    server.engine.step_s = 0.01
    error = ErrorInfo.of(Unavailable("no instance can decode now", retry_after_s=5.0))
    events = []
    with server.http.stream("POST", "/v1/messages", json={**HI, "stream": True}) as answer:
        for line in answer.iter_lines():
            events += [json.loads(line[6:])] if line.startswith("data: ") else []
            if events and events[-1]["type"] == "content_block_delta":
                server.sessions.sink([Output(server.engine.submitted[0].id, finish_reason="error", error=error)])
    server.engine.step_s = 0.0
    server.engine.cancel([server.engine.submitted[0].id])
    assert events[-1] == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "no instance can decode now"},
    }


def test_the_client(client):
    answer = client.create(**ask())
    assert answer.content[0].text == SAID and answer.usage.cache_read_input_tokens == 0
    with client.stream(**ask()) as stream:
        assert "".join(stream.text_stream) == SAID
        assert stream.get_final_message().stop_reason == "end_turn"
    assert client.count_tokens(model="tiny", messages=HI["messages"]).input_tokens > 0


def test_the_client_s_errors(client):
    anthropic = pytest.importorskip("anthropic")
    with pytest.raises(anthropic.NotFoundError, match="does not exist") as e:
        client.create(**{**HI, "model": "claude"})
    assert e.value.request_id == e.value.response.headers["x-request-id"]


def test_the_client_knows_the_request_s_id(client):
    message = client.create(**HI)
    assert message._request_id == message.id
    mine = {"X-Request-Id": "trace-17"}
    assert client.create(**HI, extra_headers=mine)._request_id == "trace-17"
    counted = client.count_tokens(model="tiny", messages=HI["messages"], extra_headers=mine)
    assert counted._request_id == "trace-17"


def test_the_client_s_list_of_models(server):
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        models = list(client.models.list())
        assert [m.display_name for m in models] == [m.id for m in models] == ["tiny", "alias"]
        one = client.models.retrieve("alias")
    assert one == models[1] and (one.type, one.lifecycle, one.max_input_tokens) == ("model", "active", 512)
    assert one.created_at.timestamp() == one.created


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize("system", [None, "be brief"])
def test_errors_name_the_client_s_own_place(server, path, system):
    results = [{"type": "tool_result", "tool_use_id": "a", "content": "1"}, {"type": "text", "text": "so?"}]
    wrong = [{"role": "user", "content": results}, {"role": "function", "content": "x"}]
    said = server.post(path, max_tokens=4, messages=wrong, system=system)
    assert said.status_code == 400 and said.json()["error"]["message"].startswith("messages.1.role must be one of")
