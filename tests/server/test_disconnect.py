"""Who goes away stops being worked for; whoever waits too long is told; whatever happens, nothing is left."""

import asyncio
import json
import threading
import time
from contextlib import suppress

import httpx
import numpy as np
import pytest

from hydrainfer.core import ErrorInfo, Output
from tests.server.conftest import image_part
from tests.waiting import HELD_S, PATIENCE_S, wait_until

pytestmark = pytest.mark.cpu
BODY = {"model": "tiny", "messages": [{"role": "user", "content": [image_part(), {"type": "text", "text": "hi"}]}]}
ENDLESS = {**BODY, "ignore_eos": True}


def test_leaving_a_stream_cancels(start):
    server = start(step_s=0.01)
    with server.http.stream("POST", "/v1/chat/completions", json={**ENDLESS, "stream": True, "n": 2}) as response:
        lines = response.iter_lines()
        while "content" not in next(lines):
            pass
    wait_until(lambda: len(server.engine.cancelled) == 2)
    server.check_idle()
    assert server.engine.n_steps < 300


async def ask_and_leave(server, body, reached=None, path="/v1/chat/completions"):
    """Ask, and leave once `reached` is not empty: by default, when the request has reached the engine."""
    reached = server.engine.submitted if reached is None else reached
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client, asyncio.timeout(PATIENCE_S):
        task = asyncio.ensure_future(client.post(path, json=body))
        while not reached:
            await asyncio.sleep(0.005)
        task.cancel()


def test_leaving_before_the_whole_answer_cancels(start):
    server = start(step_s=0.01)
    asyncio.run(ask_and_leave(server, ENDLESS))
    wait_until(lambda: len(server.engine.cancelled) == 1)
    server.check_idle()


def test_leaving_a_frozen_engine_while_a_stream_has_not_begun(start):
    server = start()
    server.engine.hold.set()
    asyncio.run(ask_and_leave(server, {**ENDLESS, "stream": True}))
    wait_until(lambda: len(server.engine.cancelled) == 1)
    server.check_idle()


def test_leaving_while_the_request_is_prepared(start, monkeypatch):
    server = start()
    prepare = server.intake.processor.chat
    begun, ended, may_prepare = [], threading.Event(), threading.Event()

    def slowly(*args, **options):
        begun.append(1)
        try:
            assert may_prepare.wait(HELD_S)
            return prepare(*args, **options)
        finally:
            ended.set()

    monkeypatch.setattr(server.intake.processor, "chat", slowly)
    asyncio.run(ask_and_leave(server, BODY, begun))
    wait_until(lambda: server.sessions.n_live == 0)
    may_prepare.set()  # pictures that nobody wants any more
    assert ended.wait(PATIENCE_S)
    server.check_idle()
    assert not server.engine.submitted


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens"])
def test_leaving_while_a_prompt_is_counted(start, monkeypatch, path):
    server, counts = start(), []

    async def slowly(*_):
        counts.append(1)
        try:
            await asyncio.sleep(60)
        finally:
            counts.append(-1)

    monkeypatch.setattr(server.intake, "encode_chat", slowly)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    asyncio.run(ask_and_leave(server, body, counts, path))
    wait_until(lambda: counts == [1, -1])
    server.check_idle()


def test_an_error_in_the_middle_of_a_stream_is_an_event(start):
    server = start(step_s=0.01)
    with server.http.stream("POST", "/v1/chat/completions", json={**ENDLESS, "stream": True, "n": 2}) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        while "content" not in next(lines):
            pass
        victim, other = (request.id for request in server.engine.submitted)
        failed = Output(victim, finish_reason="error", error=ErrorInfo(500, "a step failed"))
        server.sessions.sink([failed])
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["message"] == "a step failed"
    wait_until(lambda: other in server.engine.cancelled)


def test_too_many_requests_are_429(start):
    server = start(step_s=0.01, max_requests=2)
    with server.http.stream("POST", "/v1/chat/completions", json={**ENDLESS, "stream": True, "n": 2}) as response:
        lines = response.iter_lines()  # kept: a client hangs up when nobody has them any more
        next(lines)
        server.engine.hold.set()
        refused = server.chat()
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        server.engine.hold.clear()
    server.check_idle()
    assert server.chat(n=3, max_tokens=1).status_code == 200  # alone, even more than the bound


def test_too_many_pictures_are_429_and_413_where_waiting_is_no_use(start):
    server = start(pixel_bytes=10_000)
    two = [image_part(), {"type": "text", "text": "x"}]
    assert server.chat(two).status_code == 200
    from tests.server.conftest import picture

    held = server.pixels.put(b"of another request", np.zeros(5_000, np.uint8))
    refused = server.chat(two)
    assert refused.status_code == 429 and "retry-after" in refused.headers
    server.pixels.release(held)
    assert server.chat([image_part(), image_part(picture(1))]).status_code == 413
    server.check_idle()


def test_the_session_guards_the_deadline_of_a_frozen_engine(start, monkeypatch):
    monkeypatch.setattr("hydrainfer.server.live.session.DEADLINE_GRACE_S", 0.1)
    server = start(timeout_s=60.0)
    server.sessions.clock = lambda: time.monotonic() + (59.8 if server.engine.submitted else 0.0)
    server.engine.hold.set()
    response = server.chat()
    assert response.status_code == 504 and response.json()["error"]["type"] == "timeout_error"
    assert server.engine.cancelled
    server.check_idle()


@pytest.mark.usefixtures("early_headers")
def test_a_long_wait_sends_the_headers_first(start):
    server = start()
    server.engine.hold.set()
    with server.http.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        assert "assistant" in next(lines)
        server.engine.hold.clear()
        assert [line for line in lines if line][-1] == "data: [DONE]"
    server.check_idle()


def test_a_shutdown_ends_streams_with_an_error(start):
    server = start(step_s=0.01)
    with server.http.stream("POST", "/v1/chat/completions", json={**ENDLESS, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        server.engine.close()
        rest = [line for line in lines if line]
    assert "service_unavailable" in rest[-2]


def test_many_clients_coming_and_going(start):
    server = start(step_s=0.002)

    async def one(client, i):
        body = {**ENDLESS, "stream": bool(i % 2), "max_tokens": 5 + 20 * (i % 3), "n": 1 + i % 2}
        with suppress(httpx.TimeoutException):
            await client.post("/v1/chat/completions", json=body, timeout=0.01 * (i % 9) + 0.01 if i % 4 else PATIENCE_S)

    async def all_of_them():
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client:
            await asyncio.gather(*(one(client, i) for i in range(40)))

    asyncio.run(all_of_them())
    server.check_idle()
    assert server.chat().status_code == 200
