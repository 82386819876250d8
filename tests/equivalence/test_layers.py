"""Prefixes that come back from host memory layer by layer: the same tokens, and no batch waits for more than it needs.

A double takes the place of a GPU's stream: a thread that copies one layer after the other, slowly. A mark in its work
blocks who waits for it, as a stream would be blocked.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from queue import SimpleQueue

import pytest
import torch

from hydrainfer.assemble import engine as assembly
from hydrainfer.cache import HOST, HostTier
from hydrainfer.core import Stage
from hydrainfer.runtime import LanguageRunner
from hydrainfer.storage import LayerLoader
from tests.checkpoints import make_llava
from tests.checkpoints_text import make_text
from tests.equivalence.stored import ask, converse, engines, few, start
from tests.waiting import HELD_S

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(120)]
EACH_S = 0.003
MAKE = {
    **{kind: partial(make_text, kind=kind) for kind in ("llama", "gemma3", "qwen3_5", "lfm3")},
    "llava": make_llava,
}


class Stream:
    """A `storage.layers.Queue`. `n_early`: by how many marks somebody had to wait; `waits`: all that were waited for,
    by the place in which they were made."""

    def __init__(self):
        self.work, self.n_marks, self.n_early, self.waits = SimpleQueue(), 0, 0, []
        threading.Thread(target=self._loop, daemon=True).start()

    def _loop(self):
        with torch.inference_mode():
            while True:
                self.work.get()()

    def copy(self, to, to_ids, source, source_ids):
        def copied():
            time.sleep(EACH_S)
            to[to_ids] = source[source_ids]

        self.work.put(copied)

    def mark(self):
        self.n_marks += 1
        mark = Mark(self, self.n_marks)
        self.work.put(mark.synchronized.set)
        return mark


class Mark:
    def __init__(self, stream, place):
        self.stream, self.place, self.synchronized = stream, place, threading.Event()

    def wait(self):
        self.stream.waits.append(self.place)
        self.stream.n_early += not self.synchronized.is_set()
        self.synchronize()

    def synchronize(self):
        assert self.synchronized.wait(HELD_S)


@pytest.fixture
def layered(monkeypatch):
    """Instances started from now on load from host memory layer by layer, whatever is there."""
    made = []

    def stream():
        made.append(Stream())
        return made[-1]

    monkeypatch.setattr(HostTier, "load_s", lambda tier, n_bytes: 0.0)
    monkeypatch.setattr(
        assembly,
        "_layer_loader",
        lambda stores, hosted, wake: {HOST: LayerLoader(hosted, stores, stream, wake)},
    )
    return made


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("llama", "1EPD"),
        ("gemma3", "1EPD"),
        ("qwen3_5", "1EPD"),
        ("lfm3", "1P1D"),
        ("llava", "1EPD"),
    ],
)
def test_batches_begin_before_the_last_layer_is_there(tmp_path, layered, kind, layout):
    path = MAKE[kind](out=tmp_path / "model", seed=3)
    with start(path, native_kernels=kind == "llama") as llm:
        said = converse(llm)
        last = said[2][0]
        others = [ask(llm, [turn])[0] for turn in last]
    with start(path, layout=layout, host_cache_gib=0.2, native_kernels=kind == "llama", **few(path, 1.5)) as llm:
        for _ in range(2):
            for turns, answers in said:
                assert [one.tokens for one in ask(llm, turns)] == [one.tokens for one in answers]
        for turn, wanted in zip(last, others):  # one by one
            assert ask(llm, [turn])[0].tokens == wanted.tokens
        assert not any(engine._copies._loading for engine in engines(llm) if engine._copies is not None)
    loaded = [stream for stream in layered if stream.n_marks]
    assert loaded and sum(stream.n_early for stream in loaded) > sum(1 for stream in loaded for _ in stream.waits) / 9


def test_decodes_of_others_do_not_wait(tmp_path, layered, monkeypatch):
    """Only batches of the one whose beginning is on its way, which may be its first decode, too."""
    path, loading = make_text(tmp_path / "model", "llama", seed=3), []
    waited, launched, executed, decoding = [], LanguageRunner.launch, LanguageRunner._execute, {}

    def launch(runner, batch):  # once it is executed, the next one may have been planned
        decoding[id(batch)] = all(item.seq.stage is Stage.DECODE for item in batch.work)
        return launched(runner, batch)

    def execute(runner, batch, packed, plan, ahead, waits):
        seqs, decodes = [item.seq for item in batch.work], decoding[id(batch)]
        if waits and not decodes:
            loading.extend(seqs)
        others = not any(seq is one for seq in seqs for one in loading)
        waited.append((bool(waits), decodes, others))
        return executed(runner, batch, packed, plan, ahead, waits)

    monkeypatch.setattr(LanguageRunner, "launch", launch)
    monkeypatch.setattr(LanguageRunner, "_execute", execute)
    with start(path, host_cache_gib=0.2, **few(path, 1.5)) as llm:
        said = converse(llm)
        waited.clear()
        for turns, answers in said:
            assert [one.tokens for one in ask(llm, turns)] == [one.tokens for one in answers]
    assert any(waits for waits, *_ in waited)
    assert not any(waits and decodes and others for waits, decodes, others in waited)
    assert sum(decodes for _, decodes, _ in waited) > 20
