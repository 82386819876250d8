"""Instances over a folder of blocks, and conversations with them."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from hydrainfer import LLM, SamplingParams
from hydrainfer.assemble import store
from hydrainfer.cache import StoreTier, shared
from hydrainfer.core import Role
from hydrainfer.families import read_config
from hydrainfer.models import cache_specs
from hydrainfer.processor import ChatOptions, parse_prompts
from hydrainfer.stores import StoreError, StoreFull
from tests.checkpoints import make_llava
from tests.checkpoints_qwen import make_qwen
from tests.checkpoints_text import make_text
from tests.equivalence.mixed import image
from tests.parts import parts
from tests.waiting import PATIENCE_S

OPTIONS = {"threads": 1, "native_kernels": False, "block_tokens": 4, "token_budget": 64, "kv_cache_gib": 0.2}
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


MAKE = {
    **{kind: partial(make_text, kind=kind) for kind in ("llama", "gemma3", "qwen3_5", "lfm2", "lfm3", "gpt_oss")},
    "llava": make_llava,
    "qwen2_vl": partial(make_qwen, "qwen2_vl"),
    "qwen3_5 with pictures": partial(make_qwen, "qwen3_5"),
    "lfm3 with pictures": partial(make_qwen, "lfm3_vl"),
}


def place(folder, gib=1):
    return f"dir:{folder}?gib={gib}"


def start(path, folder=None, layout="1EPD", *, patient=True, **options):
    """An `LLM` on the store in `folder`, if one is named. `patient`: it waits for the store for however long that
    takes."""
    where = {} if folder is None else {"store": place(folder)}
    llm = LLM(path, layout=layout, launcher="inproc", **OPTIONS | where | options)
    for engine in engines(llm) if patient else ():
        engine.scheduler.asking.patience_s = engine.scheduler.fetching.least_s = 30.0
    return llm


def few(path, n_requests):
    """Options with which the caches hold about so many requests, or pictures."""
    config = read_config(path)
    specs = cache_specs(config, Role.parse("EPD"), "float32", OPTIONS["block_tokens"])
    kv = [spec for spec in specs if spec.size_option == "kv_cache_gib"]
    images = [spec for spec in specs if spec.size_option == "image_cache_gib"]
    size = sum(spec.block_bytes * (spec.held_by(90) + len(spec.span(0, 90))) for spec in kv)
    picture = sum(spec.block_bytes * spec.blocks_for(16) for spec in images)
    sizes = {"kv_cache_gib": n_requests * size / 2**30, "headroom_tokens": 0, "max_model_len": 96}
    return sizes | ({"image_cache_gib": (n_requests + 1) * picture / 2**30} if images else {})


@pytest.fixture
def always_loaded(monkeypatch):
    """What a store has is loaded even if these small models would compute it sooner."""
    monkeypatch.setattr(StoreTier, "load_s", lambda tier, n_bytes: 0.0)


@pytest.fixture
def dirty():
    """Fill what torch allocates with NaNs, or the largest integers."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def engines(llm):
    """The engines of all instances, in their order in the layout."""
    handle = parts(llm).engine
    launcher = getattr(handle, "launcher", None)
    return [handle._engine] if launcher is None else [node.engine for node in launcher.nodes.values()]


def counts(llm):
    """What all instances have done with the store, now and not at the last beat."""
    stats = [engine.stats(time.monotonic()).store for engine in engines(llm)]
    return {name: sum(getattr(s, name) for s in stats) for name in stats[0].__struct_fields__}


def encoded(llm):
    """The pictures that were encoded here."""
    stats = [engine.stats(time.monotonic()) for engine in engines(llm)]
    return sum(s.pictures_wanted - s.pictures_found for s in stats)


def settle(llm):
    """Wait until nothing is to be saved any more and nothing is held; then every pool is whole."""
    end, n_quiet = time.monotonic() + PATIENCE_S, 0
    while n_quiet < 2:
        n_quiet = 0 if any(map(_works, engines(llm))) or parts(llm).sessions.n_live else n_quiet + 1
        assert time.monotonic() < end, parts(llm).engine.stats()
        time.sleep(0.003)
    check_whole(llm, end)


def _works(engine):
    stored = engine._copies.stored if engine._copies is not None else None
    works = not engine.idle
    if stored is not None:
        works |= bool(stored._running) or engine.scheduler.room.saving.waiting
    return works


