"""Errors name the fields that the client has sent, in its own protocol."""

import pytest

from hydrainfer.core import InvalidRequest
from hydrainfer.server.protocols.messages_chat import chat_of as of_message
from hydrainfer.server.protocols.ollama_chat import chat_of as of_ollama
from hydrainfer.server.protocols.ollama_chat import generate_of as of_generate
from hydrainfer.server.protocols.places import name_fields
from hydrainfer.server.protocols.responses_chat import chat_of as of_response

pytestmark = pytest.mark.cpu

USER = {"role": "user", "content": "hi"}
LONG = "word " * 2000
CHAT = ("/v1/chat/completions", {"messages": [USER], "max_tokens": 4})
RESPONSES = ("/v1/responses", {"input": "hi", "max_output_tokens": 4})
MESSAGES = ("/v1/messages", {"messages": [USER], "max_tokens": 4})
OLLAMA = ("/api/chat", {"messages": [USER]})
GENERATE = ("/api/generate", {"prompt": "hi"})
TEXT = ("/v1/completions", {"prompt": "hi", "max_tokens": 4})
CHAT_TOOLS = {"tools": [{"type": "function", "function": {"name": "f"}}]}
CALL = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
ITEM = {"type": "function_call", "call_id": "a", "name": "f"}
URL = "data:image/png;base64,iVBORw0KGgo="
SOURCE = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}


def without(item, name):
    return {key: value for key, value in item.items() if key != name}


def said(*blocks, role="assistant"):
    """Messages with a turn of these blocks."""
    return {"messages": [USER, {"role": role, "content": list(blocks)}, USER]}


def named_tool(**fields):
    return {"tools": [{"type": "function", "name": "f", **fields}]}


