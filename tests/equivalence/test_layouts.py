"""Every layout gives the tokens that one EPD instance gives, moves only what it must, and leaves every pool whole."""

from __future__ import annotations

import asyncio
import random
import time

import pytest
from PIL import Image

from hydrainfer import LLM, SamplingParams
from hydrainfer.cluster import Pulse
from hydrainfer.core import ConfigError, HydraError
from hydrainfer.processor import parse_messages
from tests.checkpoints import make_llava, make_picture

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(300)]

LAYOUTS = ["1E1P1D", "1EP1D", "1ED1P", "1E1PD", "2E1P2D", "1E2PD+1EPD", "2EPD"]
N_NEW = 10
FEW = {"token_budget": 32, "block_tokens": 4, "headroom_tokens": 0}
FEW_BLOCKS, FEW_PICTURES = 40, 3
KV_BLOCK, PICTURE = 2 * 2 * 4 * 2 * 32 * 4, 64 * 64 * 4  # bytes, of this checkpoint


def image(i):
    return {"type": "image", "image": Image.fromarray(make_picture(i, 56))}


def user(*parts):
    return [{"role": "user", "content": [p if isinstance(p, dict) else {"type": "text", "text": p} for p in parts]}]


CHATS = [
    user("Explain how a queue works."),
    user(image(1), "What is in this picture?"),
    user("Compare", image(2), "with", image(1), "and with", image(3)),
    user(image(4), "A long text: " + "one two three four five six " * 6),
    user("Only a long text, in chunks: " + "seven eight nine ten " * 8),
    user(image(1), "What is in this picture, again?"),
]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=N_NEW),
    SamplingParams(temperature=1.0, top_p=0.9, seed=5, n=2, max_tokens=N_NEW),
    SamplingParams(temperature=0.8, seed=7, max_tokens=N_NEW, logprobs=2, repetition_penalty=1.2),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_llava(tmp_path_factory.mktemp("llava"))


def start(path, layout, few=False, **options):
    if few:
        sizes = {"kv_cache_gib": FEW_BLOCKS * KV_BLOCK / 2**30, "image_cache_gib": FEW_PICTURES * PICTURE / 2**30}
        options = {**FEW, **sizes, **options}
    return LLM(path, layout=layout, launcher="inproc", threads=1, native_kernels=False, **options)


def ask(llm, copies=1):
    """Greedy and seeded answers to the mixed batch."""
    chats = [c for c in CHATS for _ in PARAMS] * copies
    outputs = llm.chat(chats, PARAMS * len(CHATS) * copies, use_tqdm=False)
    found = [[(c.token_ids, [round(x.logprob, 3) for x in c.logprobs]) for c in out.outputs] for out in outputs]
    n = len(found) // copies
    assert all(found[i * n : (i + 1) * n] == found[:n] for i in range(copies)), "the same request, other tokens"
    return found[:n]


@pytest.fixture(scope="module")
def wanted(path):
    with start(path, "1EPD") as llm:
        return ask(llm)


def settled_stats(llm):
    """Instances tell theirs now and then."""
    time.sleep(3 * Pulse().beat_s)
    return llm._instance.engine.stats()


def check_whole(llm, seconds=10.0):
    instance, end = llm._instance, time.monotonic() + seconds
    while any(leased for pool in instance.pools().values() for _, leased, _ in pool.usage().values()):
        assert time.monotonic() < end, instance.engine.stats()
        time.sleep(0.005)
    for pool in instance.pools().values():
        pool.check(idle=True)
    instance.sessions.check(idle=True)
    instance.intake.processor.pixels.check(idle=True)


