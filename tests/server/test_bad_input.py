"""Every kind of bad input: an OpenAI-shaped error, the server stays up, nothing is left (the fixture checks)."""

import gzip
import json
import select
import socket
import sys
import time
from contextlib import ExitStack

import pytest

from tests.server.conftest import data_url, image_part, picture
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.cpu


def error(response, status):
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"error"} and body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["message"] and "\n" not in body["error"]["message"]
    return body["error"]


@pytest.mark.parametrize("body", [b"", b"{", b'{"model": "tiny", }', b"\xff\xfe", b"[" * 10_000, b'{"a": NaN}'])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
def test_broken_json(server, path, body):
    said = error(server.http.post(path, content=body), 400)
    assert said["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b'\xef\xbb\xbf{"messages": []}', "begins with a byte order mark"),
        ('{"messages": []}'.encode("utf-16"), "is UTF-16"),
        (gzip.compress(b'{"messages": []}'), "is compressed"),
        (b'{"prompt": "\xed\xa0\x80"}', "is not UTF-8 at byte 12"),
        (b'{"prompt": "\xff"}', "is not UTF-8 at byte 12"),
        (b'{"prompt": "\\ud800"}', "has half of a surrogate pair"),
        (b'{"prompt": "\\udc00 \\ud83d"}', "has half of a surrogate pair"),
        (b'{"prompt":\n"secret", }', "is not valid JSON (line 2, column 9)"),
    ],
)
def test_what_is_wrong_with_a_body_is_said(server, body, why):
    said = error(server.http.post("/v1/completions", content=body), 400)
    assert said["code"] == "invalid_json" and said["message"].startswith(f"the body {why}")
    assert "secret" not in said["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat", "/tokenize"])
def test_a_compressed_body_is_refused(server, path):
    body = gzip.compress(b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}')
    refused = server.http.post(path, content=body, headers={"Content-Encoding": "gzip"})
    assert refused.status_code == 415 and "must be sent uncompressed" in refused.text
    assert refused.headers["accept-encoding"] == "identity"
    plain = server.http.post("/tokenize", json={"prompt": "hi"}, headers={"Content-Encoding": "identity"})
    assert plain.status_code == 200


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat", "/tokenize"])
def test_a_body_must_say_that_it_is_json(server, path, kind):
    """So that a page of another origin cannot have anything done without being asked by the browser."""
    response = server.http.post(path, content=b"{}", headers={"Content-Type": kind})
    assert response.status_code == 415 and "Content-Type: application/json" in response.text


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON", "application/problem+json"])
def test_ways_to_say_json(server, kind):
    body = b'{"model": "tiny", "max_tokens": 16.0, "messages": [{"role": "user", "content": "hi"}]}'
    made = server.http.post("/v1/chat/completions", content=body, headers={"Content-Type": kind})
    assert made.status_code == 200 and server.engine.submitted[-1].sampling.max_tokens == 16


@pytest.mark.parametrize("body", [b"[]", b"3", b'"x"', b"null"])
def test_json_that_is_no_object(server, body):
    assert "JSON object" in error(server.http.post("/v1/chat/completions", content=body), 400)["message"]


