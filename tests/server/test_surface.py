"""Health, metrics, version, tokenising, keys."""

import pytest

from tests.server.conftest import image_part

pytestmark = pytest.mark.cpu


def test_health_names_the_stage_that_makes_no_progress(start):
    server = start(stall_s=5.0)
    assert server.http.get("/health").json() == {"status": "ok"}
    server.engine.stalled_s = 6.0
    response = server.http.get("/health")
    assert response.status_code == 503 and response.json()["stage"] == "admission"
    server.engine.stalled_s = float("inf")
    assert "stopped" in server.http.get("/health").json()["message"]


def test_metrics_and_version(server):
    response = server.http.get("/metrics")
    assert response.text == "fake_metric 1\n" and response.headers["content-type"].startswith("text/plain")
    assert server.http.get("/version").json() == {"version": "9"}


def test_tokenize_and_back(server):
    made = server.post("/tokenize", prompt="hello world", return_token_strs=True).json()
    assert made["count"] == len(made["tokens"]) == len(made["token_strs"]) and made["max_model_len"] == 512
    assert server.post("/detokenize", tokens=made["tokens"]).json() == {"prompt": "hello world"}
    messages = [{"role": "user", "content": [image_part(), {"type": "text", "text": "hi"}]}]
    chat = server.post("/tokenize", messages=messages).json()["tokens"]
    server.chat([image_part(), {"type": "text", "text": "hi"}])
    assert tuple(chat) == server.engine.submitted[-1].prompt_ids
    for body in ({}, {"prompt": "a", "messages": messages}, {"prompt": 3}):
        assert server.post("/tokenize", **body).status_code == 400
    assert server.post("/detokenize", tokens=[10**9]).status_code == 400


def test_api_keys(start):
    server = start(api_keys=("one", "two"))
    for path in ("/v1/models", "/v1/models/tiny"):
        refused = server.http.get(path)
        assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
        assert server.http.get(path, headers={"Authorization": "Bearer two"}).status_code == 200
        assert server.http.get(path, headers={"Authorization": "Bearer three"}).status_code == 401
    assert server.chat().status_code == 401 and server.post("/tokenize", prompt="x").status_code == 401
    assert server.http.get("/health").status_code == server.http.get("/metrics").status_code == 200


def test_every_answer_has_an_id(server):
    assert server.chat(max_tokens=1).headers["x-request-id"].startswith("chatcmpl-")
