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