FIELDS = [
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"top_k": 1e30}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 1000}, "n"),
    ({"n": True}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "9"}, "max_tokens"),
    ({"max_tokens": 10**12}, "messages"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 1e30, "max_tokens": None}, "min_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"seed": 2**70}, "seed"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": 3}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids"),
    ({"logprobs": 3}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"prediction": "a text"}, "prediction"),
    ({"prediction": {"type": "text", "content": "a"}}, "prediction"),
    ({"prediction": {"type": "content", "content": [{"type": "image_url"}]}}, "prediction"),
    ({"prediction": {"type": "content", "content": "a <image>"}}, "prediction"),
    ({"prediction": {"type": "content", "content": "longer than the context " * 100}}, "prediction"),
    ({"prediction": {"type": "content", "content": "x" * 100_000}}, "prediction"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": 1}, "stream_options"),
    ({"model": 3}, "model"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": [{"role": "user", "content": {"a": 1}}]}, "messages.0.content"),
]


@pytest.mark.parametrize(("fields", "param"), FIELDS, ids=[json.dumps(f)[:40] for f, _ in FIELDS])
def test_wrong_types_and_ranges(server, fields, param):
    assert error(server.chat(**{"max_tokens": 4, **fields}), 400)["param"] == param


REFUSED = {
    "functions": [{"name": "f"}],
    "response_format": {"type": "structural_tag"},
    "guided_whitespace_pattern": " ?",
    "audio": {"voice": "x"},
    "web_search_options": {},
    "modalities": ["text", "audio"],
    "chat_template": "{{ messages }}",
    "best_of": 3,
    "echo": True,
    "suffix": "x",
    "use_beam_search": True,
    "regex": "a+",
    "ebnf": 'root ::= "a"',
    "grammar": 'root ::= "a"',
    "json_schema": {"type": "object"},
    "stop_regex": "a+",
    "n_predict": 5,
    "max_new_tokens": 5,
}


@pytest.mark.parametrize("name", REFUSED)
def test_fields_that_are_understood_but_not_supported_are_named(server, name):
    said = error(server.chat(**{name: REFUSED[name]}), 400)
    assert said["param"] == name and said["code"] == "unsupported_parameter"


def test_a_model_without_options_for_its_pictures_says_so(server):
    said = error(server.chat(mm_processor_kwargs={"size": 9}), 400)
    assert said["param"] == "mm_processor_kwargs" and "takes none, not 'size'" in said["message"]
    said = error(server.post("/v1/completions", prompt="x", mm_processor_kwargs={"size": 9}), 400)
    assert said["param"] == "mm_processor_kwargs" and said["code"] == "unsupported_parameter"


def test_harmless_fields_are_ignored(server):
    harmless = {
        "user": "me",
        "metadata": {},
        "parallel_tool_calls": True,
        "service_tier": "auto",
        "store": None,
    }
    neutral = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "echo": False, "best_of": 1}
    assert server.chat(**harmless, **neutral, temperature=None, stop=None, logit_bias=None).status_code == 200


def test_either_name_of_the_limit_and_a_wrong_n(server):
    for path, ask in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ):
        done = server.post(path, **ask, max_completion_tokens=3, max_tokens=9, ignore_eos=True).json()
        assert done["usage"]["completion_tokens"] == 3
        assert error(server.post(path, **ask, n=-1), 400)["param"] == "n"
    for name in ("stop_token_ids", "logit_bias"):
        given = {"stop_token_ids": [99_999], "logit_bias": {"99999": 1}}[name]
        assert error(server.chat(**{name: given}), 400)["message"].startswith(f"{name} takes token ids")


def test_model_and_path(server):
    assert error(server.chat(model="gpt"), 404)["code"] == "model_not_found"
    assert server.post(messages=[{"role": "user", "content": "x"}]).status_code == 200  # no name: the one there is
    assert error(server.http.get("/v1/nothing"), 404)["code"] == "unknown_path"
    assert error(server.http.get("/v1/chat/completions"), 405)["code"] == "method_not_allowed"
    assert error(server.http.get("/v1/models/x/y"), 404)["code"] == "model_not_found"


