"""Tenants: a file of keys and limits, read again while the server runs."""

import hashlib
import logging
import time
from itertools import pairwise

import pytest

from hydrainfer.core import ConfigError, Overloaded, Unauthorized
from hydrainfer.server import Tenants
from hydrainfer.server.door.gate import Asked
from tests.server.test_overload import Clock
from tests.waiting import wait_until

pytestmark = pytest.mark.cpu


def key(name):
    return "sha256:" + hashlib.sha256(name.encode()).hexdigest()


@pytest.fixture
def write(tmp_path):
    path = tmp_path / "tenants.yaml"

    def write(text):
        path.write_text(text)
        return path

    return write


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    clock.now = 1_000_000_023.0  # a minute of `limits` began three seconds ago
    monkeypatch.setattr(time, "time", clock)
    return clock


ACME = f"acme: {{keys: [{key('a')}, {key('b')}], requests_per_minute: 6, tokens_per_minute: 1000, concurrency: 2}}"


def use(tenants, tenant, n_tokens=1):
    tenants.check(tenant)
    request = tenants.begin(tenant)
    request.charge(n_tokens)
    request.end()


def waste(tenants, tenant):
    tenants.check(tenant)
    tenants.begin(tenant).end()


def test_keys_of_the_file_and_of_the_option_open_it(write):
    tenants = Tenants(["own"], write(ACME))
    assert tenants.find("Bearer a").name == tenants.find("Bearer b").name == "acme"
    assert tenants.find("bearer a").name == "acme" and tenants.find("Bearer own").name == ""
    for header in ("", "a", "Bearer", "Bearer c", "Basic a", f"Bearer {key('a')}", "Bearer \udcff"):
        with pytest.raises(Unauthorized):
            tenants.find(header)
    assert Tenants().find("").name == "", "open to all"
    with pytest.raises(ConfigError, match="names no tenant"):
        Tenants((), write(""))


@pytest.mark.parametrize("name", ["schlüssel", "ключ-秘密-😀", "naïve\xff"])
@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
def test_keys_may_have_letters_beyond_ascii(write, name, header):
    for tenants in (Tenants([name]), Tenants((), write(f"acme: {{keys: [{key(name)}]}}"))):
        for encoding in ("utf-8", "latin-1"):
            try:
                sent = name.encode(encoding)
            except UnicodeEncodeError:
                continue
            value = sent if header == "x-api-key" else b"Bearer " + sent
            tenants.find(Asked.read([(header.encode(), value)]).authorization)
            for wrong in (value + b"\xc3\xbc", value[:-1], value.replace(sent, b"??????")):
                with pytest.raises(Unauthorized):
                    tenants.find(Asked.read([(header.encode(), wrong)]).authorization)


@pytest.mark.parametrize("wrong", ["x: 2026-13-01", "x: " + "[" * 5000, f"{ACME}\n{ACME}"], ids=["date", "deep", "2x"])
def test_a_file_that_cannot_be_read_leaves_the_tenants_as_before(write, wrong):
    tenants = Tenants((), write(ACME))
    write(wrong)
    with pytest.raises(ConfigError):
        tenants.reload()
    assert tenants.find("Bearer a").name == "acme"


def test_requests_per_minute_and_turns_for_the_refused(write, clock):
    tenants = Tenants((), write(ACME))
    acme = tenants.find("Bearer a")
    for _ in range(6):
        use(tenants, acme)
    turns = []
    for _ in range(5):
        with pytest.raises(Overloaded, match="6 requests per minute") as e:
            use(tenants, acme)
        turns.append(e.value.retry_after_s)
    assert [b - a for a, b in pairwise(turns)] == [pytest.approx(10.0)] * 4
    start_s = clock.now
    for turn in turns:
        clock.now = start_s + turn
        use(tenants, acme)


def test_tokens_beyond_the_limit_are_owed(write, clock):
    tenants = Tenants((), write(ACME))
    acme = tenants.find("Bearer a")
    use(tenants, acme, 2500)
    with pytest.raises(Overloaded, match="1000 tokens per minute"):
        use(tenants, acme)
    waited_s = 0.0
    while True:
        clock.now += 5.0
        waited_s += 5.0
        try:
            use(tenants, acme)
            break
        except Overloaded as e:
            assert e.retry_after_s > 0 and e.code == "tenant_limit"
            assert waited_s < 300.0
    assert waited_s >= 90.0, "2500 tokens take two and a half minutes, the first 1000 at once"


