"""What the connection itself answers: refusals, before anything is made for the request."""

import http.client
import logging
import time

import pytest

from hydrainfer.server.access import AccessLines
from tests.server.conftest import wait_until

pytestmark = pytest.mark.cpu
HI = {"messages": [{"role": "user", "content": "x" * 4000}]}


@pytest.fixture
def full(start):
    """A server that refuses, and the place that must be left at the end."""
    server = start(max_requests=1)
    place = server.sessions.admission.take()
    yield server
    place.leave()
    server.check_idle()


def test_a_refusal_is_the_same_by_the_connection_and_by_the_gate(full, caplog):
    caplog.set_level(logging.INFO, "hydrainfer.access")
    mine = {"X-Request-Id": "mine"}
    early = full.http.post("/v1/chat/completions", json=HI, headers=mine)
    late = full.http.post("/v1/chat/completions", json=HI, headers={**mine, "Origin": "https://chat.example.com"})
    assert early.status_code == late.status_code == 429
    assert early.json() == late.json() and early.headers.keys() == late.headers.keys()
    for name in ("retry-after", "content-type", "content-length", "x-request-id"):
        assert early.headers[name] == late.headers[name], name
    lines = lambda: [r.getMessage() for r in caplog.records if r.name == "hydrainfer.access"]  # noqa: E731
    wait_until(lambda: len(lines()) == 2)
    assert all(line.startswith("POST /v1/chat/completions 429 ") and " id=mine" in line for line in lines())
    assert full.http.post("/v1/completions", json={"prompt": "x"}).headers["x-request-id"].startswith("req-")


def test_a_refused_connection_goes_on_and_its_body_is_skipped(full):
    raw = http.client.HTTPConnection(full.url.removeprefix("http://"), timeout=20)
    for _ in range(3):
        raw.request("POST", "/v1/chat/completions", body=b"{" * 200_000)
        answer = raw.getresponse()
        assert answer.status == 429 and b'"overloaded"' in answer.read()
    raw.request("GET", "/version")
    assert raw.getresponse().status == 200
    raw.close()


class Reserved:
    """Room for those alone who were told to come now."""

    def __init__(self, monkeypatch, server):
        self.queue, self.promised_s = server.sessions.admission.queues["text"], 1000.0
        monkeypatch.setattr(self.queue, "has_room", lambda now, share, *, favoured: favoured)
        monkeypatch.setattr(self.queue, "promise", lambda now: self.promised_s)


@pytest.mark.parametrize("pieces", [1, 2], ids=["at-once", "body-later"])
@pytest.mark.parametrize("size", [10, 100_000])
def test_who_comes_back_when_told_is_known_by_its_body(start, monkeypatch, size, pieces):
    server = start()
    reserved = Reserved(monkeypatch, server)

    def ask(raw, text):
        body = b'{"messages": [{"role": "user", "content": "%s"}], "max_tokens": 1}' % text
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        head += b"content-length: %d\r\n\r\n" % len(body)
        for piece in [head + body] if pieces == 1 else [head, body]:
            raw.sock.sendall(piece)
        answer = http.client.HTTPResponse(raw.sock, method="POST")
        answer.begin()
        answer.read()
        return answer.status

    raw = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=20)
    raw.connect()
    texts = [b"a " * (size // 2), b"b " * (size // 2)]
    assert [ask(raw, text) for text in texts] == [429, 429]
    assert ask(raw, texts[0]) == 429, "its turn has not come"
    reserved.promised_s = 0.0
    assert ask(raw, texts[1]) == 429
    assert ask(raw, texts[1]) == (200 if size == 10 else 400), "a text too long, for the model, but let in"
    assert ask(raw, texts[1]) == 429, "once"
    raw.close()
    server.check_idle()


def test_who_is_held_for_a_body_that_does_not_come_is_answered(start, monkeypatch):
    server = start()
    reserved = Reserved(monkeypatch, server)
    assert server.chat().status_code == 429
    raw = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=20)
    raw.connect()
    reserved.promised_s = 0.0
    raw.sock.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n{"
    )
    assert raw.sock.recv(65536).startswith(b"HTTP/1.1 429 ")
    raw.sock.sendall(b'"a": "b"')
    raw.request("GET", "/version")
    assert raw.getresponse().status == 200
    raw.close()
    server.check_idle()


def test_a_draining_server_refuses_and_closes(full):
    full.sessions.drain()
    raw = http.client.HTTPConnection(full.url.removeprefix("http://"), timeout=20)
    raw.request("POST", "/v1/chat/completions", body=b"{}")
    answer = raw.getresponse()
    assert answer.status == 503 and answer.headers["connection"] == "close" and answer.headers["retry-after"]
    answer.read()
    assert raw.sock is None, "http.client closes when it is told so"


def test_lines_of_the_log_are_written_many_at_once():
    class Stream:
        def __init__(self):
            self.wrote = []

        def write(self, text):
            self.wrote.append(text)

        def flush(self):
            pass

    stream, log = Stream(), logging.Logger("lines")
    handler = AccessLines(stream, every_s=0.02)
    log.addHandler(handler)
    began_s = time.time()
    for i in range(100):
        log.info("GET /%d 200", i)
    wait_until(lambda: "".join(stream.wrote).count("\n") == 100)
    assert len(stream.wrote) < 50
    first = "".join(stream.wrote).splitlines()[0]
    assert first.endswith(" GET /0 200") and first.startswith(time.strftime("%Y-", time.localtime(began_s)))
    log.info("last")
    handler.close()
    wait_until(lambda: stream.wrote[-1].endswith(" last\n"))
