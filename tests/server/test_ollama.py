"""Ollama's paths: as they are on the wire, and with the `ollama` client where that is installed."""

import base64
import json

import pytest

from hydrainfer.server import Tenants
from hydrainfer.server.protocols.ollama_chat import chat_of
from tests.server.conftest import picture
from tests.server.test_responses import SAID, hermes_server, tools_server  # noqa: F401
from tests.server.test_tools import WEATHER

pytestmark = pytest.mark.cpu
HI = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
ADD = {"type": "function", "function": {"name": "add"}}


def lines(response):
    return [json.loads(line) for line in response.text.splitlines()]


def test_chat(server):
    image = base64.b64encode(picture()).decode()
    ask = {"model": "tiny:latest", "messages": [{"role": "user", "content": "what?", "images": [image]}]}
    response = server.post("/api/chat", **ask)
    assert response.headers["content-type"].startswith("application/x-ndjson")
    streamed = lines(response)
    assert "".join(line["message"]["content"] for line in streamed) == SAID
    assert [line["done"] for line in streamed] == [False] * (len(streamed) - 1) + [True]
    whole = server.post("/api/chat", **ask, stream=False).json()
    assert whole["message"] == {"role": "assistant", "content": SAID} and whole["done_reason"] == "stop"
    request = server.engine.submitted[-1]
    assert whole["prompt_eval_count"] == len(request.prompt_ids) and len(request.media) == 1
    assert whole["total_duration"] == whole["prompt_eval_duration"] + whole["eval_duration"] > 0
    assert whole["eval_count"] == streamed[-1]["eval_count"] == len(server.model.tokenizer.encode(SAID).ids) + 1


def test_options_are_the_chat_s(server):
    options = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "num_predict": 7, "stop": ["zz"], "repeat_penalty": 1.1}
    server.post("/api/chat", **HI, options={**options, "num_ctx": 4096, "seed": 3})
    fields = {"max_tokens": 7, "repetition_penalty": 1.1, "seed": 3}
    server.chat("hi", temperature=0.5, top_p=0.9, top_k=5, stop=["zz"], **fields)
    ours, theirs = server.engine.submitted
    assert (ours.prompt_ids, ours.sampling, ours.max_tokens) == (theirs.prompt_ids, theirs.sampling, theirs.max_tokens)
    for unlimited in (-2, -1, 0):
        server.post("/api/chat", **HI, options={"num_predict": unlimited})
        assert server.engine.submitted[-1].sampling.max_tokens is None


def test_generate(server):
    streamed = lines(server.post("/api/generate", model="tiny", prompt="hi", system="be brief"))
    assert "".join(line["response"] for line in streamed) == SAID and "be brief" in server.prompt()
    raw = server.post("/api/generate", model="tiny", prompt="hi", raw=True, stream=False).json()
    assert raw["response"].strip() == SAID and raw["done"]
    assert list(server.engine.submitted[-1].prompt_ids) == server.model.tokenizer.encode("hi").ids
    assert server.post("/api/generate", model="tiny").json()["done_reason"] == "load"
    cut = server.post("/api/generate", model="tiny", prompt="hi", stream=False, options={"num_predict": 2}).json()
    assert cut["done_reason"] == "length" and cut["eval_count"] == 2


@pytest.mark.parametrize("format", ["json", {"type": "object", "properties": {"a": {"type": "integer"}}}])
def test_format(server, format):
    server.post("/api/chat", **HI, format=format)
    assert server.engine.submitted[-1].sampling.grammar.kind == "json"


ASKED = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}


def test_ids_of_calls_fit_every_template():
    """Mistral's templates demand nine letters or digits."""
    turns = [ASKED | {"tool_calls": ASKED["tool_calls"] * 2}, *[{"role": "tool", "content": "1"}] * 3]
    asked, *returned = chat_of({"messages": turns})["messages"]
    ids = [call["id"] for call in asked["tool_calls"]]
    assert all(len(id) == 9 and id.isalnum() for id in ids) and len(set(ids)) == 2
    assert [message["tool_call_id"] for message in returned] == [*ids, ids[0]]


def test_pictures_of_a_tool_are_shown_and_those_of_an_assistant_refused(tools_server):  # noqa: F811
    tools_server.say = "A cat."
    image = base64.b64encode(picture()).decode()
    results = [{"role": "tool", "content": text, "images": [image]} for text in ("here", "there")]
    twice = {**ASKED, "tool_calls": ASKED["tool_calls"] * 2}
    for asked, told in ((ASKED, results[:1]), (twice, results)):
        turns = [*HI["messages"], asked, *told]
        assert tools_server.post("/api/chat", messages=turns, tools=[ADD], stream=False).status_code == 200
        assert len(tools_server.engine.submitted[-1].media) == len(told)
        prompt = tools_server.prompt()
        assert prompt.index(told[-1]["content"]) < prompt.index("<image>"), "results follow the calls directly"
    for said in (ASKED, {"role": "assistant", "content": "so"}):
        turns = [*HI["messages"], {**said, "images": [image]}, {"role": "tool", "content": "here"}]
        refused = tools_server.post("/api/chat", messages=turns, tools=[ADD])
        assert refused.status_code == 400 and "only user messages may hold pictures" in refused.json()["error"]