def test_requests_at_once(write):
    tenants = Tenants((), write(ACME.replace("requests_per_minute: 6, tokens_per_minute: 1000, ", "")))
    acme = tenants.find("Bearer a")
    for _ in range(2):
        tenants.check(acme)
        request = tenants.begin(acme)
    with pytest.raises(Overloaded, match="2 requests at once"):
        tenants.check(acme)
    request.end()
    tenants.check(acme)


def test_requests_that_end_before_their_work_cost_none_of_a_minute(write, clock):
    tenants = Tenants((), write(ACME))
    acme = tenants.find("Bearer a")
    for _ in range(59):
        waste(tenants, acme)
    for _ in range(6):
        use(tenants, acme)
    with pytest.raises(Overloaded, match="6 requests per minute"):
        tenants.check(acme)


def test_a_flood_of_requests_that_end_before_their_work_is_stopped(write, clock):
    tenants = Tenants((), write(ACME))
    acme = tenants.find("Bearer a")
    for _ in range(60):
        waste(tenants, acme)
    with pytest.raises(Overloaded, match="60 refused or cancelled requests per minute") as e:
        tenants.check(acme)
    clock.now += e.value.retry_after_s
    use(tenants, acme)


def test_requests_whose_work_may_still_begin_count_until_they_end(write, clock):
    """Else many that arrive at once would all be let in."""
    tenants = Tenants((), write(ACME.replace("concurrency: 2", "concurrency: 20")))
    acme = tenants.find("Bearer a")
    for _ in range(6):
        tenants.check(acme)
        waiting = tenants.begin(acme)
    with pytest.raises(Overloaded, match="6 requests per minute"):
        tenants.check(acme)
    waiting.end()
    tenants.check(acme)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("acme: {keys: [secret]}", "keys.*sha256sum"),
        (f"acme: {{keys: [{key('a')}], concurency: 1}}", "did you mean concurrency"),
        (f"acme: {{keys: [{key('a')}], concurrency: 0}}", ">= 1"),
        (f"acme: {{keys: [{key('a')}], top_priority: 9}}", "<= 2"),
        ("acme: {}", "keys"),
        ("acme:", "tenant acme: must hold keys and limits"),
        ("acme: 5", "tenant acme: must hold keys and limits"),
        ("acme: {keys: []}", "tenant acme: keys must hold at least one key"),
        (f"acme: {{keys: [{key('a')}], rpm: 60}}", "unknown option 'rpm'.*tenant acme"),
        (f"a: {{keys: [{key('a')}]}}\nb: {{keys: [{key('a')}]}}", "b and a have the same key"),
        ("- a", "keys and values"),
        *((text, "names no tenant") for text in ("", "# acme is on holiday\n", "null", "{}", "---\n", " \n\n")),
    ],
)
def test_a_wrong_file_is_one_line_and_changes_nothing(write, text, message):
    tenants = Tenants((), write(ACME))
    write(text)
    with pytest.raises(ConfigError, match=message) as e:
        tenants.reload()
    assert "\n" not in e.value.message
    assert tenants.find("Bearer a").name == "acme"


def test_a_file_that_is_read_again_counts_on(write, clock):
    tenants = Tenants((), write(ACME))
    for _ in range(6):
        use(tenants, tenants.find("Bearer a"))
    write(ACME.replace(key("b"), key("c")))
    assert tenants.reload() == (2, [])
    with pytest.raises(Unauthorized):
        tenants.find("Bearer b")
    with pytest.raises(Overloaded):
        tenants.check(tenants.find("Bearer c"))


def test_reloading_names_the_tenants_that_are_gone(write):
    others = f"\nzoe: {{keys: [{key('z')}]}}\nbob: {{keys: [{key('o')}]}}"
    tenants = Tenants((), write(ACME + others))
    write(ACME)
    assert tenants.reload() == (2, ["bob", "zoe"])