@pytest.mark.parametrize("transport", ["local", "shared-memory", "gloo", "tcp"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_are_those_of_one_instance(path, wanted, layout, transport):
    with start(path, layout, transport=transport) as llm:
        assert ask(llm) == wanted
        check_whole(llm)
        stats = settled_stats(llm)
        if layout in ("1E1P1D", "1E1PD", "1ED1P"):
            assert stats.blocks_pulled["embed"] == 4, "each of four pictures crosses once"
        if layout in ("1E1P1D", "1EP1D", "1ED1P"):
            n_requests = len(CHATS) * sum(p.n for p in PARAMS)
            n_pictures = 4 * sum(p.n for p in PARAMS) if layout != "1EP1D" else 0  # chats with pictures move twice
            assert stats.n_landed == n_requests + n_pictures, "each KV crosses once"
        if layout == "2EPD":
            assert stats.n_landed == 0 and not stats.blocks_pulled
        for name, node in llm._instance.engine.launcher.nodes.items():
            engine = node.engine
            model = next(iter(engine._runners.values()))._model
            assert (model.vision is not None) == ("E" in name)
            assert (model.language is not None) == ("P" in name or "D" in name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_few_blocks(path, wanted, layout):
    """Back-pressure everywhere; where decoding instances run full, preemption."""
    with start(path, layout, few=True) as llm:
        assert ask(llm, copies=2) == wanted
        check_whole(llm)
        assert settled_stats(llm).n_preemptions > 0 or layout == "2E1P2D"


@pytest.mark.parametrize("layout", ["1E1P1D", "1ED1P"])
def test_clients_that_leave_at_random_moments(path, wanted, layout):
    rng = random.Random(layout)

    async def one(intake, i):
        chat, params = CHATS[i % len(CHATS)], PARAMS[i % len(PARAMS)]
        await asyncio.sleep(rng.uniform(0.0, 0.5))
        stream = await intake.chat(parse_messages(chat, local=True), params)
        if i % 3 == 0:
            choices = await stream.result()
            return [tuple(c.token_ids) for c in choices]
        await asyncio.sleep(rng.uniform(0.0, 0.2))
        stream.close()
        return None

    async def everyone(llm):
        answers = await asyncio.gather(*(one(llm._instance.intake, i) for i in range(48)))
        end = time.monotonic() + 10
        while llm._instance.sessions.n_live:
            assert time.monotonic() < end, llm._instance.engine.stats()
            await asyncio.sleep(0.005)
        return answers

    with start(path, layout, few=True) as llm:
        for i, answer in enumerate(asyncio.run(everyone(llm))):
            if answer is not None:
                want = wanted[(i % len(CHATS)) * len(PARAMS) + i % len(PARAMS)]
                assert answer == [tokens for tokens, _ in want]
        check_whole(llm)


@pytest.mark.parametrize("layout", ["1E1P1D", "1ED1P"])
def test_deadlines_at_every_stage(path, layout):
    """Whatever it was doing, a request ends with 504 and its blocks come back."""
    params = SamplingParams(max_tokens=45, ignore_eos=True)

    async def all_of(llm):
        intake, n_late = llm._instance.intake, 0
        works = [intake.chat(parse_messages(c, local=True), params) for c in CHATS * 6]
        for stream in await asyncio.gather(*works, return_exceptions=True):
            answer = stream
            if not isinstance(stream, BaseException):
                (answer,) = await asyncio.gather(stream.result(), return_exceptions=True)
            assert isinstance(answer, list) or answer.status == 504, answer
            n_late += not isinstance(answer, list)
        while llm._instance.sessions.n_live:
            await asyncio.sleep(0.005)
        return n_late

    n_late = 0
    for timeout_s in (0.03, 0.1, 0.2, 0.4):
        with start(path, layout, few=True, request_timeout_s=timeout_s) as llm:
            n_late += asyncio.run(all_of(llm))
            check_whole(llm)
    assert n_late > 6


def test_a_server_that_closes_ends_everything(path):
    llm = start(path, "1E1P1D", few=True)
    instance = llm._instance

    async def leave():
        streams = [await instance.intake.chat(parse_messages(c, local=True), PARAMS[0]) for c in CHATS]
        await asyncio.sleep(0.02)
        await asyncio.get_running_loop().run_in_executor(None, llm.close)
        return await asyncio.gather(*(s.result() for s in streams), return_exceptions=True)

    for answer in asyncio.run(leave()):
        assert isinstance(answer, list | HydraError), answer
    for pool in instance.pools().values():
        pool.check(idle=True)


def test_a_transport_that_cannot_work_is_refused_in_one_line(path):
    with pytest.raises(ConfigError, match="needs caches on CUDA, they are on cpu; use gloo or auto"):
        LLM(path, layout="1E1PD", transport="nccl", device="cpu")


def test_a_layout_without_a_stage_is_refused_in_one_line(path):
    with pytest.raises(ConfigError, match="no instance that runs decode"):
        LLM(path, layout="1E1P")