PICTURES = {
    "truncated": (data_url(picture()[:-40]), 422, "damaged"),
    "not a picture": (data_url(b"hello"), 422, "supported formats are JPEG, PNG, WebP and GIF"),
    "tiff": (data_url(picture(kind="TIFF")), 422, "TIFF; supported formats"),
    "bmp": (data_url(picture(kind="BMP")), 422, "BMP; supported formats"),
    "jpeg 2000": (data_url(b"\0\0\0\x0cjP  \r\n\x87\n"), 422, "JPEG 2000; supported formats"),
    "svg": ("data:image/svg+xml;base64,PHN2Zy8+", 422, "SVG; supported formats"),
    "bomb": (data_url(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\xff\xff\0\0\xff\xff\x08\x02\0\0\0\0\0\0\0"), 422, ""),
    "bad base64": ("data:image/png;base64,@@@@", 400, "valid base64"),
    "no base64": ("data:image/png,xyz", 400, "must look like"),
    "file": ("file:///etc/passwd", 400, "data: URL"),
    "loopback": ("http://127.0.0.1/x.png", 400, "data: URL"),
    "hexadecimal": ("http://0x7f000001/x.png", 400, "four decimal numbers"),
    "password": ("https://me:pw@example.com/x.png", 400, "password"),
    "nobody": ("https://nobody.example/x.png", 422, "no address"),
    "private name": ("https://inside.example/x.png", 422, "no address"),
    "ftp": ("ftp://example.com/x.png", 400, "data: URL"),
    "path": ("/etc/passwd", 400, "data: URL"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", PICTURES)
def test_bad_pictures(server, name, stream):
    url, status, says = PICTURES[name]
    good = image_part()
    said = error(server.chat([good, {"type": "image_url", "image_url": {"url": url}}], stream=stream), status)
    assert says in said["message"] and said["param"] == "messages.0.content.1.image_url"


@pytest.mark.parametrize(
    ("kind", "mode"), [("JPEG", "CMYK"), ("PNG", "P"), ("PNG", "LA"), ("PNG", "I;16"), ("GIF", "RGB")]
)
def test_unusual_pictures_are_served(server, kind, mode):
    data = picture(kind=kind, mode=mode)
    assert server.chat([image_part(data), {"type": "text", "text": "what?"}]).status_code == 200


def test_one_pixel_is_served(server):
    assert server.chat([image_part(picture(size=(1, 1)))]).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_other_bad_content(server, stream):
    assert "at most 3" in error(server.chat([image_part()] * 4, stream=stream), 400)["message"]
    assert "stands for a picture" in error(server.chat("look: <image>", stream=stream), 400)["message"]
    said = error(server.chat("x y " * 400, stream=stream, max_tokens=100), 400)
    assert said["code"] == "context_length_exceeded" and "512 tokens" in said["message"]
    assert "100 in the completion" in said["message"]
    assert error(server.chat("x" * 3_000_000, stream=stream), 400)["code"] == "context_length_exceeded"
    parts = [{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}]
    assert "takes no videos" in error(server.chat(parts, stream=stream), 400)["message"]
    parts = [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]
    assert "not supported" in error(server.chat(parts, stream=stream), 400)["message"]


def test_ten_megabytes_are_stopped_while_reading(server):
    assert error(server.chat("x" * 10_000_000), 413)["code"] == "request_too_large"

    def endless():
        for _ in range(200):
            yield b"x" * 65536

    response = server.http.post("/v1/chat/completions", content=endless())
    assert error(response, 413)["code"] == "request_too_large"


@pytest.mark.parametrize("stream", [False, True])
def test_no_memory_for_a_body_is_told_as_passing(server, monkeypatch, stream):
    def no_memory(*_, **__):
        raise MemoryError

    with monkeypatch.context() as m:
        m.setattr(server.intake.processor, "chat", no_memory)
        response = server.chat(stream=stream)
        assert error(response, 429)["code"] == "overloaded" and response.headers["retry-after"] == "1"
    assert server.chat(stream=stream).status_code == 200


def test_completions_prompts(server):
    for prompt in ("", [], [[]], [1, "a"], None, {"a": 1}, "an <image>", [10**6]):
        error(server.post("/v1/completions", model="tiny", prompt=prompt), 400)
    assert error(server.post("/v1/completions", model="tiny"), 400)["param"] == "prompt"


def test_values_are_not_echoed(server):
    secret = "s3cret" * 10
    for response in (
        server.chat(temperature=secret),
        server.chat([{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{secret}!"}}]),
        server.http.post("/v1/chat/completions", content=secret.encode()),
    ):
        assert "s3cret" not in response.text


def test_too_many_tokens_to_read(server):
    for tokens in ([0] * (server.model.n_context + 1), 3, [1.0], [True], ["a"], [-1]):
        assert error(server.post("/detokenize", tokens=tokens), 400)["param"] == "tokens"


def begun(server, path, n_bytes, body):
    """A connection on which so much of a body has come."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    client = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
    head = f"POST {path} HTTP/1.1", "Host: h", "Content-Type: application/json", f"Content-Length: {n_bytes}", "", ""
    client.sendall("\r\n".join(head).encode() + body)
    return client


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/tokenize"])
@pytest.mark.parametrize("crowded", [False, True])
def test_a_body_that_does_not_come(start, monkeypatch, path, crowded):
    server = start()
    monkeypatch.setattr("hydrainfer.server.http.body.STALLED_S", 0.2)
    monkeypatch.setattr(server.sessions.overload, "crowded", lambda _: crowded)
    with begun(server, path, 99, b'{"model":') as client:
        assert b" 408 " in client.recv(4096).partition(b"\r\n")[0]
    server.check_idle()


def test_a_body_that_trickles(start):
    server = start(timeout_s=0.5)
    with begun(server, "/tokenize", 99, b"{") as client:
        for _ in range(4):
            time.sleep(0.1)
            client.sendall(b" ")
        assert b" 408 " in client.recv(4096).partition(b"\r\n")[0]


def test_bodies_that_come_share_memory(start):
    server = start(max_body_bytes=1 << 16)
    with ExitStack() as stack:
        clients = [stack.enter_context(begun(server, "/v1/chat/completions", 65_000, b" " * 64_000)) for _ in range(9)]
        ready, _, _ = select.select(clients, (), (), 10)
        assert b" 429 " in ready[0].recv(4096).partition(b"\r\n")[0]
    wait_until(lambda: server.chat().status_code == 200)
    server.check_idle()


DEEP = "[" * 990 + "]" * 990
_USER, _CALL = {"role": "user", "content": "hi"}, {"type": "tool_use", "id": "a", "name": "f", "input": {"x": DEEP}}
_OLLAMA = {"function": {"name": "f", "arguments": {"x": DEEP}}}
_BEFORE_312 = pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python can write this JSON since 3.12")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/responses", {"input": "hi", "metadata": {"x": DEEP}}),
        ("/v1/messages", {"max_tokens": 4, "messages": [_USER, {"role": "assistant", "content": [_CALL]}, _USER]}),
        ("/api/chat", {"messages": [{"role": "assistant", "tool_calls": [_OLLAMA]}]}),
        pytest.param("/tokenize", {"messages": [_USER], "chat_template_kwargs": {"x": DEEP}}, marks=_BEFORE_312),
    ],
)
def test_bodies_that_are_nested_too_deeply_are_400(server, path, fields):
    body = json.dumps({"model": "tiny", **fields}).replace(json.dumps(DEEP), DEEP)
    response = server.http.post(path, content=body.encode())
    assert response.status_code == 400 and "nested too deeply" in response.text


USER, PART = '{"role":"user","content":""}', '{"type":"text","text":"a"}'


@pytest.mark.parametrize(
    ("path", "begin", "value", "n", "end"),
    [
        ("/v1/chat/completions", '{"messages":[', USER, 40_000, "]}"),
        ("/v1/messages", '{"messages":[', USER, 40_000, "]}"),
        ("/v1/responses", '{"input":[', "[]", 70_000, "]}"),
        ("/api/chat", '{"messages":[{"content":[', PART, 40_000, "]}]}"),
        ("/v1/chat/completions", '{"chat_template_kwargs":{', '"key %d":1', 70_000, "}}"),
        ("/v1/completions", '{"prompt":[', "1", 1_100_000, "]}"),
        ("/detokenize", '{"tokens":[', "1", 1_100_000, "]}"),
    ],
)
def test_too_many_values_are_refused_before_they_are_looked_at(server, path, begin, value, n, end):
    values = [value % i for i in range(n)] if "%d" in value else [value] * n
    response = server.http.post(path, content=f"{begin}{','.join(values)}{end}".encode())
    what = "1048576 list entries" if value == "1" else "65536 objects and fields"
    assert response.status_code == 413 and f"more than {what}" in response.text


def test_a_long_conversation_is_no_flood(server):
    message = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    said = error(server.post(messages=[message] * 10_000), 400)
    assert said["code"] == "context_length_exceeded"
