"""What the connection itself answers: refusals, before anything is made for the request."""

import http.client
import json
import logging
import time
from types import SimpleNamespace

import pytest

from hydrainfer.server import Connection
from hydrainfer.server.door.gate import Door
from hydrainfer.server.http.access import AccessLines
from hydrainfer.server.http.protocol import Protocols
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.cpu
HI = {"messages": [{"role": "user", "content": "x" * 4000}]}


@pytest.fixture
def full(start):
    """A server that refuses, and the place that must be left at the end."""
    server = start(max_requests=1)
    place = server.sessions.overload.take()
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
    for name in ("content-type", "content-length", "x-request-id", "request-id"):
        assert early.headers[name] == late.headers[name], name
    assert int(early.headers["retry-after-ms"]) <= int(late.headers["retry-after-ms"]), "one turn after the other"
    lines = lambda: [r.getMessage() for r in caplog.records if r.name == "hydrainfer.access"]  # noqa: E731
    wait_until(lambda: len(lines()) == 2)
    assert all(line.startswith("POST /v1/chat/completions 429 ") and " id=mine" in line for line in lines())
    assert full.http.post("/v1/completions", json={"prompt": "x"}).headers["x-request-id"].startswith("req-")


def test_a_refused_connection_goes_on_and_its_body_is_skipped(full):
    raw = http.client.HTTPConnection(full.url.removeprefix("http://"), timeout=PATIENCE_S)
    for _ in range(3):
        raw.request("POST", "/v1/chat/completions", body=b"{" * 200_000)
        answer = raw.getresponse()
        assert answer.status == 429 and b'"overloaded"' in answer.read()
    raw.request("GET", "/version")
    assert raw.getresponse().status == 200
    raw.close()


def raw_request(body, *, method="POST", path="/v1/chat/completions", more=""):
    head = f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{more}"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


@pytest.fixture(autouse=True)
def n_read(monkeypatch):
    """A function that says how many bytes the server has read from all connections made meanwhile."""
    sizes, whole = [], Connection.data_received

    def note(self, data):
        whole(self, data)
        sizes.append(len(data))

    monkeypatch.setattr(Connection, "data_received", note)
    return lambda: sum(sizes)


def send_in_pieces(raw, pieces, n_read):
    """Send each piece once the server has read what came before, so that it never reads two as one."""
    for piece in pieces:
        n_bytes = n_read() + len(piece)
        raw.sock.sendall(piece)
        wait_until(lambda: n_read() == n_bytes)  # noqa: B023 - it is called here only


def answers_to(raw, pieces, n):
    """The statuses and ids of `n` answers to what is sent."""
    for piece in pieces:
        raw.sock.sendall(piece)
    file, found = raw.sock.makefile("rb"), []  # one for all: it reads ahead
    file.close = lambda: None
    for _ in range(n):
        answer = http.client.HTTPResponse(SimpleNamespace(makefile=lambda _: file), method="POST")
        answer.begin()
        answer.read()
        found.append((answer.status, answer.headers["x-request-id"]))
    return found


@pytest.fixture
def raw(full):
    connection = http.client.HTTPConnection(full.url.removeprefix("http://"), timeout=PATIENCE_S)
    connection.connect()
    yield connection
    connection.close()


def test_a_head_that_was_refused_is_known_again(full, raw, monkeypatch, n_read):
    parsed, whole = [], Connection.on_headers_complete
    monkeypatch.setattr(Connection, "on_headers_complete", lambda self: (parsed.append(self.url), whole(self))[1])
    raw.close()
    raw.connect()  # a parser asks for what it calls when it is made
    one, other = raw_request(b'{"a": 1}'), raw_request(b'{"a": 2}')
    first, again = answers_to(raw, [one], 1)[0], answers_to(raw, [other], 1)[0]
    assert first[0] == again[0] == 429 and first[1] != again[1] and len(parsed) == 1
    send_in_pieces(raw, [one[:40], one[40:]], n_read)
    assert answers_to(raw, [], 1)[0][0] == 429 and len(parsed) == 2, "in pieces"
    send_in_pieces(raw, [one[:-3], one[-3:]], n_read)
    assert answers_to(raw, [], 1)[0][0] == 429 and len(parsed) == 3, "the body late"
    raw.sock.sendall(one + other)
    both = b""
    while both.count(b'"overloaded"') < 2:
        both += raw.sock.recv(65536)
    assert both.count(b"HTTP/1.1 429 ") == 2 and len(parsed) == 5, "two at once"
    named = raw_request(b"{}", more="x-request-id: mine\r\n")
    n = len(parsed)
    assert [answers_to(raw, [named], 1)[0] for _ in range(2)] == [(429, "mine")] * 2 and len(parsed) == n + 1
    for more in ("origin: https://chat.example.com\r\n", "x-priority: 1\r\n"):
        odd = raw_request(b'{"a": 1}', more=more)
        assert answers_to(raw, [odd], 1)[0][0] == 429