CASES = [
    (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens must be at least 1"),
    (CHAT, {"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1"),
    (CHAT, {"max_completion_tokens": 2, "min_tokens": 3}, "min_tokens", "must not exceed max_completion_tokens (2)"),
    (CHAT, {"messages": []}, "messages", "messages must not be empty"),
    (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be at least 1"),
    (RESPONSES, {"max_output_tokens": "x"}, "max_output_tokens", "max_output_tokens: "),
    (RESPONSES, {"max_output_tokens": 9999}, "input", "in the input, 9999 in the completion"),
    (RESPONSES, {"input": LONG}, "input", "maximum context length"),
    (RESPONSES, {"input": []}, "input", "input must be a text or a list"),
    (RESPONSES, {"input": 5}, "input", "input must be a text or a list"),
    (RESPONSES, {"input": None}, "input", "input must be a text or a list"),
    (RESPONSES, {"text": {"format": {"type": "x"}}}, "text.format", "text.format.type must be"),
    (RESPONSES, {"stop": ["max_tokens", ""]}, "stop", "not ['max_tokens', '']"),
    (
        CHAT,
        {**CHAT_TOOLS, "tool_choice": {"type": "function", "name": "f"}},
        "tool_choice.function.name",
        "tool_choice.function.name is missing; send it in tool_choice.function, not beside it",
    ),
    (
        CHAT,
        named_tool(),
        "tools.0.function.name",
        "tools.0.function.name is missing; send it in tools.0.function, not beside it",
    ),
    (RESPONSES, {"text": {"format": {}}}, "text.format.type", "text.format.type is missing"),
    (RESPONSES, named_tool(name="a b"), "tools.0.name", "tools.0.name must be 1 to 128 letters"),
    (
        RESPONSES,
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        "tools.0.name",
        "tools.0.name is missing",
    ),
    (RESPONSES, named_tool(parameters=[1]), "tools.0.parameters", "tools.0.parameters must be a JSON schema"),
    (
        RESPONSES,
        {**named_tool(), "tool_choice": {"type": "function"}},
        "tool_choice.name",
        "tool_choice.name is missing",
    ),
    (RESPONSES, {"input": [USER, without(ITEM, "name")]}, "input.1.name", "input.1.name is missing"),
    (RESPONSES, {"input": [USER, ITEM, without(ITEM, "name")]}, "input.2.name", "input.2.name is missing"),
    (RESPONSES, {"input": [USER, without(ITEM, "call_id")]}, "input.1.call_id", "input.1.call_id must be a string"),
    (RESPONSES, {"input": [USER, {**ITEM, "arguments": [1]}]}, "input.1.arguments", "input.1.arguments must be a JSON"),
    (
        RESPONSES,
        {"input": [USER, ITEM, {"type": "function_call_output", "output": "x"}]},
        "input.2.call_id",
        "input.2.call_id must say which call this answers",
    ),
    (
        RESPONSES,
        {"input": [USER, {"type": "function_call_output", "call_id": "a"}]},
        "input.1.output",
        "input.1.output must be a string or a list of parts",
    ),
    (
        RESPONSES,
        {"input": [USER, {"type": "function_call_output", "call_id": "a", "output": "<image>"}]},
        "input.1.output",
        "stands for a picture",
    ),
    (RESPONSES, {"input": "<image>"}, "input", "send pictures as input_image"),
    (RESPONSES, {"instructions": "<image>"}, "instructions", "send pictures as input_image"),
    (RESPONSES, {"input": [{"role": "user"}]}, "input.0.content", "must be a string or a list of parts"),
    (
        RESPONSES,
        {"input": [{"role": "tool", "content": "x"}]},
        "input.0.role",
        "input.0.role must be one of user, assistant, system, developer",
    ),
    (MESSAGES, {"max_tokens": 0}, None, "max_tokens must be at least 1"),
    (MESSAGES, {"tools": [{"name": "a b", "input_schema": {}}]}, None, "tools.0.name must be 1 to 128 letters"),
    (MESSAGES, {"tools": [{"input_schema": {}}]}, None, "tools.0.name is missing"),
    (MESSAGES, {"tools": [{"name": "f", "input_schema": [1]}]}, None, "tools.0.input_schema must be a JSON schema"),
    (
        MESSAGES,
        {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "tool"}},
        None,
        "tool_choice.name is missing",
    ),
    (MESSAGES, said(without(CALL, "id")), None, "messages.1.content.0.id must be a string"),
    (MESSAGES, said(CALL, without(CALL, "name")), None, "messages.1.content.1.name is missing"),
    (
        MESSAGES,
        said({"type": "text", "text": "x"}, {"type": "tool_result", "content": "x"}, role="user"),
        None,
        "messages.1.content.1.tool_use_id must say which call",
    ),
    (
        MESSAGES,
        {"messages": [{"role": "tool", "content": "x"}]},
        None,
        "messages.0.role must be one of user, assistant, system",
    ),
    (MESSAGES, {"output_config": {"format": {}}}, None, "output_config.format.type must be json_schema"),
    (MESSAGES, {"output_format": {"type": "json_schema"}}, None, "output_format.schema must be an object"),
    (MESSAGES, {"system": 3}, None, "system must be a string or a list of blocks"),
    (MESSAGES, {"system": "<image>"}, None, "send pictures as image blocks"),
    (MESSAGES, {"messages": [{"role": "user"}]}, None, "messages.0.content must be a string or a list of blocks"),
    (MESSAGES, {"stop_sequences": [""]}, None, "stop_sequences must not hold"),
    (MESSAGES, {"stop_sequences": ["stop", ""]}, None, "not ['stop', '']"),
    (MESSAGES, {"stop_sequences": 5}, None, "stop_sequences: "),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema"}}}, None, "output_config.format.schema must be"),
    (OLLAMA, {"options": {"repeat_penalty": 0}}, None, "options.repeat_penalty must be"),
    (OLLAMA, {"repetition_penalty": 0}, None, "repetition_penalty must be"),
    (OLLAMA, {"options": {"temperature": 5}}, None, "options.temperature must be"),
    (OLLAMA, {"options": {"num_predict": "x"}}, None, "options.num_predict: "),
    (OLLAMA, {"messages": [USER, {"role": "x", "content": "hi"}]}, None, "messages.1.role must be"),
    (OLLAMA, {"messages": [{**USER, "images": "abc"}]}, None, "messages.0.images must be a list"),
    (OLLAMA, {"messages": [{"role": "assistant", "tool_calls": "x"}]}, None, "messages.0.tool_calls must be a list"),
    (OLLAMA, {"messages": [{**USER, "content": "<image>"}]}, None, "send pictures as images"),
    (GENERATE, {"images": "abc"}, None, "images must be a list"),
    (GENERATE, {"raw": True, "prompt": "<image>"}, None, "send pictures through /v1/chat/completions"),
    (TEXT, {"prompt": "<image>"}, "prompt", "send pictures through /v1/chat/completions"),
    (CHAT, {"messages": [{**USER, "content": "<image>"}]}, "messages.0.content", "send pictures as image_url"),
    (GENERATE, {"options": {"repeat_penalty": 0}}, None, "options.repeat_penalty must be"),
    (GENERATE, {"options": {"num_predict": 9999}}, None, "in the prompt, 9999 in the completion"),
    (GENERATE, {"prompt": 5}, None, "prompt must be a string"),
    (GENERATE, {"raw": True, "options": {"num_predict": "x"}}, None, "options.num_predict: "),
    (GENERATE, {"raw": True, "logprobs": True, "top_logprobs": 21}, None, "top_logprobs must be"),
]


@pytest.mark.parametrize(
    ("ask", "fields", "param", "message"), CASES, ids=[f"{a[0]} {str(f)[:40]}" for a, f, *_ in CASES]
)
def test_an_error_names_the_field_that_the_client_has_sent(server, ask, fields, param, message):
    path, body = ask
    answer = server.http.post(path, json={k: v for k, v in {**body, **fields}.items() if v is not None})
    assert answer.status_code == 400
    error = answer.json()["error"]
    text = error if isinstance(error, str) else error["message"]
    assert message in text
    if path in (CHAT[0], RESPONSES[0]):
        assert error["param"] == param


RESULT = {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_image", "image_url": URL}]}
SHOWN = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image", "source": SOURCE}]}
PICTURES = [
    (of_response({"input": [USER, ITEM, RESULT]}), 3, "input.2.output.0.image_url"),
    (of_response({"input": [USER, ITEM, RESULT, RESULT]}), 4, "input.2.output.0.image_url"),
    (of_message({**said(SHOWN, role="user"), "max_tokens": 4}), 2, "messages.1.content.0.content.0.source.data"),
    (of_ollama({"messages": [USER, {**USER, "images": ["iVBO"]}]}), 1, "messages.1.images.0"),
    (of_generate({"prompt": "hi", "images": ["iVBO"]}), 0, "images.0"),
]


@pytest.mark.parametrize(("chat", "index", "place"), PICTURES, ids=[place for *_, place in PICTURES])
def test_a_picture_is_named_by_the_field_that_has_it(chat, index, place):
    """It may be in another message of the chat than in the client's."""
    param = f"messages.{index}.content.0.image_url"
    error = InvalidRequest(f"{param} is broken", param=param)
    name_fields(error, {}, chat["messages"])
    assert (error.message, error.param) == (f"{place} is broken", place)


def test_paths_that_a_client_has_written_stay_as_they_are():
    texts = ("messages.0.9.content", "messages.1", f"messages.{'9' * 5000}", f"messages{'.0' * 5000}", "place.where")
    for text in texts:
        error = InvalidRequest(f"a {text} b")
        name_fields(error, {"tools.*.function": "tools.*"}, [{"content": "x", "place": "forged"}])
        assert error.message == f"a {text} b"


def test_only_names_of_fields_are_renamed():
    error = InvalidRequest(
        """stop's the stop, not "the stop" or 'it\\'s the stop', and no other stop""", param="stop.0"
    )
    name_fields(error, {"stop": "end"})
    assert error.message == """end's the end, not "the stop" or 'it\\'s the stop', and no other stop"""
    assert error.param == "end.0"