def check_whole(llm, end=0.0):
    while time.monotonic() < end and any(
        leased for pool in parts(llm).pools().values() for _, leased, _ in pool.usage().values()
    ):
        time.sleep(0.003)
    for engine, pool in zip(engines(llm), parts(llm).pools().values(), strict=True):
        pool.check(idle=True)
        assert not engine.scheduler.fetching.live


# ---- conversations


class Turn(NamedTuple):
    """What is asked. `pictures`: numbers of those that its placeholders show."""

    ids: list[int]
    pictures: tuple[int, ...] = ()
    salt: str = ""


class Answer(NamedTuple):
    """`ids`: the prompt with its pictures' places. `logprobs`: as exact numbers. `n_cached`: the tokens of the prompt
    that were found. `ttft_s`: when the first token came."""

    ids: tuple[int, ...]
    tokens: list[int]
    logprobs: tuple[Any, ...]
    n_cached: int
    ttft_s: float


def ask(llm, turns, sampling=GREEDY):
    """The answers to turns that come together."""
    return asyncio.run(ask_all(llm, turns, sampling))


async def ask_all(llm, turns, sampling=GREEDY):
    answers = await asyncio.gather(*(answer(llm, turn, sampling) for turn in turns))
    await ended(llm)
    return list(answers)


async def ended(llm):
    """Wait until every request is over: its end is told to this event loop."""
    while parts(llm).sessions.n_live:
        await asyncio.sleep(0.002)


async def begin(llm, turn, sampling):
    """The stream of one."""
    prompt: dict[str, Any] = {"prompt_token_ids": turn.ids}
    if turn.pictures:
        prompt["multi_modal_data"] = {"image": [image(i)["image"] for i in turn.pictures]}
    (one,) = parse_prompts([prompt])
    intake = parts(llm).intake
    if one.message is None:
        return await intake.complete(one.prompt, sampling, salt=turn.salt)
    options = ChatOptions(media=one.options)
    return await intake.chat((one.message,), sampling, options=options, prompt=one.prompt, salt=turn.salt)


async def answer(llm, turn, sampling=GREEDY):
    began_s, first_s = time.monotonic(), 0.0
    stream, tokens, logprobs = await begin(llm, turn, sampling), [], []
    try:
        async for deltas in stream:
            first_s = first_s or time.monotonic() - began_s
            for delta in deltas:
                tokens += delta.token_ids
                logprobs += [(x.logprob, x.top) for x in delta.logprobs]
    finally:
        stream.close()
    return Answer(stream.prepared.prompts[0], tokens, tuple(logprobs), stream.n_cached[0], first_s)


def openings(llm, n=5):
    """The first turns of conversations: two begin alike, two differ only in their salt; with pictures if the model
    takes them, of which two show the same."""
    images = parts(llm).intake.processor.model.images
    if images is None:
        begins = [[1, 9, 8, 7] * 8, [1, 9, 8, 7] * 8, [1, 9, 8, 6] * 7, [1, 30, 31], [1, 9, 8, 7] * 8]
        turns = [Turn([*ids, 40 + min(i, 3), 41, 42]) for i, ids in enumerate(begins)]
    else:
        show = images.token_id
        begins = [[1, 9, 8, 7] * 4, [1, 9, 8, 7] * 4, [1, 9, 8, 6] * 3, [1, 30, 31], [1, 9, 8, 7] * 4]
        shown: list[tuple[int, ...]] = [(1,), (1,), (2, 3), (), (1,)]
        turns = [
            Turn([*ids, *[show] * len(pictures), 40 + min(i, 3), 41, 42], pictures)
            for i, (ids, pictures) in enumerate(zip(begins, shown))
        ]
    turns[4] = turns[0]._replace(salt="another tenant")
    return turns[:n]


def follow(turn, said, more, placeholders=()):
    """The next turn: the one before, its answer, and more."""
    answered = [token for token in said.tokens if token not in placeholders]
    return turn._replace(ids=[*turn.ids, *answered, 50 + more, 51, 52])


def placeholders_of(llm):
    images = parts(llm).intake.processor.model.images
    return () if images is None else tuple(images.placeholders)


def converse(llm, n_turns=3, sampling=GREEDY):
    """By turn: what was asked, side by side, and the answers."""
    turns, said = openings(llm), []
    for i in range(n_turns):
        answers = ask(llm, turns, sampling)
        said.append((turns, answers))
        turns = list(map(partial(follow, more=i, placeholders=placeholders_of(llm)), turns, answers))
    return said


