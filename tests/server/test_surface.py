"""Health, metrics, version, tokenising, keys."""

import pytest

from hydrainfer.core import InstanceInfo, InstanceStats
from hydrainfer.server import Tenants
from tests.server.conftest import image_part

pytestmark = pytest.mark.cpu


def test_health_names_the_stage_that_makes_no_progress(start):
    server = start(stall_s=5.0)
    assert server.http.get("/health").json() == {"status": "ok"}
    server.engine.stalled_s = 6.0
    response = server.http.get("/health")
    assert response.status_code == 503 and response.json()["stage"] == "admission"
    assert response.json()["instance"] == "EPD0" and int(response.headers["retry-after"]) >= 1
    server.engine.stalled_s = float("inf")
    assert "EPD0 has stopped" in server.http.get("/health").json()["message"]


def info(name, state="alive", stalled_s=0.0, **counts):
    at_rest = {"n_encoding": 0, "n_prefilling": 0, "n_decoding": 0, "n_migrating": 0, "n_arriving": 0, "n_landed": 0}
    stats = InstanceStats(
        name[:-1], 1, 2, cache_blocks={"kv": (10, 5, 3)}, pictures_found=0, pictures_wanted=0, n_preemptions=4,
        n_steps=9, stalled_s=stalled_s, blocks_pulled={"kv": 7}, **(at_rest | counts),
    )  # fmt: skip
    return InstanceInfo(name, name[:-1], state, incarnation=3, pid=77, heard_s=0.12345, stats=stats)


@pytest.mark.parametrize("state", ["alive", "suspect"])
def test_health_names_the_stage_that_nobody_runs(start, state):
    server = start()
    server.engine.infos = [info("EP0"), info("D0", "dead"), info("D1", state)]
    assert server.http.get("/health").json() == {"status": "ok"}
    server.engine.infos[2] = info("D1", "dead")
    response = server.http.get("/health")
    assert response.status_code == 503 and int(response.headers["retry-after"]) >= 1
    assert response.json() == {"status": "unavailable", "stage": "decode", "message": "no instance runs decode now"}
    why = "D0 could not be started again: config.json is missing"
    server.engine.infos[1] = InstanceInfo("D0", "D", "dead", trouble=why)
    assert server.http.get("/health").json()["message"] == f"no instance runs decode now: {why}"
    assert server.http.get("/v1/instances").json()["data"][1]["trouble"] == why
    server.engine.infos = [info("P0"), info("D0")]  # a layout without an encoder, for text only
    assert server.http.get("/health").json() == {"status": "ok"}


def test_health_names_the_instance_that_is_stuck(start):
    server = start(stall_s=5.0)
    dead = info("P1", "dead", stalled_s=99.0, n_prefilling=1)
    server.engine.infos = [info("E0", stalled_s=6.0, n_encoding=1), info("P0"), dead, info("D0", stalled_s=8.0)]
    assert server.http.get("/health").json()["stage"] == "admission"
    server.engine.infos[3] = info("D0", stalled_s=8.0, n_arriving=1)
    response = server.http.get("/health")
    assert response.status_code == 503
    assert response.json() == {
        "status": "stalled",
        "instance": "D0",
        "stage": "migration",
        "message": "D0 has made no progress in migration for 8 s",
    }


def test_instances(start):
    server = start(tenants=Tenants(["k"]))
    assert server.http.get("/v1/instances").status_code == 401
    headers = {"Authorization": "Bearer k"}
    (one,) = server.http.get("/v1/instances", headers=headers).json()["data"]
    assert (one["id"], one["role"], one["state"], one["load"]["waiting"]) == ("EPD0", "EPD", "alive", 0)
    server.engine.infos = [info("EP0", "suspect", n_migrating=2), info("D0", "dead"), InstanceInfo("D1", "D", "dead")]
    body = server.http.get("/v1/instances", headers=headers).json()
    assert body["object"] == "list" and [d["load"] for d in body["data"][1:]] == [None, None]
    assert body["data"][0] == {
        "id": "EP0",
        "object": "instance",
        "role": "EP",
        "state": "suspect",
        "incarnation": 3,
        "pid": 77,
        "heard_s": 0.123,
        "load": {
            "waiting": 1,
            "running": 2,
            "encoding": 0,
            "prefilling": 0,
            "decoding": 0,
            "migrating": 2,
            "arriving": 0,
            "parked": 0,
            "cache_blocks": {"kv": {"total": 10, "leased": 5, "reusable": 3}},
            "preemptions": 4,
            "landed": 0,
            "blocks_pulled": {"kv": 7},
            "drafts": {},
        },
        "trouble": None,
    }


def test_metrics_and_version(server):
    response = server.http.get("/metrics")
    assert response.text.startswith("fake_metric 1\n") and response.headers["content-type"].startswith("text/plain")
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
    server = start(tenants=Tenants(["one", "two"]))
    for path in ("/v1/models", "/v1/models/tiny", "/v1/instances"):
        refused = server.http.get(path)
        assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
        assert server.http.get(path, headers={"Authorization": "Bearer two"}).status_code == 200
        assert server.http.get(path, headers={"Authorization": "Bearer three"}).status_code == 401
    assert server.chat().status_code == 401 and server.post("/tokenize", prompt="x").status_code == 401
    assert server.http.get("/health").status_code == server.http.get("/metrics").status_code == 200