@pytest.mark.parametrize("stream", [False, True])
def test_tools(tools_server, stream):  # noqa: F811
    said = lines(tools_server.post("/api/chat", **HI, tools=[WEATHER, ADD], stream=stream))
    calls = [call for line in said for call in line["message"].get("tool_calls", [])]
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in calls] == [
        ("get_weather", {"city": 'Köln "}'}),
        ("add", {"a": [1, 2]}),
    ]
    tools_server.say = "It rains."
    asked = {"role": "assistant", "content": "", "tool_calls": calls}
    returned = [{"role": "tool", "tool_name": c["function"]["name"], "content": "rain"} for c in calls]
    turns = {**HI, "messages": [*HI["messages"], asked, *returned]}
    answer = tools_server.post("/api/chat", **turns, tools=[WEATHER, ADD], stream=False).json()
    assert answer["message"]["content"] == "It rains." and "rain" in tools_server.prompt()


def test_models(server):
    found = server.http.get("/api/tags").json()["models"]
    assert [m["name"] for m in found] == ["tiny", "alias"] and found[0]["size"] > 0
    assert found[0]["details"]["family"] == "llava"
    loaded = server.http.get("/api/ps").json()["models"]
    assert [m["model"] for m in loaded] == ["tiny", "alias"] and loaded[0]["size"] == found[0]["size"]
    assert server.post("/api/show", model="alias:latest").json()["capabilities"] == ["completion", "vision"]
    assert server.http.get("/api/version").json() == {"version": "0.12.11"}, "clients refuse older ones"


@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [
        ("/api/chat", {**HI, "model": "llama3"}, 404),
        ("/api/chat", {**HI, "think": True}, 400),
        ("/api/chat", {**HI, "options": {"temperature": 9}}, 400),
        ("/api/chat", {**HI, "format": 3}, 400),
        ("/api/chat", {"messages": [3]}, 400),
        ("/api/generate", {"prompt": "hi", "suffix": "x"}, 400),
        ("/api/generate", {"prompt": "hi", "template": "{{ x }}"}, 400),
        ("/api/generate", {"prompt": "hi", "raw": True, "images": ["x"]}, 400),
        ("/api/generate", {"prompt": "hi", "raw": True, "system": "be brief"}, 400),
        ("/api/generate", {"prompt": "hi", "raw": True, "template": "{{ x }}"}, 400),
        ("/api/generate", {"prompt": "hi", "raw": True, "context": [1, 2]}, 400),
        ("/api/show", {"model": "llama3"}, 404),
    ],
)
def test_errors_have_their_shape(server, path, fields, status):
    response = server.post(path, **fields)
    assert response.status_code == status and list(response.json()) == ["error"]
    assert isinstance(response.json()["error"], str)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(({"stream": value}, "stream must be true or false") for value in ("false", "x", 0, [])),
        *(({"raw": value}, "raw must be true or false") for value in ("false", 1, 0)),
        *(({"logprobs": value}, "logprobs must be true or false") for value in ("false", 0)),
        *(({"top_logprobs": value}, "top_logprobs: ") for value in (False, "")),
        *(({"options": value}, "options must be an object") for value in ([], 0, "x")),
        *(({"format": value}, "format must be json or a JSON schema") for value in (0, False, [], "xml")),
        *(({"images": value}, "images must be a list") for value in ("", 0, {})),
        ({"options": {"num_predict": False}}, "options.num_predict: "),
        ({"system": 0}, "system must be a string"),
        ({"prompt": False}, "prompt must be a string"),
    ],
    ids=str,
)
def test_a_field_of_the_wrong_type_is_refused(server, fields, message):
    refused = server.post("/api/generate", **{"model": "tiny", "prompt": "hi", **fields})
    assert refused.status_code == 400 and refused.json()["error"].startswith(message)


@pytest.mark.parametrize("name", ["messages", "tools"])
def test_a_chat_s_lists_are_lists(server, name):
    for value in ("", 0, {}):
        refused = server.post("/api/chat", **HI | {name: value})
        assert refused.status_code == 400 and refused.json() == {"error": f"{name} must be a list"}
    assert server.post("/api/chat", **HI | {name: None}).status_code == 200


@pytest.mark.usefixtures("early_headers")
def test_the_gate_is_the_same(start):
    server = start(tenants=Tenants(["k"]), max_requests=1)
    for path in ("/api/chat", "/api/generate"):
        refused = server.post(path, **HI)
        assert refused.status_code == 401 and isinstance(refused.json()["error"], str)
    assert server.http.get("/api/tags").status_code == 401
    headers = {"Authorization": "Bearer k"}
    server.engine.hold.set()
    with server.http.stream("POST", "/api/chat", json=HI, headers=headers) as first:
        assert server.http.post("/api/chat", json=HI, headers=headers).status_code == 429
        server.engine.hold.clear()
        first.read()
    server.check_idle()


def test_the_client(server):
    ollama = pytest.importorskip("ollama")
    client = ollama.Client(host=server.url)
    messages = [{"role": "user", "content": "what is this?", "images": [picture()]}]
    assert client.chat(model="tiny", messages=messages).message.content == SAID
    assert "".join(p.message.content for p in client.chat(model="tiny", messages=messages, stream=True)) == SAID
    assert client.generate(model="tiny", prompt="hi").response == SAID
    assert [m.model for m in client.list().models] == ["tiny", "alias"]
    assert client.show("tiny").capabilities == ["completion", "vision"]
    with pytest.raises(ollama.ResponseError, match="does not exist") as e:
        client.chat(model="llama3", messages=messages)
    assert e.value.status_code == 404
