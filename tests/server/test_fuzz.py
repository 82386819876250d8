"""Whatever the body, the answer is 200 or a typed 4xx, and nothing is left."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hydrainfer.server.http.protocol import Protocols
from hydrainfer.server.openai.fields import ChatFields, CompletionFields
from hydrainfer.server.protocols import PROTOCOLS
from tests.server.conftest import image_part

pytestmark = pytest.mark.cpu

scalars = st.none() | st.booleans() | st.integers(-3, 600) | st.floats(-3, 3) | st.text(max_size=8)
values = st.recursive(scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=5), v, max_size=3))
names = sorted(
    {
        *ChatFields.model_fields,
        *CompletionFields.model_fields,
        *(name for known in Protocols(PROTOCOLS).known.values() for name in known.refused),
    }
    - {"model", "messages", "prompt"}
)
good_parts = st.just({"type": "text", "text": "hi"}) | st.just(image_part())
parts = st.lists(good_parts | values, max_size=3)
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system", "x"]), "content": parts | values})
    | values,
    max_size=3,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(names), values, max_size=3), messages | values, st.booleans())
def test_chat_bodies(server, fields, messages, good):
    body = {"max_tokens": 3, **fields, "messages": messages}
    if good:
        body["messages"] = [{"role": "user", "content": "hi"}]
    response = server.post("/v1/chat/completions", **body)
    late = (504,) if "deadline_s" in fields else ()
    assert response.status_code in (200, 400, 422, *late), response.text
    if response.status_code != 200:
        assert response.json()["error"]["message"]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(names), values, max_size=3), values | st.lists(st.integers(0, 1999), max_size=5))
def test_completion_bodies(server, fields, prompt):
    response = server.post("/v1/completions", **{"max_tokens": 3, **fields, "prompt": prompt})
    assert response.status_code in (200, 400, *((504,) if "deadline_s" in fields else ())), response.text


kinds = st.sampled_from(
    [
        "text",
        "image",
        "tool_use",
        "tool_result",
        "thinking",
        "input_text",
        "input_image",
        "output_text",
        "message",
        "function_call",
        "function_call_output",
        "reasoning",
        "function",
        "custom",
        "auto",
        "json_schema",
        "x",
    ]
)
keys = st.sampled_from(
    [
        "type",
        "text",
        "content",
        "role",
        "source",
        "data",
        "media_type",
        "url",
        "input",
        "id",
        "name",
        "tool_use_id",
        "call_id",
        "arguments",
        "output",
        "image_url",
        "images",
        "tool_calls",
        "function",
        "format",
        "schema",
        "tools",
    ]
)
roles = st.sampled_from(["user", "assistant", "system", "tool"])
objects = st.dictionaries(keys, kinds | roles | values | st.lists(st.dictionaries(keys, kinds | values), max_size=2))
bodies = st.fixed_dictionaries(
    {},
    optional={
        name: st.lists(objects, max_size=3) | objects | values
        for name in [
            "messages",
            "input",
            "system",
            "instructions",
            "tools",
            "tool_choice",
            "text",
            "reasoning",
            "include",
            "thinking",
            "output_config",
            "options",
            "stop_sequences",
            "format",
            "images",
            "prompt",
            "raw",
            "chat_template_kwargs",
            "mm_processor_kwargs",
            "stream",
            "temperature",
            "max_output_tokens",
            "metadata",
        ]
    },
)


paths = st.sampled_from(
    ["/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/api/chat", "/api/generate", "/api/show"]
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(paths, bodies, st.booleans())
def test_bodies_of_other_protocols(server, path, fields, good):
    hi = [{"role": "user", "content": "hi"}]
    body = {"max_tokens": 3, "max_output_tokens": 3, "options": {"num_predict": 3}, **fields}
    if good:
        body |= {"messages": hi, "input": "hi", "prompt": "hi"}
    response = server.post(path, **body)
    assert response.status_code in (200, 400, 404, 422), response.text
    assert response.status_code == 200 or response.json()["error"]
