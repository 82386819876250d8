"""`POST /reset_prefix_cache`: the next same prompt finds nothing and has the same tokens, in every layout."""

from __future__ import annotations

import threading

import httpx
import pytest
from rich.console import Console

from hydrainfer import serving
from hydrainfer.config import load
from tests.checkpoints import make_llava
from tests.server.conftest import image_part, picture
from tests.waiting import wait_until

pytestmark = [pytest.mark.multi, pytest.mark.timeout(180)]
WORDS = "Tell me about this picture, with all that is in it, from left to right. " * 4
CHAT = [{"role": "user", "content": [image_part(picture()), {"type": "text", "text": WORDS}]}]
ASK = {"messages": CHAT, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
LAYOUTS = {
    "one": {"layout": "1EPD"},
    "apart": {"layout": "1E1P1D", "launcher": "inproc"},
    "ray": {"layout": "1EP1D", "launcher": "ray"},
    "host memory": {"layout": "1EPD", "host_cache_gib": 0.05},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_llava(tmp_path_factory.mktemp("llava"))


def served(checkpoint, **options):
    loaded = load({"model": str(checkpoint), "port": 0, "api_key": "k", **options})
    return serving.serve_in_background(loaded, Console(quiet=True))


def ask(client):
    """The answer's tokens, and how many of the prompt were in the cache."""
    answer = client.post("/v1/chat/completions", json=ASK).json()
    return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_found_after_a_reset_and_the_tokens_are_the_same(checkpoint, layout):
    with (
        served(checkpoint, **LAYOUTS[layout]) as (url, instance),
        httpx.Client(base_url=url, timeout=60, headers={"authorization": "Bearer k"}) as client,
    ):
        wanted, n_cached = ask(client)
        assert n_cached == 0
        assert ask(client)[0] == wanted
        assert ask(client)[1] > 0
        wait_until(lambda: not instance.engine.stats().n_running)
        done = client.post("/reset_prefix_cache")
        assert done.status_code == 200 and done.json()["n_blocks"] > 0
        names = {info.name for info in instance.engine.instances()}
        assert done.json()["instances"].keys() == names
        assert ask(client) == (wanted, 0)
        wait_until(lambda: n_encoded(client) == 2)  # before and after: embeddings are forgotten, too
        tokens, n_cached = ask(client)
        assert tokens == wanted and n_cached > 0


def n_encoded(client):
    """Pictures that came to be encoded and whose embeddings were not there."""
    page = client.get("/metrics").text.splitlines()

    def total(name):
        return sum(float(line.rsplit(" ", 1)[1]) for line in page if line.startswith(f"hydrainfer:{name}_total"))

    return total("mm_cache_queries") - total("mm_cache_hits")


def test_requests_that_run_go_on(checkpoint):
    body = {**ASK, "max_tokens": 300}
    with (
        served(checkpoint, layout="1EP1D", launcher="inproc") as (url, instance),
        httpx.Client(base_url=url, timeout=60, headers={"authorization": "Bearer k"}) as client,
    ):
        wanted = client.post("/v1/chat/completions", json=body).json()["choices"][0]["token_ids"]
        answers = []

        def run():
            with httpx.Client(base_url=url, timeout=60, headers=client.headers) as other:
                answers.append(other.post("/v1/chat/completions", json=body).json()["choices"][0]["token_ids"])

        threads = [threading.Thread(target=run) for _ in range(3)]
        for thread in threads:
            thread.start()
        while not answers:
            assert client.post("/reset_prefix_cache").status_code == 200
        for thread in threads:
            thread.join()
        assert answers == [wanted] * 3
        for pool in instance.pools().values():
            pool.check()