@pytest.fixture
def seen(full, raw, monkeypatch):
    """The one connection, before each of its heads is acted on, and whether it is about to be closed."""
    found, whole = [], Connection.on_headers_complete

    def note(self):
        found.append((self, self.timeout_keep_alive_task is not None))
        return whole(self)

    monkeypatch.setattr(Connection, "on_headers_complete", note)
    raw.close()
    raw.connect()  # a parser asks for what it calls when it is made
    return found


def test_a_refused_connection_is_closed_when_nothing_follows_and_only_then(raw, seen, n_read):
    asked = raw_request(b'{"a": 1}')
    send_in_pieces(raw, [asked[:-3], asked[-3:]], n_read)
    answers_to(raw, [], 1)
    wait_until(lambda: seen[0][0].timeout_keep_alive_task is not None)  # though the body came after the answer
    raw.sock.sendall(asked + raw_request(b"", method="GET", path="/version"))
    wait_until(lambda: len(seen) == 3)
    assert not any(about_to_be for _, about_to_be in seen)


def test_a_client_that_does_not_read_is_answered_no_faster(full, raw, seen):
    asked = raw_request(b'{"a": 1}')
    answers_to(raw, [asked], 1)
    connection = seen[0][0]
    connection.flow.pause_writing()  # as the transport does, whose buffer is full
    for _ in range(3):
        raw.sock.sendall(asked)
    raw.sock.settimeout(0.1)
    with pytest.raises(TimeoutError):
        raw.sock.recv(1)
    raw.sock.settimeout(PATIENCE_S)
    connection.loop.call_soon_threadsafe(connection.flow.resume_writing)
    assert [status for status, _ in answers_to(raw, [], 3)] == [429] * 3


def test_a_known_head_is_let_in_once_there_is_room(start):
    server = start(max_requests=1)
    place = server.sessions.overload.take()
    raw = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=PATIENCE_S)
    raw.connect()
    body = b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}'
    asked = raw_request(body)
    assert [answers_to(raw, [asked], 1)[0][0] for _ in range(2)] == [429, 429]
    place.leave()
    assert [answers_to(raw, [asked], 1)[0][0] for _ in range(2)] == [200, 200]
    raw.close()
    server.check_idle()


def test_heads_are_forgotten_once_there_are_too_many():
    door = Door(None, None, Protocols(()))
    for i in range(2500):
        door.remember(b"POST / %d" % i, None)
        assert 0 < len(door.heads) <= 1024 and b"POST / %d" % i in door.heads


def test_a_flood_of_refusals_leaves_few_lines(full, raw, caplog):
    caplog.set_level(logging.INFO, "hydrainfer.access")
    asked = raw_request(b"{}")
    for _ in range(60):
        answers_to(raw, [asked], 1)
    lines = lambda: [r.getMessage() for r in caplog.records if r.name == "hydrainfer.access"]  # noqa: E731
    n_of = lambda line: int(line.partition(" n=")[2] or 1)  # noqa: E731
    wait_until(lambda: sum(map(n_of, lines())) == 60)
    assert len(lines()) < 60 and all(line.startswith("POST /v1/chat/completions 429 0.000s ") for line in lines())


class Reserved:
    """Room for those alone who were told to come now."""

    def __init__(self, monkeypatch, server):
        self.queue, self.promised_s = server.sessions.overload.queues["text"], 1000.0
        monkeypatch.setattr(self.queue, "has_room", lambda now, share, *, favoured: favoured)
        monkeypatch.setattr(self.queue, "promise", lambda now: self.promised_s)


@pytest.mark.parametrize("pieces", [1, 2], ids=["at-once", "body-later"])
@pytest.mark.parametrize("size", [10, 100_000])
def test_a_client_that_comes_back_when_told_is_known_by_its_body(start, monkeypatch, size, pieces):
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

    raw = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=PATIENCE_S)
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


def test_a_request_whose_body_does_not_come_is_answered(start, monkeypatch):
    server = start()
    reserved = Reserved(monkeypatch, server)
    assert server.chat().status_code == 429
    raw = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=PATIENCE_S)
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
    raw = http.client.HTTPConnection(full.url.removeprefix("http://"), timeout=PATIENCE_S)
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


def said_by(raw):
    """What the server sends until it closes the connection."""
    said = b""
    while piece := raw.sock.recv(65536):
        said += piece
    return said


@pytest.fixture
def fresh(start):
    """A function that connects to a server with room."""
    server, made = start(), []

    def connect():
        made.append(http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=PATIENCE_S))
        made[-1].connect()
        return made[-1]

    yield connect
    for raw in made:
        raw.close()
    server.check_idle()


