"""What vLLM's dashboards ask has an answer under load, from a Prometheus that scrapes a real server."""

from __future__ import annotations

import math
import threading
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.checkpoints import make_llava
from tests.prometheus import Prometheus, installed
from tests.server.conftest import image_part, picture, wait_until
from tests.server_process import ServerProcess

pytestmark = [pytest.mark.multi, pytest.mark.timeout(240)]
QUERIES = [
    line
    for line in (Path(__file__).parent / "vllm_dashboard_queries.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
CONFIG = """
global: {scrape_interval: 500ms, scrape_timeout: 500ms}
scrape_configs:
  - {job_name: vllm, static_configs: [{targets: ["127.0.0.1:PORT"]}]}
"""


@contextmanager
def load(url):
    """Chats about a few pictures, four at a time: the same ones again, and others that begin with another text. And a
    path that does not exist."""
    over = threading.Event()
    parts = [image_part(picture(seed)) for seed in range(3)]

    def ask(number):
        with httpx.Client(base_url=url, timeout=60) as client:
            while not over.is_set():
                begin = {"type": "text", "text": f"{number}: look" if number % 2 else "Look"}
                messages = [{"role": "user", "content": [begin, parts[number % 3]]}]
                body = {"messages": messages, "max_tokens": 60, "ignore_eos": True}
                assert client.post("/v1/chat/completions", json=body).status_code == 200
                assert client.get("/nowhere").status_code == 404
                number += 1

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("layout", ["1EPD", "1EP1D"])
def test_every_question_of_vllms_dashboards_has_an_answer(tmp_path, layout):
    installed("prometheus")
    checkpoint = make_llava(tmp_path / "llava")
    options = ["--metrics-prefix", "vllm", "--layout", layout, "--launcher", "inproc", "--served-model-name", "mine"]
    with ServerProcess(tmp_path, checkpoint, *options) as server, load(server.url):
        config = tmp_path / "prometheus.yml"
        config.write_text(CONFIG.replace("PORT", str(server.port)))
        with Prometheus(tmp_path, config) as prometheus:
            open_questions = list(QUERIES)

            def all_answered():
                open_questions[:] = [q for q in open_questions if not is_answered(prometheus, q)]
                return not open_questions

            try:
                wait_until(all_answered, 60)
            except AssertionError:
                pytest.fail("no answer to:\n" + "\n".join(open_questions))


def is_answered(prometheus, question):
    series = prometheus.query(question.replace("$model", "mine").replace("$window", "15s"))
    values = [float(one["value"][1]) for one in series]
    return bool(values) and not any(map(math.isnan, values))
