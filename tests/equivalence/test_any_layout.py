"""Tokens are the same in any layout with any options, whatever clients, stores and operators do meanwhile.

A run is a function of its number: a model, a layout, options, and a crowd that asks and leaves while blocks are found,
loaded, saved, moved, preempted, drafted, cleared and forgotten. Memory that nobody wrote is full of NaNs.
"""

from __future__ import annotations

import asyncio
import random
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from hydrainfer.scheduler import Worth
from hydrainfer.stores.files import clear
from tests.equivalence.stored import MAKE, always_loaded, converse, crowd, dirty, few, settle, start
from tests.parts import parts
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(7200)]
__all__ = ["always_loaded", "dirty"]

TEXT_ONLY = ("llama", "gemma3", "qwen3_5", "lfm2", "lfm3", "gpt_oss")
LAYOUTS = {
    True: ("1EPD", "2EPD", "1P1D", "1P2D", "2P1D"),
    False: ("1EPD", "2EPD", "1E1P1D", "1EP1D", "1ED1P", "2E1P2D"),
}
N_REQUESTS = 120


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """By model, kernels and block size: the checkpoint, and conversations with one instance that has room for all."""
    found = {}

    def talk(kind, native, block_tokens):
        key = kind, native, block_tokens
        if key not in found:
            path = MAKE[kind](out=tmp_path_factory.mktemp("any"), seed=3)
            with start(path, native_kernels=native, block_tokens=block_tokens) as llm:
                found[key] = path, converse(llm)
        return found[key]

    return talk


def options_of(rng, path, block_tokens):
    """Options by chance: caches for few requests, host memory, drafts, and how steps are cut and launched."""
    options = {"drafts": rng.choice(("off", "ngram")), "elastic_memory": rng.random() < 0.7}
    if rng.random() < 0.7:
        options |= few(path, rng.choice((1.0, 1.5, 2.5)))
        options["kv_cache_gib"] *= 1.0 if block_tokens == 4 else 1.6  # larger blocks waste more
    if rng.random() < 0.5:
        options["host_cache_gib"] = rng.choice((1, 3)) * options.get("kv_cache_gib", 0.01)
    if rng.random() < 0.5:
        options["async_scheduling"] = rng.random() < 0.5 and options["drafts"] == "off"
    if rng.random() < 0.3:
        options["token_budget"] = rng.choice((16, 33))
    if rng.random() < 0.3:
        options["overlap"] = rng.choice(("free", "step", "off", "slice"))
    return options


def play(number, plain, folder):
    rng = random.Random(number)
    kind, native, block_tokens = rng.choice(list(MAKE)), rng.random() < 0.4, rng.choice((4, 4, 8))
    path, said = plain(kind, native, block_tokens)
    layout, options = rng.choice(LAYOUTS[kind in TEXT_ONLY]), options_of(rng, path, block_tokens)
    stores, forgets = rng.random() < 0.8, rng.random() < 0.3
    clears = stores and rng.random() < 0.6
    options |= {"native_kernels": native, "block_tokens": block_tokens}
    print(f"{number}: {kind}, {layout}, {stores=}, {clears=}, {forgets=}, {options}")  # shown if it fails
    with start(path, folder if stores else None, layout, **options) as llm, ThreadPoolExecutor(1) as thread:
        if rng.random() < 0.7:
            converse(llm)
        asking = thread.submit(asyncio.run, crowd(llm, said, N_REQUESTS, seed=number))
        while not asking.done():
            if clears:
                clear(folder)
            if forgets:
                forgotten: Future = parts(llm).engine.forget_cached()
                forgotten.result(PATIENCE_S)
            time.sleep(rng.choice((0.005, 0.02, 0.1)))
        asking.result()
        settle(llm)


def play_all(numbers, plain, folder):
    for number in numbers:
        play(number, plain, folder / f"{number}")


def test_the_first_runs(plain, tmp_path, always_loaded, dirty, monkeypatch):
    monkeypatch.setattr(Worth, "share", lambda worth, n_decodes, lucks, offers: list(offers))
    play_all(range(5), plain, tmp_path)


@pytest.mark.slow
def test_hundreds_of_runs(plain, tmp_path, always_loaded, dirty, monkeypatch):
    monkeypatch.setattr(Worth, "share", lambda worth, n_decodes, lucks, offers: list(offers))
    play_all(range(5, 300), plain, tmp_path)
