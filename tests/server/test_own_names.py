"""Errors name the fields that the client has sent, in its own protocol."""

import pytest

from hydrainfer.core import InvalidRequest
from hydrainfer.server.protocols.reading import name_fields

pytestmark = pytest.mark.cpu

USER = {"role": "user", "content": "hi"}
LONG = "word " * 2000
CHAT = ("/v1/chat/completions", {"messages": [USER], "max_tokens": 4})
RESPONSES = ("/v1/responses", {"input": "hi", "max_output_tokens": 4})
MESSAGES = ("/v1/messages", {"messages": [USER], "max_tokens": 4})
OLLAMA = ("/api/chat", {"messages": [USER]})
GENERATE = ("/api/generate", {"prompt": "hi"})
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
    (MESSAGES, {"max_tokens": 0}, None, "max_tokens must be at least 1"),
    (MESSAGES, {"stop_sequences": [""]}, None, "stop_sequences must not hold"),
    (MESSAGES, {"stop_sequences": ["stop", ""]}, None, "not ['stop', '']"),
    (MESSAGES, {"stop_sequences": 5}, None, "stop_sequences: "),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema"}}}, None, "output_config.format.schema must be"),
    (OLLAMA, {"options": {"repeat_penalty": 0}}, None, "options.repeat_penalty must be"),
    (OLLAMA, {"repetition_penalty": 0}, None, "repetition_penalty must be"),
    (OLLAMA, {"options": {"temperature": 5}}, None, "options.temperature must be"),
    (OLLAMA, {"options": {"num_predict": "x"}}, None, "options.num_predict: "),
    (OLLAMA, {"messages": [USER, {"role": "x", "content": "hi"}]}, None, "messages.1.role must be"),
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


def test_only_names_of_fields_are_renamed():
    error = InvalidRequest(
        """stop's the stop, not "the stop" or 'it\\'s the stop', and no other stop""", param="stop.0"
    )
    name_fields(error, {"stop": "end"})
    assert error.message == """end's the end, not "the stop" or 'it\\'s the stop', and no other stop"""
    assert error.param == "end.0"
