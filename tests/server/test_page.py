"""The page at `/`: it loads nothing from elsewhere, makes no HTML of texts, and what it reads is there."""

import re
from importlib.resources import files

import pytest

from hydrainfer.metrics import INTERVALS
from hydrainfer.server import Tenants
from tests.waiting import wait_until

pytestmark = pytest.mark.cpu
WEB = files("hydrainfer.server.page").joinpath("web")
FILES = sorted(f.name for f in WEB.iterdir())


def test_its_files_need_no_key_and_no_network(start):
    server = start(tenants=Tenants(["k"]))
    for name in FILES:
        response = server.http.get({"index.html": "/", "docs.html": "/docs"}.get(name, f"/web/{name}"))
        policy = response.headers["content-security-policy"]
        assert response.status_code == 200 and "default-src 'none'" in policy and "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|//cdn|@import|url\(", response.text)
        etag = {"If-None-Match": response.headers["etag"]}
        assert server.http.get(response.url.path, headers=etag).status_code == 304
        assert server.http.head(response.url.path).status_code == 200
    assert server.http.get("/web/nothing.js").status_code == 404
    assert server.http.get("/web/../page.py").status_code == 404
    assert server.http.get("/v1/overview").status_code == 401


def test_the_page_makes_no_html_of_texts():
    for name in FILES:
        text = WEB.joinpath(name).read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text)
        assert not re.search(r"<[^>]+ (on\w+|style)=", text), "the policy forbids these"


def test_ids_and_files_that_the_page_names_are_there():
    """Every id that a script asks for is in the HTML, and every file is reachable from it."""
    html = WEB.joinpath("index.html").read_text() + WEB.joinpath("docs.html").read_text()
    scripts = [WEB.joinpath(name).read_text() for name in FILES if name.endswith(".js")]
    for script in scripts:
        for name in re.findall(r'\$\("([\w-]+)"\)', script):
            assert f'id="{name}"' in html
        assert set(re.findall(r'from "\./([\w.]+)"', script)) <= set(FILES)
    assert set(re.findall(r'"web/([\w.]+)"', html)) <= set(FILES)
    dom = WEB.joinpath("dom.js").read_text()
    assert all(f"{name}:" in dom for name in INTERVALS)


def test_overview(start):
    server = start()
    empty = server.http.get("/v1/overview").json()
    assert (empty["model"], empty["version"], empty["layout"]) == ("tiny", "9", "1EPD")
    takes = {"pictures": 3, "videos": 0, "picture_bytes": 32 << 20, "video_bytes": 256 << 20, "body_bytes": 1 << 22}
    assert empty["takes"] == takes
    assert empty["ended"] == [] and empty["live"] == 0 and empty["instances"][0]["id"] == "EPD0"
    for _ in range(3):
        assert server.chat(max_tokens=4).status_code == 200
    wait_until(lambda: len(server.recorder.ended_after(0)) == 3)
    ended = server.http.get("/v1/overview", params={"after": 1}).json()["ended"]
    assert [one["number"] for one in ended] == [2, 3] and {one["tokens"] for one in ended} == {4}
    for one in ended:
        assert 0 <= one["ttft_s"] <= one["e2e_s"] and one["tpot_s"] >= 0 and one["ago_s"] >= 0
        assert sum(one["intervals_s"].values()) == pytest.approx(one["e2e_s"], abs=1e-4)
    after = server.http.get("/v1/overview", params={"after": 99}).json()["ended"]
    assert len(after) == 3, "the number is of an earlier server"
    for wrong in ("-1", "x"):
        assert server.http.get("/v1/overview", params={"after": wrong}).status_code == 400


def test_a_stream_that_was_cut_off_is_not_among_the_ended(start):
    server = start(step_s=0.01)
    with server.http.stream("POST", "/v1/chat/completions", json={**ASK, "stream": True, "ignore_eos": True}) as answer:
        next(answer.iter_lines())
    server.check_idle()
    assert server.recorder.ended_after(0) == []


ASK = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_is_a_stop_in_the_metrics(start, stream):
    server = start(step_s=0.002)
    server.chat(stop=["engine"], stream=stream)
    server.check_idle()
    ends = [line for line in server.recorder.page().decode().splitlines() if "request_success_total{" in line]
    ends = [line for line in ends if not line.endswith(" 0.0")]
    assert len(ends) == 1 and 'finished_reason="stop"' in ends[0] and ends[0].endswith(" 1.0")
    assert len(server.recorder.ended_after(0)) == 1