def test_another_salt_makes_other_keys(server):
    words = [{"type": "text", "text": "long enough for a block or two of tokens, whatever they are. " * 4}]
    for more in ({}, {}, {"cache_salt": "mine"}, {"cache_salt": "mine"}, {"cache_salt": "yours"}):
        server.chat(words, **more)
    one, same, mine, again, yours = (r.keys for r in server.engine.submitted[-5:])
    assert one == same and mine == again and len({one, mine, yours}) == 3 and len(one) >= 32
    assert not {one[i : i + 16] for i in range(0, len(one), 16)} & {mine[i : i + 16] for i in range(0, len(mine), 16)}
    server.post("/v1/completions", prompt="a text", cache_salt="mine")
    assert server.engine.submitted[-1].keys[:16] == mine[:16]
    for more in ({}, {}, {"cache_salt": "mine"}, {"cache_salt": "mine"}, {"cache_salt": "yours"}):
        server.chat([*words, image_part()], **more)
    one, same, mine, again, yours = (r.media[0].key for r in server.engine.submitted[-5:])
    assert one == same and mine == again and len({one, mine, yours}) == 3, "nor are embeddings shared"
    for wrong in ("", 3):
        refused = server.chat(words, cache_salt=wrong)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "cache_salt")


def test_every_answer_has_an_id(server):
    assert server.chat(max_tokens=1).headers["x-request-id"].startswith("chatcmpl-")


def test_the_description_has_bodies_and_keys(server):
    """What `/docs` shows without a network."""
    made = server.http.get("/openapi.json").json()
    schemas = made["components"]["schemas"]
    for path, operations in made["paths"].items():
        for method, operation in operations.items():
            assert operation["summary"], path
            is_open = path in ("/health", "/ready", "/ping", "/load", "/metrics", "/version")
            assert ("security" in operation) == (not is_open)
            if path == "/reset_prefix_cache":
                assert (
                    operation["security"] == [{"key": []}]
                    and "operator" in operation["responses"]["403"]["description"]
                )
            if method == "post" and path != "/reset_prefix_cache":
                ref = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
                assert schemas[ref.rpartition("/")[2]]["properties"]
    assert {"/v1/chat/completions", "/v1/messages", "/api/tags", "/v1/models/{name}"} <= made["paths"].keys()
    assert schemas["ChatFields"]["required"] == ["messages"] and "ChatFields.StreamOptions" in schemas
    assert "web/docs.js" in server.http.get("/docs").text


@pytest.mark.parametrize("prefix", ["", "/hydra"])
def test_behind_a_proxy_that_strips_its_prefix_or_does_not(start, prefix):
    server = start(root_path="/hydra", max_requests=1, tenants=Tenants(["k"]))
    headers = {"Authorization": "Bearer k"}
    ask = {"messages": [{"role": "user", "content": "hi"}]}
    for path in ("/", "/docs", "/web/page.js", "/health"):
        assert server.http.get(prefix + path).status_code == 200
    assert server.http.get("/openapi.json").json()["servers"] == [{"url": "/hydra"}]
    assert server.http.post(f"{prefix}/v1/chat/completions", json=ask).status_code == 401, "the gate knows the path"
    for path in ("/v1/chat/completions", "/v1/messages"):
        made = server.http.post(prefix + path, json={**ask, "max_tokens": 3}, headers=headers)
        assert made.status_code == 200, made.text
    assert server.http.post(f"{prefix}/v1/messages", json={}, headers=headers).json()["type"] == "error"


TEMPLATE = """{% for m in messages %}{{ m.content }}{% endfor %}
{%- if thinking is defined and thinking %}THINK {{ 1 + thinking }}{% endif %}"""


def test_chat_template_kwargs(model, start):
    from hydrainfer.processor import load_description

    server = start(model=load_description(model.path, chat_template=TEMPLATE))
    said = lambda: server.model.tokenizer.decode(list(server.engine.submitted[-1].prompt_ids))  # noqa: E731
    server.chat("hi")
    assert "THINK" not in said()
    server.chat("hi", chat_template_kwargs={"thinking": True, "no_variable_of_it": 3})
    assert "THINK" in said()
    for kwargs in ({"chat_template": "x"}, {"tokenize": True}, {"messages": []}, {"bos_token": "x"}, {"thinking": "x"}):
        response = server.chat("hi", chat_template_kwargs=kwargs)
        assert response.status_code == 400, kwargs
        assert response.json()["error"]["param"] == "chat_template_kwargs"
    assert server.chat("hi", chat_template_kwargs={"thinking": "<image>"}).json()["error"]["code"]
    ids = server.post("/tokenize", messages=[{"role": "user", "content": "hi"}], chat_template_kwargs={"thinking": 1})
    assert ids.json()["count"] > 3
    assert server.post("/v1/completions", prompt="x", chat_template_kwargs={"a": 1}).status_code == 400
