"""`timings`: the official client reads where the time of its answer went."""

import json

import openai
import pytest

from hydrainfer.metrics import INTERVALS

pytestmark = pytest.mark.cpu
ASK = [{"role": "user", "content": "hi"}]
WANTED = {"timings": True}


@pytest.fixture
def client(server):
    with server.openai() as client:
        yield client


def check(timings):
    assert set(timings) - {"choices"} == {
        *("ttft_s", "e2e_s", "n_preemptions", "n_migrations", "n_recoveries", "n_steps", "n_drafted", "n_accepted"),
        *(f"{name}_s" for name in INTERVALS),
    }
    assert sum(timings[f"{name}_s"] for name in INTERVALS) == pytest.approx(timings["e2e_s"], abs=1e-5)
    assert 0 < timings["ttft_s"] <= timings["e2e_s"] and timings["encode_s"] == 0.0 < timings["decode_s"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", [None, "engine,"], ids=["ended", "stop string"])
def test_one_choice(client, stream, stop):
    """A stop string ends the answer before the engine knows; the answer waits for its word."""
    more = {"stream_options": {"include_usage": True}} if stream else {}
    chat = client.chat.completions.create(
        model="tiny", messages=ASK, stop=stop, stream=stream, extra_body=WANTED, **more
    )
    text = client.completions.create(
        model="tiny", prompt="x", max_tokens=50, stop=stop, stream=stream, extra_body=WANTED, **more
    )
    for answer in (chat, text):
        if stream:
            *chunks, answer = answer
            assert all(chunk.usage is None for chunk in chunks)
        check(answer.usage.hydrainfer)
        assert "choices" not in answer.usage.hydrainfer and answer.usage.total_tokens > 0


@pytest.mark.parametrize("stream", [False, True])
def test_several_choices(client, stream):
    more = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}} if stream else {}
    answer = client.chat.completions.create(model="tiny", messages=ASK, n=3, stream=stream, extra_body=WANTED, **more)
    if stream:
        *chunks, answer = answer
        assert all(not hasattr(chunk.usage, "hydrainfer") for chunk in chunks)
    timings = answer.usage.hydrainfer
    for one in (timings, *timings["choices"]):
        check(one)
    assert len(timings["choices"]) == 3
    assert timings == {**timings["choices"][0], "choices": timings["choices"]}


def test_only_who_asks_gets_them(client, server):
    for extra in ({}, {"timings": False}, {"timings": None}):
        answer = client.chat.completions.create(model="tiny", messages=ASK, extra_body=extra)
        assert not hasattr(answer.usage, "hydrainfer")
    assert all(chunk.usage is None for chunk in client.chat.completions.create(
        model="tiny", messages=ASK, stream=True, extra_body=WANTED
    ))  # fmt: skip
    with pytest.raises(openai.BadRequestError, match="timings"):
        client.chat.completions.create(model="tiny", messages=ASK, extra_body={"timings": 3})
    server.check_idle()
    assert not server.recorder._done  # whether anybody wants it or not


def test_an_engine_that_tells_nothing(start):
    server = start()
    server.sessions.attach(server.engine)  # without timings
    assert server.chat(timings=True).json()["usage"]["hydrainfer"] is None
    assert server.chat(timings=True, n=2).json()["usage"]["hydrainfer"] == {"choices": [None, None]}


def test_an_engine_that_does_not_end_holds_no_answer_up(start, monkeypatch):
    monkeypatch.setattr("hydrainfer.server.openai.answers.SETTLED_S", 0.05)
    server = start(step_s=0.01)
    cancel, ignored = server.engine.cancel, []
    monkeypatch.setattr(server.engine, "cancel", ignored.extend)
    asked = {"stop": ".", "ignore_eos": True, "max_tokens": 400, "timings": True}
    whole = server.chat(**asked).json()["usage"]
    streamed = server.chat(**asked, stream=True, stream_options={"include_usage": True}).text.split("\n\n")
    assert whole == json.loads(streamed[-3].removeprefix("data: "))["usage"] and whole["hydrainfer"] is None
    assert len(ignored) == server.engine.n_live == 2
    cancel(ignored)
    server.check_idle()
