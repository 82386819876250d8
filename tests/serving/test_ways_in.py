"""Ends of life of the ways in: a server that has to stop, a `LLM` used from threads, notebooks and after its end."""

from __future__ import annotations

import os
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from hydrainfer import LLM, SamplingParams, serving
from hydrainfer.cli import main
from hydrainfer.config import load
from hydrainfer.core import InvalidRequest, Unavailable
from tests.checkpoints import make_llava
from tests.parts import parts
from tests.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(120)]
SHORT = SamplingParams(max_tokens=4, ignore_eos=True)
NO_MEDIA = {"multi_modal_data": None, "mm_processor_kwargs": {}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_llava(tmp_path_factory.mktemp("llava"))


def test_requests_that_are_not_done_when_the_server_must_stop_are_told_so(checkpoint, monkeypatch):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 300, "ignore_eos": True, "n": 16}
    loaded = load({"model": str(checkpoint), "port": 0, "drain_s": 0.3})
    with serving.serve_in_background(loaded, Console(quiet=True)) as (url, instance):
        monkeypatch.setattr(instance.sessions.handle._engine, "_launch", lambda now: None)  # it takes for ever

        def post(stream):
            response = httpx.post(f"{url}/v1/chat/completions", json={**body, "stream": stream}, timeout=60)
            return response.status_code, response.json()["error"]["type"]

        clients = ThreadPoolExecutor(2)
        answers = [clients.submit(post, stream) for stream in (True, False)]
        wait_until(lambda: instance.sessions.n_live >= 32)
    assert [a.result(PATIENCE_S) for a in answers] == [(503, "service_unavailable")] * 2
    instance.sessions.check(idle=True)
    instance.caches.check(idle=True)


def test_strangers_who_do_not_speak_http_fill_no_log(checkpoint, caplog):
    loaded = load({"model": str(checkpoint), "port": 0})
    with serving.serve_in_background(loaded, Console(quiet=True)) as (url, _):
        for _ in range(100):
            with socket.create_connection((httpx.URL(url).host, httpx.URL(url).port), timeout=PATIENCE_S) as stranger:
                stranger.sendall(b"what is this?\r\n\r\n")
                assert b"400" in stranger.recv(4096)
        assert httpx.get(f"{url}/health", timeout=PATIENCE_S).status_code == 200
    assert 1 <= len(caplog.messages) <= 6


def test_one_llm_in_several_threads_in_a_running_loop_and_closed(checkpoint):
    with LLM(str(checkpoint), max_running=4) as llm:
        lengths = []
        threads = [
            threading.Thread(target=lambda: lengths.append(len(llm.generate(["hi"] * 6, SHORT, use_tqdm=False))))
            for _ in range(3)
        ]
        for t in threads:
            t.start()
        for t in threads:
            t.join(30)
        assert lengths == [6, 6, 6]

        async def notebook():
            return llm.generate("hi", SHORT, use_tqdm=False)

        import asyncio

        assert len(asyncio.run(notebook())[0].outputs[0].token_ids) == 4
    with pytest.raises(Unavailable, match="this LLM has been closed"):
        llm.generate("hi", SHORT, use_tqdm=False)


def test_outputs_say_what_was_asked_and_chats_take_what_templates_do(checkpoint, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text(
        "{{ mood | default('plain') }} {{ tools | length if tools else 0 }}:"
        "{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if tools %}{{ tools[0].function.name }}{% endif %}"
    )
    tool = {"type": "function", "function": {"name": "zqprobe", "parameters": {"type": "object", "properties": {}}}}
    picture = {"type": "image", "image": "datasets/samples/shapes.png"}
    chat = [{"role": "user", "content": [picture, {"type": "text", "text": "hi"}]}]
    with LLM(str(checkpoint), chat_template=str(template)) as llm:
        first, second = llm.generate(["one two", [5, 6, 7]], SHORT, use_tqdm=False)
        assert first.prompt == "one two" and second.prompt and second.prompt_token_ids == (5, 6, 7)
        (seen,) = llm.chat(chat, SHORT, use_tqdm=False, chat_template_kwargs={"mood": "merry"})
        assert seen.prompt == "merry 0:<image>\nhi" and len(seen.prompt_token_ids) > 16
        (shown,) = llm.chat(chat, SHORT, use_tqdm=False, tools=[tool])
        assert shown.prompt == "plain 1:<image>\nhizqprobe"
        with pytest.raises(InvalidRequest):
            llm.chat(chat, SHORT, use_tqdm=False, tools=[{"type": "function"}])


def test_a_wrong_prompt_of_several_is_refused_before_any_is_answered(checkpoint):
    message, picture = {"role": "user", "content": "hi"}, {"multi_modal_data": {"image": b"no picture"}}
    with LLM(str(checkpoint)) as llm:
        ids = llm.generate("hi", SHORT, use_tqdm=False)[0].prompt_token_ids
        for same in ({"prompt": "hi"}, list(ids), {"prompt_token_ids": list(ids)}, {"prompt": "hi", **NO_MEDIA}):
            assert [out.prompt_token_ids for out in llm.generate(same, SHORT, use_tqdm=False)] == [ids]
        for wrong in (None, 5, b"hi", {}, {"text": "hi"}, ["hi", None], ["hi", {"a": 1}], {"prompt": "hi", **picture}):
            with pytest.raises(InvalidRequest):
                llm.generate(wrong, SHORT, use_tqdm=False)
        for wrong in (None, 5, b"hi", "hi", {}, message, [], [5], ["hi"], [None], [{"prompt": "hi"}], [[message], "hi"],
                      [[message], message], [[message], [5]]):  # fmt: skip
            with pytest.raises(InvalidRequest):
                llm.chat(wrong, SHORT, use_tqdm=False)
        for sampling in ({"temperature": 0}, 0.0, "greedy", [SHORT, None], [SHORT]):
            with pytest.raises(InvalidRequest, match="sampling"):
                llm.generate(["a", "b"], sampling, use_tqdm=False)
        for options in (5, [5], {"a": 1}):
            with pytest.raises(InvalidRequest, match="mm_processor_kwargs"):
                llm.chat([message], SHORT, use_tqdm=False, mm_processor_kwargs=options)
            with pytest.raises(InvalidRequest, match="mm_processor_kwargs"):
                llm.generate({"prompt": "hi", "mm_processor_kwargs": options}, SHORT, use_tqdm=False)
        parts(llm).intake.processor.pixels.check(idle=True)


def test_only_one_place_says_what_to_run_next():
    """It quotes paths for a shell; what it is given is a command that other tests run."""
    files = Path(serving.__file__).parent.rglob("*.py")
    assert [p.name for p in files if re.search(r"[\"\]]next: ", p.read_text())] == ["following.py"]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, ("ACTIVE", "3000")),
        ({"GOMP_SPINCOUNT": "7"}, ("ACTIVE", "7")),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, ("PASSIVE", None)),
    ],
)
def test_compute_threads_spin_for_a_moment_unless_told_otherwise_and_compiled_products_are_few(
    given, found, monkeypatch
):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        monkeypatch.setenv(name, "restored by monkeypatch")
        monkeypatch.delenv(name)
        if name in given:
            monkeypatch.setenv(name, given[name])
    monkeypatch.setattr("sys.argv", ["hydrainfer", "version"])
    with pytest.raises(SystemExit):
        main()
    assert (os.environ["OMP_WAIT_POLICY"], os.environ.get("GOMP_SPINCOUNT")) == found
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "128"
