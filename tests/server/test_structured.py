"""The fields that say what an answer must look like, in OpenAI's and vLLM's spelling."""

import itertools
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pydantic
import pytest

from hydrainfer.core import Grammar
from hydrainfer.grammar.bounds import TrialBounds
from hydrainfer.server.openai.fields import ChatFields, parse
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.cpu
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))


def error(response, status=400):
    assert response.status_code == status, response.text
    said = response.json()["error"]
    assert set(said) == {"message", "type", "param", "code"} and said["type"] == "invalid_request_error"
    return said


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar("json", '{"type":"object"}')),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, Grammar("json", TEXT)),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
                }
            },
            Grammar("json", TEXT),
        ),
        ({"guided_json": SCHEMA}, Grammar("json", TEXT)),
        ({"guided_json": json.dumps(SCHEMA)}, Grammar("json", TEXT)),
        ({"guided_regex": "a+"}, Grammar("regex", "a+")),
        ({"guided_choice": ["a", "b"]}, Grammar("choice", '["a","b"]')),
        ({"guided_grammar": 'start: "a"'}, Grammar("lark", 'start: "a"')),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, Grammar("json", TEXT)),
        ({"structured_outputs": {"choice": ["a"]}}, Grammar("choice", '["a"]')),
        ({"structured_outputs": {"json_object": True}}, Grammar("json", '{"type":"object"}')),
        ({"structured_outputs": {"json_object": False}}, None),
        ({"structured_outputs": None, "guided_json": None}, None),
    ],
)
def test_every_spelling(fields, grammar):
    assert parse(ChatFields, {"messages": [], **fields}).sampling({}).grammar == grammar


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_the_grammar_travels_with_the_request(server, path):
    ask = {"prompt": "hi"} if path.endswith("/completions") and "chat" not in path else {}
    ask = ask or {"messages": [{"role": "user", "content": "hi"}]}
    assert server.post(path, **ask, n=2, guided_regex="[a-z]+").status_code == 200
    assert [r.sampling.grammar for r in server.engine.submitted] == [Grammar("regex", "[a-z]+")] * 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {}, "structured_outputs": {"regex": "a"}}, "response_format.type"),
        ({"response_format": {"type": None, "json_schema": {"schema": SCHEMA}}}, "response_format.type"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": None, "disable_any_whitespace": True}}, "structured_outputs"),
        ({"structured_outputs": {"xyz": 1}}, "structured_outputs.xyz"),
        ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [1]}, "guided_choice"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"guided_regex": "a" * 70_000}, "guided_regex"),
        ({"guided_json": {"type": "string", "description": "x" * 70_000}}, "guided_json"),
    ],
)
def test_contradictory_response_formats_are_refused(server, fields, param):
    assert error(server.chat(**fields))["param"] == param


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "(a"},
        {"guided_grammar": "start: nothing"},
        {"guided_json": {"$ref": "http://127.0.0.1/secret.json"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {"type": "string"}}}}},
    ],
)
def test_schemas_that_cannot_be_compiled_are_refused(server, fields):
    said = error(server.chat(**fields))
    assert said["code"] == "invalid_grammar" and "cannot be used" in said["message"]
    assert not server.engine.submitted


def test_a_hostile_schema_ends_in_a_second(server):
    nested: dict = {"type": "string"}
    for _ in range(400):
        nested = {"items": nested}
    any_of = [{"anyOf": [{"properties": {f"a{i}_{j}": {}}} for j in range(10)]} for i in range(9)]
    for schema in (nested, {"allOf": any_of}):
        begin_s = time.process_time()
        answer = server.chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
        assert time.process_time() - begin_s < 1.0
        assert "takes more than" not in error(answer)["message"], "nor does the trial's process end it after a second"


def test_the_official_client_parses(server):
    class Answer(pydantic.BaseModel):
        n: int

    server.say = '{"n": 4}'
    with server.openai() as client:
        answer = client.chat.completions.parse(
            model="tiny", messages=[{"role": "user", "content": "?"}], response_format=Answer
        )
    assert answer.choices[0].message.parsed == Answer(n=4)
    assert json.loads(server.engine.submitted[-1].sampling.grammar.text)["required"] == ["n"]


def test_a_server_without_grammars_says_so(server, monkeypatch):
    monkeypatch.setattr(server.intake.processor, "grammars", None)
    assert "has no structured output" in error(server.chat(guided_regex="a"))["message"]


def endless(k):
    return {"type": "integer", "multipleOf": 98_765_431 + 10 * k}


def test_schemas_that_compile_for_ever_cost_others_nothing(start):
    """Two at any time, so more of them than there are preparation threads."""
    server = start()
    assert server.chat(guided_regex="[a-z]+").status_code == 200  # the process for trials has started
    done, answers = threading.Event(), []

    def ask(first):
        for k in itertools.count(first, 2):
            begin_s = time.monotonic()
            answers.append((server.chat(guided_json=endless(k)), time.monotonic() - begin_s))
            if done.is_set():
                return

    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(ask, first) for first in range(2)]
        for _ in range(12):
            assert server.chat("plain").status_code == 200
        done.set()
    for future in asking:
        future.result()
    for response, waited_s in answers:
        said = error(response)
        assert "to compile it takes more than" in said["message"] and said["code"] == "invalid_grammar"
        assert waited_s < PATIENCE_S
    server.check_idle()


def test_leaving_ends_the_compile(start, monkeypatch):
    bounds = TrialBounds(n_bytes=4 << 30, cpu_s=60.0, wall_s=60.0)  # no machine is fast enough to reach them
    monkeypatch.setattr("hydrainfer.grammar.trials.TrialBounds", lambda: bounds)
    server = start()
    with pytest.raises(httpx.ReadTimeout):
        server.http.post("/v1/completions", json={"prompt": "x", "guided_json": endless(0)}, timeout=0.7)
    wait_until(lambda: not server.intake.processor.grammars._running)
    server.check_idle()
