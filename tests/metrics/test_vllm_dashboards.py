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
from tests.server.conftest import image_part, picture
from tests.server_process import ServerProcess
from tests.waiting import wait_until

pytestmark = [pytest.mark.multi, pytest.mark.timeout(240)]
_TEXT = (Path(__file__).parent / "vllm_dashboard_queries.txt").read_text()
QUERIES = {
    title: [line for line in lines if line and not line.startswith("#")]
    for title, *lines in (part.splitlines() for part in _TEXT.split("\n## ")[1:])
}
"""The questions of each dashboard, by the line above them."""
NOT_ZERO = (
    'sum(vllm:request_success_total{engine=~"$engine"}) > 0',
    'sum(vllm:request_prefill_kv_computed_tokens_sum{engine=~"$engine"}) > 0',
    "sum(vllm:spec_decode_num_accepted_tokens_total) > 0",
    'sum(vllm:prompt_tokens_cached_by_source_total{source="device"}) > 0',
    "process_resident_memory_bytes > 1e6",
)
NOT_ZERO_WITH_A_STORE = (
    "sum(vllm:external_prefix_cache_hits_total) > 0",
    'sum(vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}) > 0',
    'sum(vllm:prompt_tokens_cached_by_source_total{source="external_unspecified"}) > 0',
)
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
                begin = {"type": "text", "text": f"{number % 40}: look" if number % 2 else "Look"}
                messages = [{"role": "user", "content": [begin, parts[number % 3]]}]
                body = {"messages": messages, "max_tokens": 60, "ignore_eos": True, "temperature": 0}
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


@pytest.mark.parametrize("layout, stored", [("1EPD", False), ("1EP1D", True)])
def test_every_question_of_vllms_dashboards_has_an_answer(tmp_path, layout, stored):
    """With a store, the KV cache is so small that prompts come back from there."""
    installed("prometheus")
    checkpoint = make_llava(tmp_path / "llava")
    options = ["--metrics-prefix", "vllm", "--layout", layout, "--launcher", "inproc", "--served-model-name", "mine"]
    questions = [q for title, of in QUERIES.items() if stored or "with a store" not in title for q in of]
    questions += NOT_ZERO
    if stored:
        options += ["--store", f"dir:{tmp_path / 'store'}?gib=1", "--kv-cache-gib", "0.0005"]
        questions += NOT_ZERO_WITH_A_STORE
    with ServerProcess(tmp_path, checkpoint, "--drafts", "ngram", *options) as server, load(server.url):
        config = tmp_path / "prometheus.yml"
        config.write_text(CONFIG.replace("PORT", str(server.port)))
        with Prometheus(tmp_path, config) as prometheus:

            def all_answered():
                engines = engines_of(prometheus)
                questions[:] = [q for q in questions if not is_answered(prometheus, q, engines)]
                return not questions

            try:
                wait_until(all_answered, 60)
            except AssertionError:
                pytest.fail("no answer to:\n" + "\n".join(questions))


def engines_of(prometheus):
    """A pattern of all values of the label `engine`, as Grafana makes one."""
    names = {one["metric"]["engine"] for one in prometheus.query("vllm:num_requests_running")}
    return f"({'|'.join(sorted(names))})"


def is_answered(prometheus, question, engines):
    for name, value in {"$model": "mine", "$window": "15s", "$engine": engines}.items():
        question = question.replace(name, value)
    values = [float(one["value"][1]) for one in prometheus.query(question)]
    return bool(values) and not any(map(math.isnan, values))