LINE = b"x-more: " + b"a" * 990 + b"\r\n"


@pytest.mark.parametrize("begin", [b"GET /version HTTP/1.1\r\n", b"GET /version HTTP/1.1\r\nx: ", b"GET /"])
def test_a_head_without_an_end_is_refused(fresh, begin):
    raw, more = fresh(), LINE if begin.endswith(b"\n") else b"a" * 1000
    raw.sock.sendall(begin + more * 64)
    raw.sock.settimeout(0.1)
    with pytest.raises(TimeoutError):
        raw.sock.recv(1)
    raw.sock.settimeout(PATIENCE_S)
    raw.sock.sendall(more * 2)
    head, _, body = said_by(raw).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ") and b"connection: close" in head
    error = json.loads(body)["error"]
    assert "65536" in error.pop("message")
    assert error == {"type": "invalid_request_error", "param": None, "code": "head_too_large"}
    raw = fresh()
    raw.sock.sendall(raw_request(b"", method="GET", path="/metrics", more="connection: close\r\n"))
    assert b'http_requests_total{handler="none",method="",status="431"} 1.0' in said_by(raw)


def test_a_whole_head_over_the_limit_is_refused_and_its_body_too(fresh):
    for n, status in ((60, 200), (70, 431)):
        raw = fresh()
        raw.sock.sendall(raw_request(b"{" * 9, method="GET", path="/version", more=(LINE * n).decode()))
        assert raw.sock.recv(65536).startswith(b"HTTP/1.1 %d " % status)


def test_trailers_without_an_end_close_the_connection(fresh, n_read):
    raw = fresh()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    send_in_pieces(raw, [head, b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"], n_read)
    raw.sock.sendall(LINE * 70)
    assert said_by(raw) == b""


def test_a_large_body_is_no_head(fresh, n_read):
    raw, body = fresh(), b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}' + b" " * 300_000
    asked = raw_request(body)
    pieces = [asked[i : i + 50_000] for i in range(0, len(asked), 50_000)]
    send_in_pieces(raw, pieces, n_read)
    assert answers_to(raw, [], 1)[0][0] == 200
    raw.sock.sendall(asked + asked[:50])
    raw.sock.sendall(asked[50:])
    assert [status for status, _ in answers_to(raw, [], 2)] == [200, 200]


def test_a_connection_that_sends_no_head_in_time_is_closed(fresh, monkeypatch, n_read):
    late = Connection._on_late

    def late_once_read(self):
        """However late the client below sends, no timer comes before."""
        if n_read():
            late(self)
        else:
            self._head_timer = self.loop.call_later(0.01, self._on_late)

    monkeypatch.setattr(Connection, "_on_late", late_once_read)
    monkeypatch.setattr("hydrainfer.server.door.connection._HEAD_S", 0.3)
    silent, begun = fresh(), fresh()
    begun.sock.sendall(b"GET /version HTTP/1.1\r\nx: y\r\n")
    head, _, body = said_by(begun).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ") and b'"head_timeout"' in body
    assert said_by(silent) == b""


def test_a_connection_that_stops_within_its_second_head_is_closed(fresh, monkeypatch):
    for begin in (b"GET /v", b"\r\n"):
        raw = fresh()
        assert answers_to(raw, [raw_request(b"", method="GET", path="/version")], 1)[0][0] == 200
        with monkeypatch.context() as m:
            m.setattr("hydrainfer.server.door.connection._HEAD_S", 0.3)
            raw.sock.sendall(begin)
            assert said_by(raw).startswith(b"HTTP/1.1 408 ")


def test_an_answer_or_a_pause_that_takes_longer_than_a_head_may_is_not_cut(start, monkeypatch, n_read):
    lates, late = [], Connection._on_late
    monkeypatch.setattr(Connection, "_on_late", lambda self: (lates.append(1), late(self)))
    server = start(step_s=0.05)
    raw = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=PATIENCE_S)
    raw.connect()
    asked = raw_request(b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}')
    server.engine.hold.set()
    send_in_pieces(raw, [asked], n_read)
    monkeypatch.setattr("hydrainfer.server.door.connection._HEAD_S", 0.1)
    send_in_pieces(raw, [asked[:50]], n_read)  # the second head begins while the first request is answered
    wait_until(lambda: len(lates) >= 2)
    send_in_pieces(raw, [asked[50:]], n_read)
    server.engine.hold.clear()
    assert [status for status, _ in answers_to(raw, [], 2)] == [200, 200]
    time.sleep(0.3)
    assert answers_to(raw, [asked], 1)[0][0] == 200
    raw.close()
    server.check_idle()