def whole(before, after, block_tokens=OPTIONS["block_tokens"]):
    """The tokens of whole blocks at the beginning of the prompt `after` that `before`'s prompt and answer have
    filled."""
    computed = [*before.ids, *before.tokens][:-1]
    same = next((i for i, (a, b) in enumerate(zip(computed, after.ids)) if a != b), min(len(computed), len(after.ids)))
    return min(same, len(after.ids) - 1) // block_tokens * block_tokens


async def crowd(llm, said, n, seed):
    """`n` requests of these conversations, in any order, in groups; some leave."""
    rng, every = random.Random(seed), [pair for turns, answers in said for pair in zip(turns, answers)]

    async def one(turn, wanted):
        await asyncio.sleep(rng.uniform(0.0, 0.03))
        if rng.random() < 0.25:
            stream = await begin(llm, turn, GREEDY)
            await asyncio.sleep(rng.uniform(0.0, 0.03))
            stream.close()
        else:
            assert (await answer(llm, turn)).tokens == wanted.tokens

    for _ in range(n // 8):
        await asyncio.gather(*(one(*rng.choice(every)) for _ in range(8)))
    await ended(llm)


# ---- a store that fails


class Faults(NamedTuple):
    """How often a call fails in each way; `sleep_s` is the longest that one takes; those that `hang` do so
    for `hang_s`, or until `Faulty.release`. `only`: of one method."""

    error: float = 0.0
    full: float = 0.0
    lost: float = 0.0
    lie: float = 0.0
    flip: float = 0.0
    slow: float = 0.0
    sleep_s: float = 0.2
    hang: float = 0.0
    hang_s: float | None = None
    only: str = ""


class Faulty:
    """A `SharedStore` around the real one of `folder`, with seeded `faults`, which may be changed at any time.
    `n_calls`: by method. `n_hung`: the calls that hang."""

    def __init__(self, store, folder, faults, seed=0):
        self.store, self.folder, self.faults = store, folder, faults
        self.place, self.counts, self.n_calls, self.n_hung = store.place, store.counts, Counter(), 0
        self._rng, self._lock, self._released = random.Random(seed), threading.Lock(), threading.Event()

    def release(self):
        """End what hangs; nothing hangs any more."""
        self._released.set()

    def has(self, names):
        self._call("has")
        return [there or self._chance(self.faults.lie) for there in self.store.has(names)]

    def read(self, names, into):
        self._call("read")
        for name in names:
            if self._chance(self.faults.lost):
                self._each(name, Path.unlink)
            if self._chance(self.faults.flip):
                self._each(name, self._flip)
        return self.store.read(names, into)

    def write(self, names, blocks, wanted=lambda: True):
        self._call("write")
        if self._chance(self.faults.full):
            raise StoreFull("the disk is full")
        return self.store.write(names, blocks, wanted)

    def touch(self, names):
        self._call("touch")
        return [there and not self._chance(self.faults.lie) for there in self.store.touch(names)]

    def contents(self):
        return self.store.contents()

    def close(self):
        self.store.close()

    def _chance(self, p):
        with self._lock:
            return self._rng.random() < p

    def _call(self, name):
        faults = self.faults
        if faults.only not in ("", name):
            return
        with self._lock:
            self.n_calls[name] += 1
            hangs = self._rng.random() < faults.hang
            sleep_s = self._rng.uniform(0.0, faults.sleep_s) if self._rng.random() < faults.slow else 0.0
            fails = self._rng.random() < faults.error
            self.n_hung += hangs
        time.sleep(sleep_s)
        if hangs:
            self._released.wait(faults.hang_s)
        if fails:
            raise StoreError("the store is away")

    def _each(self, name, do):
        """`do` it to the file of a block, whatever root it is below."""
        for path in self.folder.glob(f"*/*/{name.key.hex()}-{name.kind}"):
            with suppress(OSError):
                do(path)

    def _flip(self, path):
        whole = bytearray(path.read_bytes())
        with self._lock:
            whole[self._rng.randrange(len(whole))] ^= 1 << self._rng.randrange(8)
        path.write_bytes(whole)


@pytest.fixture
def faulty(monkeypatch):
    """The stores of instances started from now on fail; a list of them. Set their `faults`. A store that has failed is
    tried again soon."""
    made, opened = [], store.open_places
    monkeypatch.setattr(shared, "_FIRST_S", 0.01)
    monkeypatch.setattr(shared, "_LONGEST_S", 0.05)

    def open_faulty(places, root):
        made.append(Faulty(opened(places, root), places[0].address.path, Faults(), seed=len(made)))
        return made[-1]

    monkeypatch.setattr(store, "open_places", open_faulty)
    yield made
    for one in made:
        one.release()
