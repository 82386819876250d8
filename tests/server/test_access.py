"""What is around every request: ids, the access log, keys, other origins, and what clients may write in other ways."""

import hashlib
import logging
import re
import socket
from contextlib import ExitStack

import pytest

from hydrainfer.core import ConfigError
from hydrainfer.server import Tenants, read_origins
from tests.waiting import wait_until

pytestmark = pytest.mark.cpu
HI = [{"role": "user", "content": "secret words"}]
PAGE = {"Origin": "https://chat.example.com"}


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, "hydrainfer.access")

    def said(n):
        """The `n` lines that have been written: each only after its answer has gone out."""
        found = lambda: [r.getMessage() for r in caplog.records if r.name == "hydrainfer.access"]  # noqa: E731
        wait_until(lambda: len(found()) >= n)
        assert len(found()) == n
        return found()

    return said


def test_an_id_comes_back_also_in_errors(server, lines):
    mine = {"X-Request-Id": "trace-17"}
    whole = server.http.post("/v1/chat/completions", json={"messages": HI}, headers=mine)
    streamed = server.http.post("/v1/chat/completions", json={"messages": HI, "stream": True}, headers=mine)
    wrong = server.http.post("/v1/chat/completions", json={"messages": 1}, headers=mine)
    broken = server.http.post("/v1/chat/completions", content=b"{", headers=mine)
    nowhere = server.http.get("/nothing?q=secret", headers=mine)
    answers = [whole, streamed, wrong, broken, nowhere]
    assert [r.status_code for r in answers] == [200, 200, 400, 400, 404]
    assert {r.headers["x-request-id"] for r in answers} == {"trace-17"}
    said = lines(5)
    assert not any("secret" in line for line in said)
    pattern = r"POST /v1/chat/completions 200 \d\.\d{3}s id=trace-17 run=chatcmpl-[0-9a-f]{32} client=127\.0\.0\.1"
    assert re.fullmatch(pattern, said[0]) and whole.json()["id"] in said[0]
    assert sum(re.fullmatch(pattern, line) is not None for line in said) == 2, "a stream's line may come late"
    assert any("GET /nothing 404 " in line for line in said)


def test_a_line_says_whose_request_it_is(start, lines, tmp_path):
    """Behind a proxy that is named, X-Forwarded-For is believed, from others it is not; the tenant has its name."""
    file = tmp_path / "tenants.yaml"
    file.write_text(f"a b: {{keys: ['sha256:{hashlib.sha256(b'key').hexdigest()}']}}")
    for trusted in (("127.0.0.0/8",), ()):
        server = start(proxies=trusted, tenants=Tenants((), file))
        mine = {"Authorization": "Bearer key", "X-Forwarded-For": "10.1.2.3"}
        assert server.http.post("/v1/chat/completions", json={"messages": HI}, headers=mine).status_code == 200
    assert server.http.post("/tokenize", json={"prompt": "hi"}, headers=mine).status_code == 200
    said = lines(3)
    assert said[0].endswith(" client=10.1.2.3 tenant=a%20b") and said[1].endswith(" client=127.0.0.1 tenant=a%20b")
    assert "POST /tokenize 200" in said[2] and said[2].endswith(" tenant=a%20b")


