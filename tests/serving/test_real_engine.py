"""The whole server in process: what only shows with the real engine behind HTTP."""

from __future__ import annotations

import base64
import gc
import io
import json
import urllib.request
import weakref

import httpx
import openai
import pytest
from rich.console import Console

from hydrainfer.config import load
from hydrainfer.serving import serve_in_background
from tests.checkpoints import make_llava, make_picture
from tests.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """An image cache of two pictures (16 tokens each) and a KV cache of 40 blocks of 16 tokens."""
    path = make_llava(tmp_path_factory.mktemp("llava"))
    kv_block, picture = 2 * 2 * 16 * 2 * 32 * 4, 64 * 64 * 4
    options = {"kv_cache_gib": 40 * kv_block / 2**30, "image_cache_gib": 2 * picture / 2**30, "max_waiting": 40}
    with serve_in_background(load({"model": str(path), "port": 0, **options}), Console(quiet=True)) as (url, instance):
        yield url, instance
        wait_until_whole(instance)


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=served[0] + "/v1", api_key="none", max_retries=0) as made:
        yield made


def wait_until_whole(instance):
    """Every block, place and picture is back."""

    def is_whole():
        return not instance.sessions.n_live and not any(leased for _, leased, _ in instance.caches.usage().values())

    wait_until(is_whole, say=instance.engine.stats)
    instance.caches.check(idle=True)
    instance.sessions.check(idle=True)
    instance.intake.processor.pixels.check(idle=True)


def picture(seed):
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(make_picture(seed, 56)).save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def chat(*parts):
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}]


def aborted(url):
    """The requests that have ended before their answers did."""
    page = httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text
    return sum(float(line.split()[-1]) for line in page.splitlines() if 'finished_reason="abort"' in line)


def test_a_client_that_leaves_frees_its_blocks(served):
    url, instance = served
    body = {"messages": chat(picture(1)), "max_tokens": 500, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", url + "/v1/chat/completions", json=body, timeout=PATIENCE_S) as answer:
        lines = answer.iter_lines()  # kept: a dropped iterator closes the stream
        next(lines)
        assert instance.caches.usage()["kv"][1] > 0
        n_aborted = aborted(url)
    wait_until_whole(instance)
    wait_until(lambda: aborted(url) == n_aborted + 1)
    assert instance.engine.stats().n_running == 0


def test_pictures_beyond_the_whole_cache_are_refused_and_the_server_goes_on(served, client):
    with pytest.raises(openai.BadRequestError, match="image cache"):
        client.chat.completions.create(model=served[1].name, messages=chat(*map(picture, range(3))))
    answer = client.chat.completions.create(model=served[1].name, messages=chat(picture(1)), max_tokens=4)
    assert answer.usage.completion_tokens <= 4
    wait_until_whole(served[1])


def test_a_prompt_beyond_the_whole_kv_cache_is_refused(served, client):
    assert client.models.list().data[0].max_model_len == 640
    with pytest.raises(openai.BadRequestError) as e:
        client.completions.create(model=served[1].name, prompt=[5] * 600, max_tokens=100)
    assert e.value.code == "context_length_exceeded"
    done = client.completions.create(
        model=served[1].name, prompt=[5] * 600, max_tokens=40, extra_body={"ignore_eos": True}
    )
    assert done.usage.completion_tokens == 40 and done.choices[0].finish_reason == "length"


def test_more_requests_than_places_are_told_to_come_back(served):
    url, instance = served
    body = {"messages": chat(), "max_tokens": 2}
    assert httpx.post(url + "/v1/chat/completions", json={**body, "n": 40}, timeout=PATIENCE_S).status_code == 200
    with httpx.stream(
        "POST",
        url + "/v1/chat/completions",
        json={**body, "n": 39, "max_tokens": 300, "ignore_eos": True, "stream": True},
        timeout=PATIENCE_S,
    ) as running:
        lines = running.iter_lines()  # kept: a dropped iterator closes the stream
        next(lines)
        full = httpx.post(url + "/v1/chat/completions", json={**body, "n": 2}, timeout=PATIENCE_S)
        assert (full.status_code, full.json()["error"]["type"]) == (429, "rate_limit_error")
        assert int(full.headers["retry-after"]) >= 1
    wait_until_whole(instance)


def test_health_metrics_and_counts_agree(served, client):
    before = scrape(served[0])
    client.chat.completions.create(model=served[1].name, messages=chat(picture(7)), max_tokens=5, n=2, temperature=0)
    after = scrape(served[0])
    grown = {k: after[k] - before.get(k, 0) for k in after}
    assert grown["generation_tokens_total"] == grown["inter_token_latency_seconds_count"] + 2
    assert grown["time_to_first_token_seconds_count"] == 2
    assert grown["mm_cache_queries_total"] - grown["mm_cache_hits_total"] == 1  # two choices, one encode
    assert after["num_requests_running"] == after["num_requests_waiting"] == 0


def test_a_prompt_that_was_computed_before_is_not_computed_again(served, client):
    """The next turn of a chat; usage and metrics say so, and another salt finds nothing."""
    said = chat(picture(9))
    one = client.chat.completions.create(model=served[1].name, messages=said, max_tokens=9, temperature=0)
    assert one.usage.prompt_tokens_details.cached_tokens < 16
    said += [{"role": "assistant", "content": one.choices[0].message.content}, *chat()]
    before = scrape(served[0])
    two = client.chat.completions.create(model=served[1].name, messages=said, max_tokens=9, temperature=0, n=2)
    after = scrape(served[0])
    cached = two.usage.prompt_tokens_details.cached_tokens
    assert one.usage.prompt_tokens // 16 * 16 - 16 <= cached < two.usage.prompt_tokens and cached > 0
    grown = {k: after[f"prefix_cache_{k}_total"] - before[f"prefix_cache_{k}_total"] for k in ("queries", "hits")}
    assert grown["queries"] == 2 * two.usage.prompt_tokens and grown["hits"] >= 2 * cached
    other = client.chat.completions.create(
        model=served[1].name, messages=said, max_tokens=9, temperature=0, extra_body={"cache_salt": "another"}
    )
    assert other.usage.prompt_tokens_details.cached_tokens == 0
    assert {c.message.content for c in [*two.choices, *other.choices]} == {other.choices[0].message.content}


def scrape(url):
    lines = httpx.get(url + "/metrics", timeout=PATIENCE_S).text.splitlines()
    found = {}
    for line in lines:
        if line.startswith("hydrainfer:") and "_bucket" not in line:
            name = line.split("{")[0].removeprefix("hydrainfer:")
            found[name] = found.get(name, 0) + float(line.rsplit(" ", 1)[1])
    return found


def test_garbage_is_collected_at_ticks_and_requests_leave_none(served):
    """Python's own collections, which stop a crowded server for 0.1 s, are off while it runs; what waits for a full
    one is nothing that a request left."""
    url, instance = served
    body = {"model": instance.name, "messages": chat(picture(5)), "max_tokens": 5}

    def ask(**more):
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps({**body, **more}).encode(), {"Content-Type": "application/json"}
        )
        return urllib.request.urlopen(request).read()

    assert not gc.isenabled()
    for stream in (False, True):
        ask(stream=stream)
        gc.collect()
        for _ in range(10):
            ask(stream=stream)
        assert gc.collect() < 10
    cycle = Cycle()
    gone = weakref.ref(cycle)
    del cycle
    wait_until(lambda: gone() is None)


class Cycle:
    def __init__(self):
        self.me = self
