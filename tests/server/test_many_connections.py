"""Connections that send nothing shut nobody out."""

import logging
import resource
import socket
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

from hydrainfer.server.door.open_connections import OpenConnections
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.cpu


def connect(server):
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


def test_new_requests_are_served_beside_more_silent_connections_than_may_be_open(start, caplog):
    caplog.set_level(logging.WARNING)
    server = start(max_connections=40)
    with ExitStack() as stack:
        asked = stack.enter_context(connect(server))
        asked.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
        assert asked.recv(65536).startswith(b"HTTP/1.1 200 ")
        silent = [stack.enter_context(connect(server)) for _ in range(100)]
        silent[60].sendall(b"GET /health HTTP/1.1\r\n")  # no whole head
        begin_s = time.monotonic()
        assert server.http.get("/health").status_code == 200
        assert time.monotonic() - begin_s < 10.0
        assert server.chat("hi").status_code == 200
        for one in (asked, *silent[:50]):
            assert one.recv(1) == b"", "the oldest were closed"
        silent[-1].settimeout(0.05)
        with pytest.raises(TimeoutError):
            silent[-1].recv(1)
    lines = [r.getMessage() for r in caplog.records if "connections are open" in r.getMessage()]
    assert 1 <= len(lines) <= 5 and lines[0].startswith("40 connections are open")
    server.check_idle()


def test_an_answer_under_way_is_not_cut(start):
    server = start(max_connections=4, step_s=0.005)
    with ExitStack() as stack, server.http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as r:
        lines = r.iter_lines()
        next(lines)
        for _ in range(20):
            stack.enter_context(connect(server))
        assert list(lines)[-2] == "data: [DONE]"


class FakeConnection:
    def __init__(self, between_requests=True):
        self.between_requests, self.closed = between_requests, False

    def close(self):
        self.closed = True


def test_the_oldest_without_a_request_is_closed_and_the_new_one_if_all_have_one():
    connections = OpenConnections(3)
    busy, first, second, third = (FakeConnection(i > 0) for i in range(4))
    for one in (busy, first, second, third):
        connections.add(one)
    assert first.closed and not (busy.closed or second.closed or third.closed) and len(connections) == 3
    second.between_requests = third.between_requests = False
    connections.add(late := FakeConnection())
    assert late.closed and len(connections) == 3
    connections.remove(late)
    connections.remove(busy)
    connections.add(another := FakeConnection())
    assert not another.closed and len(connections) == 3


def test_the_soft_limit_of_open_files_becomes_the_hard_one():
    script = "from hydrainfer.machine import raise_open_files; import resource as r; print(raise_open_files());"
    script += "print(*r.getrlimit(r.RLIMIT_NOFILE))"
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(hard, 3000)
    limits = (min(256, most), most)
    done = subprocess.run(
        [sys.executable, "-c", script],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits),
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == [str(most)] * 3, done.stderr