def test_a_tenant_that_does_not_share_has_a_salt_of_its_own(write):
    shares = f"sharer: {{keys: [{key('s')}], share_cache: true}}"
    tenants = Tenants(["own"], write(f"{ACME}\nother: {{keys: [{key('o')}]}}\n{shares}"))
    acme, other, sharer, own = (tenants.find(f"Bearer {k}") for k in ("a", "o", "s", "own"))
    salts = ["", "x", "acme", "acme\0x", "\0x"]
    assert [sharer.salt(s) for s in salts] == [own.salt(s) for s in salts] and own.salt(None) == ""
    found = [{t.salt(s) for s in salts} for t in (acme, other, own)]
    assert sum(map(len, found)) == len(set.union(*found)) == 15


def test_over_http(start, write, caplog):
    path = write(f"{ACME}\nother: {{keys: [{key('o')}], top_priority: 1, weight: 3}}")
    server = start(tenants=Tenants((), path))

    def ask(who, **fields):
        server.http.headers["authorization"] = f"Bearer {who}"
        return server.chat(max_tokens=1, **fields)

    assert ask("nobody").status_code == 401 and server.http.get("/v1/models").status_code == 401
    with caplog.at_level(logging.INFO, "hydrainfer.access"):
        answers = [ask("a") for _ in range(14)]  # at least one whole minute is used up, whenever this runs
    limited = answers[-1]
    (line,) = [line for line in caplog.messages if limited.headers["x-request-id"] in line]
    assert " 429 " in line and line.endswith(" tenant=acme"), "the log says who is over its limit"
    assert answers[0].status_code == 200
    assert (limited.status_code, limited.json()["error"]["code"]) == (429, "tenant_limit")
    assert 1 <= int(limited.headers["retry-after"]) <= 600
    counted = server.post("/v1/messages/count_tokens", model="tiny", messages=[{"role": "user", "content": "hi"}])
    assert counted.status_code == server.post("/tokenize", prompt="hi").status_code == 429, "these count, too"
    assert counted.json()["error"]["type"] == "rate_limit_error"
    assert ask("o").status_code == 200, "another is not concerned"
    assert server.post("/tokenize", prompt="hi").status_code == 200
    assert ask("o", priority=1).status_code == 200
    assert ask("o", priority=2).json()["error"]["param"] == "priority"
    server.http.headers["x-priority"] = "2"
    assert ask("o").json()["error"]["param"] == "priority"
    del server.http.headers["x-priority"]
    assert ask("o", stream=True).status_code == 200
    chains = [server.engine.submitted[-1].keys]
    assert {r.share for r in server.engine.submitted} == {("acme", 1.0), ("other", 3.0)}
    assert ask("o", cache_salt="x").status_code == 200
    assert ask("o").status_code == 200
    chains += [r.keys for r in server.engine.submitted[-2:]]
    assert chains[0] != chains[1] and chains[0] == chains[2]
    server.check_idle()
    assert server.http.get("/health").status_code == 200
    write(f"other: {{keys: [{key('p')}]}}")
    assert ask("p").status_code == 401


def test_choices_count_once_the_body_is_known(start, write):
    """By default requests are counted from their heads on, which do not say how many answers they ask for."""
    tenants = Tenants((), write(f"acme: {{keys: [{key('a')}], concurrency: 4}}"))
    server = start(tenants=tenants, step_s=0.01)
    headers = {"Authorization": "Bearer a"}

    def ask(**fields):
        return server.http.post("/v1/completions", json={"prompt": "hi", **fields}, headers=headers)

    for fields in ({"n": 5}, {"prompt": ["a"] * 5}, {"prompt": [[5]] * 3, "n": 2}, {"n": 128}):
        refused = ask(**fields)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "n", fields
    assert ask(n=4, max_tokens=2).status_code == 200
    body = {"prompt": "hi", "n": 3, "stream": True, "ignore_eos": True, "max_tokens": 400}
    with server.http.stream("POST", "/v1/completions", json=body, headers=headers) as long:
        lines = long.iter_lines()
        next(lines)
        refused = ask(n=2)
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "tenant_limit"
        assert refused.headers["retry-after"]
        assert ask(max_tokens=1).status_code == 200
        wait_until(lambda: tenants._n_live["acme"] == 3)
    server.check_idle()
    wait_until(lambda: not tenants._n_live["acme"])


