"""`Upgrade` is ignored, as RFC 9110 (7.8) allows: the request is answered in HTTP/1.1, with its body read."""

import http.client

import pytest

from tests.server.test_connection import answers_to, fresh, raw_request, said_by  # noqa: F401
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.cpu
H2C = "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
WEBSOCKET = (
    "connection: keep-alive, Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: x\r\n"
)
BODY = b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}'
PATHS = {
    "/v1/chat/completions": BODY,
    "/v1/completions": b'{"prompt": "hi", "max_tokens": 1}',
    "/v1/responses": b'{"input": "hi", "max_output_tokens": 16}',
    "/v1/messages": BODY,
    "/api/chat": BODY[:-1] + b', "stream": false}',
    "/tokenize": b'{"prompt": "hi"}',
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("more", [H2C, WEBSOCKET], ids=["h2c", "websocket"])
def test_the_body_is_read(fresh, path, more):  # noqa: F811
    asked = raw_request(PATHS[path], path=path, more=more)
    for pieces in ([asked, asked], [asked[:60], asked[60:] + asked], [asked[:-5], asked[-5:] + asked]):
        assert [status for status, _ in answers_to(fresh(), pieces, 2)] == [200, 200]


def test_a_chunked_body_is_read(fresh):  # noqa: F811
    head = raw_request(b"", path="/tokenize", more=H2C).replace(b"content-length: 0", b"transfer-encoding: chunked")
    pieces = [head + b'4\r\n{"pr\r\n', b'e\r\nompt": "hi"}  \r\n', b"0\r\n\r\n"]
    assert answers_to(fresh(), pieces, 1)[0][0] == 200


def test_a_get_is_answered_and_its_connection_ends_when_idle(start):
    server = start(keep_alive_s=1)
    for path in ("/version", "/nowhere"):
        raw = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=PATIENCE_S)
        raw.connect()
        raw.sock.sendall(raw_request(b"", method="GET", path=path, more=WEBSOCKET))
        assert said_by(raw).startswith(b"HTTP/1.1 404 " if path == "/nowhere" else b"HTTP/1.1 200 ")
        raw.close()


def test_a_refused_request_has_its_body_skipped(start):
    server = start(max_requests=1)
    place = server.sessions.overload.take()
    try:
        headers = dict(line.split(": ") for line in H2C.splitlines())
        for _ in range(3):
            assert server.http.post("/v1/chat/completions", content=BODY, headers=headers).status_code == 429
    finally:
        place.leave()


def test_this_is_no_proxy(fresh):  # noqa: F811
    raw = fresh()
    raw.sock.sendall(b"CONNECT example.com:443 HTTP/1.1\r\nhost: example.com:443\r\n\r\n")
    assert said_by(raw).startswith(b"HTTP/1.1 400 ")
