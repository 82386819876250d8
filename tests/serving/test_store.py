"""`hydrainfer serve --store`: what one server has computed outlives it, killed or not, and serves others."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time

import httpx
import pytest
from rich.console import Console

from hydrainfer.builtin import MODEL
from hydrainfer.config import load
from hydrainfer.serving import serve_in_background
from tests.cluster.processes import alive
from tests.server.conftest import image_part, picture
from tests.serving.test_processes import Served, of_run, run_folders
from tests.waiting import SOON_S, wait_until

pytestmark = [pytest.mark.multi, pytest.mark.timeout(400)]

FILLER = "a red circle, a blue square and a green star; " * 3
SHARED = 0.8  # of what could be found, in all: a machine may be so busy that computing is sooner


def serve(folder, *options):
    return Served(MODEL, "--port", 0, "--store", f"dir:{folder}?gib=1", "--threads", 1, *options)


@contextlib.contextmanager
def serve_here(folder):
    """The URL of another server on the same folder, in this process."""
    options = {"model": str(MODEL), "port": 0, "threads": 1, "layout": "2EPD", "launcher": "inproc"}
    with serve_in_background(load(options | {"store": f"dir:{folder}?gib=1"}), Console(quiet=True)) as (url, _):
        yield url


class Talk:
    """A conversation; `turn` goes on with it and returns how many tokens were found, and how many could have been."""

    def __init__(self, i, **fields):
        content = [image_part(picture(i)), {"type": "text", "text": f"Story {i}. {FILLER}"}]
        self.messages = [{"role": "user", "content": content}]
        self.fields, self.n_before, self.answers = fields, 0, []

    def ask(self, client, **fields):
        body = {"messages": self.messages, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        answer = client.post("/v1/chat/completions", json={**body, **self.fields, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def turn(self, client):
        answer = self.ask(client)
        said, usage = answer["choices"][0]["message"]["content"], answer["usage"]
        self.messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}]
        could, self.n_before = self.n_before // 16 * 16, usage["prompt_tokens"]
        self.answers.append(said)
        return usage["prompt_tokens_details"]["cached_tokens"], could

    def unaided(self, client):
        """What is said next where nothing is shared."""
        answer = self.ask(client, cache_salt=f"unaided {len(self.answers)}")
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        return answer["choices"][0]["message"]["content"]


def scrape(client):
    found = {}
    for line in client.get("/metrics").text.splitlines():
        if match := re.match(r"hydrainfer:(store_\w+?)(?:_total)?(?:{.*?})? (\S+)$", line):
            found[match[1]] = found.get(match[1], 0.0) + float(match[2])
    return found


def saved(client, n_blocks):
    """Wait until so many blocks are saved, and no more come."""
    counts = []

    def settled():
        counts.append(scrape(client)["store_blocks_saved"])
        time.sleep(0.1)
        return counts[-1] >= n_blocks and counts[-3:] == counts[-1:] * 3

    wait_until(settled)


@contextlib.contextmanager
def traffic(url):
    """Conversations that go on meanwhile, and whatever they got that was no answer."""
    over, errors = threading.Event(), []

    def talk(i):
        with httpx.Client(base_url=url, timeout=60) as client:
            while not over.is_set():
                one = Talk(i)
                for _ in range(3):
                    try:
                        one.turn(client)
                    except (httpx.HTTPError, AssertionError) as e:
                        errors.append(e)
                        return

    threads = [threading.Thread(target=talk, args=(100 + i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield errors
    finally:
        over.set()
        for thread in threads:
            thread.join()


def kill(server):
    """Every process of a server, at once."""
    pids = [server.process.pid]
    if run_folders(server.process.pid):
        pids += of_run(server)[0]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    server.process.wait()
    wait_until(lambda: not alive(pids), SOON_S)


def found(talks, client):
    """The share of their beginnings that was found, of one more turn of each."""
    pairs = [talk.turn(client) for talk in talks]
    return sum(min(pair) for pair in pairs) / sum(could for _, could in pairs)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id="1EPD"),
        pytest.param(("--layout", "1E1P1D", "--launcher", "ray"), id="1E1P1D-ray", marks=pytest.mark.slow),
    ],
)
def test_conversations_with_a_server_that_was_killed_go_on_with_others_on_its_folder(tmp_path, options):
    """Two at once, of which one then finds what the other has computed."""
    talks, new = [Talk(i) for i in range(4)], [Talk(i) for i in (4, 5)]
    with serve(tmp_path, *options) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        for talk in talks:
            talk.turn(client)
        wanted = [talk.unaided(client) for talk in talks]
        saved(client, 4 * (talks[0].n_before // 16))
        with traffic(server.url) as errors:
            time.sleep(0.5)
            assert not errors
            kill(server)
    with serve(tmp_path, *options) as one, serve_here(tmp_path) as other:
        with httpx.Client(base_url=one.url, timeout=60) as a, httpx.Client(base_url=other, timeout=60) as b:
            assert found(talks[:2], a) > SHARED and found(talks[2:], b) > SHARED
            assert [talk.answers[1] for talk in talks] == wanted
            for talk in new:
                talk.turn(a)
            wanted = [talk.unaided(a) for talk in new]
            saved(a, 2 * (new[0].n_before // 16))
            assert found(new, b) > SHARED
            assert [talk.answers[1] for talk in new] == wanted
            for counts in (scrape(a), scrape(b)):
                assert counts["store_blocks_loaded"] > 0 and counts["store_bytes_loaded"] > 0, counts
                assert counts["store_queries"] > 0 and counts["store_blocks_saved"] > 0, counts
                assert not counts["store_blocks_corrupt"] and not counts["store_failures"], counts
        assert one.stop(signal.SIGTERM) == 0
    one.reading.join()
    assert not any(word in one.output for word in ("Traceback", "ERROR")), one.output
    assert re.search(r"store .*blocks", one.output), one.output
