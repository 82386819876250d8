"""`progress`: a stream says what its request does until the first token, in chunks without choices."""

import json

import pytest

from hydrainfer.core import ErrorInfo
from tests.waiting import wait_until

pytestmark = pytest.mark.cpu
ASK = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "progress": True}


def chunks(lines):
    return (json.loads(line[6:]) for line in lines if line.startswith("data: {"))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_says_each_interval_until_the_first_token(start, path):
    server = start(step_s=0.3)
    server.engine.hold.set()
    asked = ASK if path.endswith("chat/completions") else {"prompt": "x", "stream": True, "progress": True}
    with server.http.stream("POST", path, json={**asked, "max_tokens": 3}) as answer:
        read = chunks(answer.iter_lines())
        first = next(one for one in read if "progress" in one)
        assert first["progress"] == {"interval": "prefill_queue"} and first["choices"] == []
        server.engine.hold.clear()
        rest = list(read)
    told = [one["progress"]["interval"] for one in rest if "progress" in one]
    assert set(told) <= {"prefill"} and not any("progress" in one for one in rest[len(told) :])
    assert rest[-1]["choices"][0]["finish_reason"] == "length"
    server.check_idle()


def test_an_early_error_ends_the_stream(start):
    server = start()
    server.engine.hold.set()
    server.fail = ErrorInfo(503, "no room", None)
    with server.http.stream("POST", "/v1/chat/completions", json=ASK) as answer:
        (*_, last) = chunks(answer.iter_lines())
    assert last["error"]["message"] == "no room"
    server.check_idle()


def test_hanging_up_ends_the_request(start):
    server = start()
    server.engine.hold.set()
    with server.http.stream("POST", "/v1/chat/completions", json=ASK) as answer:
        next(chunks(answer.iter_lines()))
    wait_until(lambda: server.engine.cancelled)
    server.engine.hold.clear()
    server.check_idle()


def test_is_for_streams_and_off_by_default(server):
    answer = server.chat(progress=True)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "progress"
    text = server.chat(stream=True).text
    assert '"progress"' not in text