def test_an_id_is_made_where_none_is_given_or_it_is_odd(server, lines):
    for sent in ({}, {"X-Request-Id": "a b"}, {"X-Request-Id": "x" * 200}, {"X-Request-Id": ""}):
        assert server.http.get("/version", headers=sent).headers["x-request-id"].startswith("req-")
    assert all(re.search(r"^GET /version 200 .*id=req-[0-9a-f]{32} client=127\.0\.0\.1$", line) for line in lines(4))
    ids = {server.chat(max_tokens=1).headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3 and all(i.startswith("chatcmpl-") for i in ids)


def test_every_answer_is_counted(start):
    server = start(max_requests=1)
    server.chat(max_tokens=1)
    server.http.get("/v1/models/tiny")
    server.http.get("/v1/models/other")
    server.http.delete("/health")
    server.http.get("/one/of/many")
    place = server.sessions.overload.take()
    server.chat(), server.http.post("/v1/chat/completions", json={"messages": HI}, headers=PAGE)
    place.leave()
    counted = {
        ("/v1/chat/completions", "POST", "200"): 1,
        ("/v1/models/{name:path}", "GET", "200"): 1,
        ("/v1/models/{name:path}", "GET", "404"): 1,
        ("/health", "DELETE", "405"): 1,
        ("none", "GET", "404"): 1,
        ("/v1/chat/completions", "POST", "429"): 2,
    }
    pattern = r'http_requests_total\{handler="(.*)",method="(.*)",status="(.*)"\} (\d+)\.0'
    found = lambda: {tuple(n[:3]): int(n[3]) for n in re.findall(pattern, server.http.get("/metrics").text)}  # noqa: E731
    wait_until(lambda: counted.items() <= found().items())


def test_probes_are_silent_and_odd_paths_stay_one_line(server, lines):
    for path in ("/health", "/metrics", "/ready"):
        server.http.get(path)
    server.http.get("/a%0ab%20c")
    (line,) = lines(1)
    assert "GET /a%0ab%20c 404 " in line


def test_probes_are_silent_behind_a_proxy(start, lines):
    server = start(root_path="/hydra")
    for path in ("/hydra/health", "/health", "/hydra/metrics", "/hydra/version"):
        assert server.http.get(path).status_code == 200
    (line,) = lines(1)
    assert "GET /version 200 " in line


def test_errors_within_a_stream_are_in_the_log(start, lines):
    server = start(step_s=0.05)
    with server.http.stream("POST", "/v1/chat/completions", json={"messages": HI, "stream": True}) as response:
        chunks = response.iter_text()
        next(chunks)
        server.engine.close()
        assert '"error"' in "".join(chunks)
    (line,) = lines(1)
    assert " 200 " in line and line.endswith("error=service_unavailable"), line


def test_a_stream_that_is_left_is_in_the_log(start, lines):
    server = start(step_s=0.01)
    with server.http.stream(
        "POST", "/v1/chat/completions", json={"messages": HI, "stream": True, "ignore_eos": True}
    ) as response:
        next(response.iter_text())
    (line,) = lines(1)
    assert " 200 " in line and line.endswith("error=disconnected"), line


def test_an_unexpected_failure_has_an_id_and_other_origins_may_read_it(start, monkeypatch, lines):
    server = start(allowed_origins=("https://chat.example.com",))

    def broken(*_, **__):
        raise RuntimeError("inside")

    monkeypatch.setattr(server.intake.processor, "chat", broken)
    said = server.http.post("/v1/chat/completions", json={"messages": HI}, headers=PAGE)
    assert said.status_code == 500 and "inside" not in said.text and said.json()["error"]["type"] == "internal_error"
    assert said.headers["x-request-id"] and said.headers["access-control-allow-origin"] == PAGE["Origin"]
    assert " 500 " in lines(1)[0]


def test_other_origins(start):
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    closed, some, every = start(), start(allowed_origins=("https://chat.example.com",)), start(allowed_origins=("*",))
    said = closed.http.options("/v1/chat/completions", headers={**PAGE, **ask})
    assert said.status_code == 405 and "access-control-allow-origin" not in said.headers
    assert "access-control-allow-origin" not in closed.http.get("/v1/models", headers=PAGE).headers
    for server, allowed in ((some, PAGE["Origin"]), (every, "*")):
        said = server.http.options("/v1/chat/completions", headers={**PAGE, **ask})
        assert said.status_code == 200 and said.headers["access-control-allow-origin"] == allowed
        assert "authorization" in said.headers["access-control-allow-headers"].lower()
        for response in (
            server.http.post("/v1/chat/completions", json={"messages": HI}, headers=PAGE),
            server.http.post("/v1/chat/completions", json={"messages": 1}, headers=PAGE),
        ):
            assert response.headers["access-control-allow-origin"] == allowed
            assert "X-Request-Id" in response.headers["access-control-expose-headers"]
    stranger = {"Origin": "https://evil.example"}
    assert some.http.options("/v1/models", headers={**stranger, **ask}).status_code == 400
    assert "access-control-allow-origin" not in some.http.get("/v1/models", headers=stranger).headers


def test_origins_are_checked_at_start():
    assert read_origins(None) == () and read_origins("*") == ("*",)
    assert read_origins("https://a.example, http://localhost:3000") == ("https://a.example", "http://localhost:3000")
    for wrong in ("a.example", "https://a.example/", "https://a.example/x", "https://a.example,"):
        with pytest.raises(ConfigError, match="is no origin"):
            read_origins(wrong)


@pytest.mark.parametrize(
    ("header", "status"),
    [("Bearer k", 200), ("bearer k", 200), ("BEARER k", 200), ("Basic k", 401), ("k", 401), ("bearer K", 401)],
)
def test_the_scheme_of_a_key_has_no_case(start, header, status):
    server = start(tenants=Tenants(("k",)))
    assert server.http.get("/v1/models", headers={"Authorization": header}).status_code == status


def test_whole_numbers_may_have_a_point(server):
    answer = server.chat(max_tokens=3.0, n=2.0, seed=5.0, top_k=4.0)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 6
    assert server.engine.submitted[-1].sampling.top_k == 4
    for wrong in (3.5, "3", True):
        response = server.chat(max_tokens=wrong)
        assert response.status_code == 400 and response.json()["error"]["param"] == "max_tokens"


def test_health_may_be_asked_for_its_head(server):
    assert server.http.get("/load").json() == {"server_load": 0}
    for ask in (server.http.get, server.http.post):
        assert ask("/ping").json() == {"status": "ok"}
    said = server.http.head("/health")
    assert said.status_code == 200 and said.content == b""


def test_the_load_is_requests_not_choices(start):
    server = start(step_s=0.01)
    body = {"messages": HI, "ignore_eos": True, "stream": True, "n": 3}
    with ExitStack() as stack:
        streams = []  # kept: a client hangs up when nobody has them any more
        for n in (1, 2):
            stream = stack.enter_context(server.http.stream("POST", "/v1/chat/completions", json=body))
            streams.append(stream.iter_lines())
            next(streams[-1])
            assert server.http.get("/load").json() == {"server_load": n}
    wait_until(lambda: server.http.get("/load").json() == {"server_load": 0})


LOCAL = {"host": "127.0.0.1"}


def status_for(server, host, path="/v1/models"):
    return server.http.get(path, headers={"Host": host}).status_code


def test_an_open_server_on_loopback_is_not_used_under_a_name_of_the_web(start, lines):
    server = start(**LOCAL)
    for host in ("evil.example", "EVIL.example:8000", "localhost.evil.example", "evillocalhost", "[::1"):
        assert status_for(server, host) == 403, host
    said = server.http.post("/v1/chat/completions", json={"messages": HI}, headers={"Host": "evil.example"})
    error = said.json()["error"]
    assert said.status_code == 403 and error["code"] == "host_not_allowed" and error["type"] == "permission_error"
    assert "--api-key" in error["message"] and "--allowed-origins" in error["message"]
    assert status_for(server, "evil.example", "/") == status_for(server, "evil.example", "/metrics") == 403
    said = server.http.post("/v1/messages", json={}, headers={"Host": "evil.example"})
    assert said.json()["error"]["type"] == "permission_error"
    lines(9)


def test_names_of_this_machine_and_addresses_may_be_used(start):
    server = start(**LOCAL, allowed_origins=("https://chat.example.com:8443",))
    for host in (
        *("localhost", "LOCALHOST:8000", "localhost.", "a.localhost", "printer.local:1", "a.b.internal"),
        *("127.0.0.1", "127.0.0.1:80", "10.1.2.3:8000", "[::1]:8000", "[fe80::1]", ""),
        *(socket.gethostname(), "chat.example.com", "chat.example.com:8000"),
    ):
        assert status_for(server, host) == 200, host


@pytest.mark.parametrize(
    "settings",
    [
        {"host": "0.0.0.0"},
        {"host": "::"},
        {**LOCAL, "allowed_origins": ("*",)},
        {**LOCAL, "tenants": Tenants(("k",))},
    ],
    ids=["all-addresses", "all-addresses-6", "all-origins", "key"],
)
def test_any_name_may_be_used_otherwise(start, settings):
    server = start(**settings)
    said = server.http.get("/v1/models", headers={"Host": "chat.example.com", "Authorization": "Bearer k"})
    assert said.status_code == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost", "box.localhost"])
def test_loopback_has_many_names(start, host):
    assert status_for(start(host=host), "evil.example") == 403
