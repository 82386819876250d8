"""What a closed `LLM` or rig had is freed at once, so that the next one in the process finds the memory."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path

import httpx
import pytest
import torch
from PIL import Image
from rich.console import Console

from hydrainfer import LLM, SamplingParams
from hydrainfer.assemble import model as assembling
from hydrainfer.config import load
from hydrainfer.core import Unavailable
from hydrainfer.models import Model
from hydrainfer.runtime.graphs import DecodeGraphs, PassGraphs
from hydrainfer.serving import serve_in_background
from hydrainfer.storage import BlockStore
from tests.checkpoints import make_llava, make_picture
from tests.memory import graph_double, watch_caches
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(120)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
HELD = (Model, BlockStore, DecodeGraphs, PassGraphs)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture
def captures(monkeypatch):
    """Graphs that compute a step anew."""
    monkeypatch.setattr(assembling, "capture_for", lambda _: graph_double)
    monkeypatch.setattr(assembling, "capture_passes_for", lambda _: graph_double)


@pytest.fixture
def born(monkeypatch):
    """Weak references to what takes memory, of everything that is made in the test."""
    found: list[tuple[str, weakref.ref]] = []

    def noted(kind):
        init = kind.__init__

        def note(self, *args, **kwargs):
            init(self, *args, **kwargs)
            found.append((kind.__name__, weakref.ref(self)))

        return note

    for kind in HELD:
        monkeypatch.setattr(kind, "__init__", noted(kind))
    return found


def alive(born) -> list[str]:
    return [name for name, one in born if one() is not None]


def chat():
    picture = Image.fromarray(make_picture(1, 56))
    return [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "hi"}]}]


@pytest.mark.parametrize("layout", ["1EPD", "1E1P1D"])
def test_a_closed_llm_holds_nothing_and_another_one_works(checkpoint, captures, born, layout, monkeypatch):
    answers, n_caches = [], watch_caches(monkeypatch)
    gc.disable()  # what is freed is freed by `close`
    try:
        for _ in range(2):
            assert not alive(born) and not n_caches()
            with LLM(checkpoint, device="cpu", threads=1, layout=layout, launcher="inproc") as llm:
                (answer,) = llm.chat([chat()], GREEDY, use_tqdm=False)
                assert n_caches() and {name for name, _ in born} == {kind.__name__ for kind in HELD}
            answers.append(answer.outputs[0].token_ids)
            assert not alive(born) and not n_caches()
            for call in (lambda llm=llm: llm.chat(chat()), llm.get_default_sampling_params):
                with pytest.raises(Unavailable, match="this LLM has been closed; make another one"):
                    call()
            llm.close()
    finally:
        gc.enable()
    assert answers[0] == answers[1]


@pytest.mark.parametrize("layout", ["1EPD", "1E1P1D"])
def test_a_closed_server_holds_no_weights_and_no_caches(checkpoint, born, layout):
    """FastAPI remembers the functions behind routes for as long as the process lives."""
    options = {"model": str(checkpoint), "port": 0, "threads": 1, "layout": layout, "launcher": "inproc"}
    with serve_in_background(load(options), Console(quiet=True)) as (url, _):
        httpx.get(f"{url}/health", timeout=PATIENCE_S).raise_for_status()
        assert {"Model", "BlockStore"} <= set(alive(born))
    gc.collect()
    assert not alive(born)


def test_closing_gives_memory_of_a_gpu_back(checkpoint, monkeypatch):
    """The driver takes what torch keeps to be in use, as do the sizes of the next caches."""
    given_back = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(True))
    with LLM(checkpoint, device="cpu", threads=1):
        assert not given_back
    assert given_back


def test_an_llm_starts_no_process_that_it_may_not_need(checkpoint):
    """A second tokenizer takes memory; a server starts the process for grammars at once, since clients wait there."""
    children = child_processes()
    with LLM(checkpoint, device="cpu", threads=1):
        assert child_processes() <= children  # one of an earlier test may end meanwhile


def child_processes() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())