def test_only_operators_reset_the_prefix_cache(start, write):
    path = write(f"acme: {{keys: [{key('a')}]}}\nops: {{keys: [{key('o')}], admin: true, requests_per_minute: 1}}")
    server = start(tenants=Tenants(["own"], path))

    def reset(name, **query):
        server.http.headers["authorization"] = f"Bearer {name}"
        return server.http.post("/reset_prefix_cache", params=query)

    assert reset("nobody").status_code == 401
    refused = reset("a")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_key_needed")
    blocks = {"EPD0": {"kv": 3, "embed": 1}, "D0": {"kv": 2}}
    for _ in range(3):
        for name in ("o", "own"):
            done = reset(name)
            assert (done.status_code, done.json()) == (200, {"n_blocks": 6, "instances": blocks})
    for unsupported in ("reset_external", "reset_running_requests"):
        assert reset("o", **{unsupported: "true"}).json()["error"]["param"] == unsupported
        assert reset("o", **{unsupported: "false"}).status_code == 200
    assert server.http.get("/reset_prefix_cache").status_code == 405
    assert start().http.post("/reset_prefix_cache").status_code == 403, "a server without keys has no operators"


def test_a_refused_request_costs_none_of_a_minute(start, write):
    """Whatever the reason: no such model, a wrong or unknown field, a prompt that is too long, a picture."""
    limits = "requests_per_minute: 1, tokens_per_minute: 50"
    server = start(tenants=Tenants((), write(f"acme: {{keys: [{key('a')}], {limits}}}")))
    server.http.headers["authorization"] = "Bearer a"
    broken = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    hello = [{"role": "user", "content": "hi"}]
    ask = {"model": "tiny", "messages": hello, "max_tokens": 1}
    for status, path, body in (
        (404, "/v1/chat/completions", {**ask, "model": "none"}),
        (404, "/v1/completions", {"model": "none", "prompt": "hi"}),
        (404, "/v1/messages", {**ask, "model": "none"}),
        (404, "/api/chat", {"model": "none", "messages": hello}),
        (400, "/v1/chat/completions", {**ask, "temperature": -1}),
        (400, "/v1/chat/completions", {**ask, "temperatur": 1}),
        (400, "/v1/chat/completions", {**ask, "priority": 2}),
        (400, "/v1/chat/completions", {**ask, "messages": [{"role": "user", "content": "hi " * 2000}]}),
        (400, "/v1/completions", {"model": "tiny", "prompt": "hi " * 2000}),
        (400, "/v1/responses", {"model": "tiny", "input": "hi " * 2000}),
        (422, "/v1/chat/completions", {**ask, "messages": [{"role": "user", "content": broken}]}),
        (400, "/tokenize", {"prompt": 5}),
        (400, "/detokenize", {"tokens": [-1]}),
        (400, "/v1/messages/count_tokens", {"model": "tiny"}),
    ):
        answer = server.post(path, **body)
        assert answer.status_code == status, (path, body, answer.text)
    assert server.http.post("/v1/completions", content=b"{").status_code == 400
    assert server.http.post("/v1/completions", content=b"", headers={"content-type": "x/y"}).status_code == 415
    assert server.post("/v1/chat/completions", **ask).status_code == 200, "the one of this minute"
    for path, body in (("/v1/chat/completions", ask), ("/tokenize", {"prompt": "hi"})):
        assert server.post(path, **body).status_code == 429, path
    server.check_idle()


def test_a_request_whose_work_has_begun_costs_one_of_a_minute_however_it_ends(start, write):
    """Here its client hangs up at the first token."""
    server = start(tenants=Tenants((), write(f"acme: {{keys: [{key('a')}], requests_per_minute: 2}}")), step_s=0.01)
    server.http.headers["authorization"] = "Bearer a"
    body = {"prompt": "hi", "stream": True, "ignore_eos": True, "max_tokens": 300}
    statuses = []
    for _ in range(6):  # in two minutes at most, of which one has three
        with server.http.stream("POST", "/v1/completions", json=body) as answer:
            statuses.append(answer.status_code)
            next(answer.iter_lines())
    assert statuses[0] == 200 and statuses[-1] == 429
    server.check_idle()
