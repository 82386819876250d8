"""Every layout gives the tokens that one EPD instance gives, moves only what it must, and leaves every pool whole."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from contextlib import contextmanager

import msgspec
import pytest
import zmq

from hydrainfer import LLM, SamplingParams
from hydrainfer.cluster.messages import Close, Orders, encode
from hydrainfer.core import ConfigError, HydraError
from hydrainfer.machine import in_url
from hydrainfer.processor import parse_messages
from hydrainfer.scheduler import Worth
from hydrainfer.scheduler.decodes import Decodes
from tests.cluster.rig import IPV6
from tests.equivalence.mixed import (
    CHATS,
    CHUNKED,
    LAYOUTS,
    PARAMS,
    TRANSPORTS,
    ask,
    check_moves,
    parkings,
    settled_stats,
)
from tests.equivalence.oracle import drafted_by
from tests.parts import parts
from tests.waiting import SOON_S, wait_until

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(300)]

FEW_BLOCKS, FEW_PICTURES = 40, 3
KV_BLOCK, PICTURE = 2 * 2 * 4 * 2 * 32 * 4, 64 * 64 * 4  # bytes, of this checkpoint


def start(tiny, layout, few=False, **options):
    if few:
        sizes = {"kv_cache_gib": FEW_BLOCKS * KV_BLOCK / 2**30, "image_cache_gib": FEW_PICTURES * PICTURE / 2**30}
        options = {"headroom_tokens": 0, **sizes, **options}
    return LLM(tiny, layout=layout, launcher="inproc", **CHUNKED | options)


def check_whole(llm):
    instance = parts(llm)
    pixels = instance.intake.processor.pixels  # of a request that was given up while it was prepared, they come later

    def is_whole():
        leased = (n for pool in instance.pools().values() for _, n, _ in pool.usage().values())
        return not len(pixels) and not any(leased)

    wait_until(is_whole, SOON_S, say=instance.engine.stats)
    for pool in instance.pools().values():
        pool.check(idle=True)
    instance.sessions.check(idle=True)
    pixels.check(idle=True)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_are_those_of_one_instance(tiny, wanted, layout, transport):
    with start(tiny, layout, transport=transport) as llm:
        assert ask(llm) == wanted
        check_whole(llm)
        check_moves(settled_stats(llm), layout)
        for name, node in parts(llm).engine.launcher.nodes.items():
            engine = node.engine
            model = next(iter(engine.lanes.runners.values()))._model
            assert (model.vision is not None) == ("E" in name)
            assert (model.language is not None) == ("P" in name or "D" in name)


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=IPV6), pytest.param("[::1]", marks=IPV6)])
def test_messages_and_blocks_over_tcp(tiny, wanted, host):
    """As between machines: CURVE on every socket, nobody else is heard."""
    with start(tiny, "1E1P1D", transport="tcp", cluster_host=host) as llm:
        hub = parts(llm).engine
        nodes = hub.launcher.nodes.values()
        addresses = [hub.address, hub.pixels_at, *(node.mesh.address for node in nodes)]
        assert all(a.startswith(f"tcp://{in_url(host)}:") for a in addresses)
        with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
            stranger.setsockopt(zmq.IPV6, ":" in host)
            for address in addresses:
                stranger.connect(address)
            for node in nodes:
                stranger.send(encode(Orders(node.incarnation, 0.0, (Close(),))))
            assert ask(llm) == wanted
            stranger.close(linger=0)
        check_whole(llm)
        check_moves(settled_stats(llm), "1E1P1D")
        assert {i.state for i in hub.instances()} == {"alive"}


@contextmanager
def watched(llm):
    """Yields a list with the largest number of requests that were in the cluster at once."""
    most, over = [0], threading.Event()

    def look():
        while not over.wait(0.002):
            most[0] = max(most[0], parts(llm).engine._side.lives.n_live)

    thread = threading.Thread(target=look)
    thread.start()
    yield most
    over.set()
    thread.join()


@pytest.mark.parametrize(
    ("layout", "copies"), [*((name, 2) for name in LAYOUTS[3:]), *((name, 4) for name in LAYOUTS[:3])]
)
def test_few_blocks(tiny, wanted, layout, copies):
    """Back-pressure everywhere; where decoding instances run full, preemption."""
    with start(tiny, layout, few=True) as llm:
        with watched(llm) as most:
            assert ask(llm, copies) == wanted
        assert most[0] > FEW_BLOCKS or copies < 4, most  # not each of them can have a block
        check_whole(llm)
        assert settled_stats(llm).n_preemptions > 0 or layout == "2E1P2D"


@pytest.mark.parametrize("overlap", ["off", "free"])
@pytest.mark.parametrize("layout", [*LAYOUTS[:3], "1EPD"])
def test_few_blocks_one_step_ahead(tiny, wanted, layout, overlap, monkeypatch):
    """Each step is launched while the one before is computed; who is preempted is in none of the two."""
    unknown = []

    real = Decodes.ahead

    def ahead(self):
        work = real(self)
        unknown.extend(w for w in work or () if w.unknown)
        return work

    monkeypatch.setattr(Decodes, "ahead", ahead)
    with start(tiny, layout, few=True, async_scheduling=True, overlap=overlap) as llm:
        assert ask(llm, 4) == wanted
        check_whole(llm)
        assert settled_stats(llm).n_preemptions > 0
    assert unknown


LONG = [
    SamplingParams(temperature=0.0, max_tokens=40),
    SamplingParams(temperature=0.3, seed=5, max_tokens=40, logprobs=1),
    SamplingParams(temperature=0.7, seed=6, max_tokens=40, repetition_penalty=1.1, min_tokens=20, n=2),
    SamplingParams(temperature=0.0, max_tokens=40, drafts=False),
]


@pytest.fixture(scope="module")
def without_drafts(tiny):
    with start(tiny, "1EPD", drafts="off") as llm:
        return ask_long(llm)


def ask_long(llm, predictions=None):
    """`predictions`: one per chat and entry of `LONG`."""
    chats, sampling = [chat for chat in CHATS for _ in LONG], LONG * len(CHATS)
    if predictions:
        sampling = [msgspec.structs.replace(s, prediction=p) for s, p in zip(sampling, predictions, strict=True)]
    outputs = llm.chat(chats, sampling, use_tqdm=False)
    return [[(c.token_ids, c.finish_reason, c.text) for c in out.outputs] for out in outputs]


def predictions_of(answers):
    """Right, edited and wrong predictions in turns."""
    texts = [choices[0][2] for choices in answers]
    edited = [text[:9] + "!" + text[12:] for text in texts]
    return [(texts[i], edited[i], texts[i - 1], "a" * 30)[(i + i // 4) % 4] for i in range(len(texts))]


@pytest.mark.parametrize("right", [1.0, 0.5, 0.0])
def test_drafts_that_are_right_or_wrong_change_no_token(tiny, without_drafts, right, monkeypatch):
    chats, sampling = [chat for chat in CHATS for _ in LONG], LONG * len(CHATS)
    with start(tiny, "1EPD", drafts="off") as llm:
        outputs = llm.chat(chats, sampling, use_tqdm=False)
    with drafted_by(monkeypatch, outputs, sampling, right):
        for layout, options in (("1EPD", {"few": True}), ("1EP1D", {"max_drafts": 15})):
            with start(tiny, layout, drafts="oracle", token_budget=99, **options) as llm:
                assert ask_long(llm) == without_drafts
                check_whole(llm)
                assert settled_stats(llm).drafts["oracle"].n_accepted >= 100 * right


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("1EPD", {}),
        ("1EPD", {"few": True, "max_drafts": 3}),
        ("1E1P1D", {}),
        ("1EP1D", {"few": True, "host_cache_gib": 4 * FEW_BLOCKS * KV_BLOCK / 2**30}),
    ],
)
def test_drafts_change_no_token(tiny, without_drafts, layout, options, monkeypatch):
    """In this process every draft is verified; elsewhere those that pay, which differ from machine to machine."""
    monkeypatch.setattr(Worth, "share", lambda worth, n_decodes, lucks, offers: list(offers))
    with start(tiny, layout, drafts="prediction,ngram", **options) as llm:
        assert ask_long(llm) == without_drafts
        assert ask_long(llm, predictions_of(without_drafts)) == without_drafts
        check_whole(llm)
        if layout == "1EPD":
            counts = settled_stats(llm).drafts
            assert 0 < counts["prediction"].n_accepted < counts["prediction"].n_tokens
            assert counts["ngram"].n_accepted < counts["ngram"].n_tokens  # a few, by chance none of them right


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"drafts": "ngrams"}, "unknown drafter 'ngrams'"),
        ({"drafts": "right=0.5"}, "is for emulated devices"),
        ({"drafts": "right=x"}, "right= takes a share"),
        ({"drafts": "ngram", "async_scheduling": True}, "--no-async-scheduling"),
        ({"max_drafts": 64}, "max_drafts"),
    ],
)
def test_drafts_that_cannot_be_are_refused_in_a_line(tiny, options, said):
    with pytest.raises(ConfigError, match=said) as raised:
        start(tiny, "1EPD", **options)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("layout", ["1E1P1D", "1EPD"])
def test_few_blocks_and_host_memory(tiny, wanted, layout, monkeypatch):
    """Where there is no room to decode, and who is preempted, waits in host memory."""
    entered = parkings(monkeypatch)
    with start(tiny, layout, few=True, host_cache_gib=4 * FEW_BLOCKS * KV_BLOCK / 2**30) as llm:
        assert ask(llm, 4) == wanted
        check_whole(llm)
        assert settled_stats(llm).n_parked == 0 and entered
    for parking in set(entered):
        parking.caches.check(idle=True)


@pytest.mark.parametrize("layout", ["1E1P1D", "1ED1P"])
def test_clients_that_leave_at_random_moments(tiny, wanted, layout):
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
        answers = await asyncio.gather(*(one(parts(llm).intake, i) for i in range(48)))
        end = time.monotonic() + SOON_S
        while parts(llm).sessions.n_live:
            assert time.monotonic() < end, parts(llm).engine.stats()
            await asyncio.sleep(0.005)
        return answers

    with start(tiny, layout, few=True) as llm:
        for i, answer in enumerate(asyncio.run(everyone(llm))):
            if answer is not None:
                want = wanted[(i % len(CHATS)) * len(PARAMS) + i % len(PARAMS)]
                assert answer == [tokens for tokens, _ in want]
        check_whole(llm)


@pytest.mark.parametrize("layout", ["1E1P1D", "1ED1P"])
def test_deadlines_at_every_stage(tiny, layout):
    """Whatever it was doing, a request ends with 504 and its blocks come back."""
    params = SamplingParams(max_tokens=45, ignore_eos=True)

    async def all_of(llm):
        intake, n_late = parts(llm).intake, 0
        works = [intake.chat(parse_messages(c, local=True), params) for c in CHATS * 6]
        for stream in await asyncio.gather(*works, return_exceptions=True):
            answer = stream
            if not isinstance(stream, BaseException):
                (answer,) = await asyncio.gather(stream.result(), return_exceptions=True)
            assert isinstance(answer, list) or answer.status == 504, answer
            n_late += not isinstance(answer, list)
        while parts(llm).sessions.n_live:
            await asyncio.sleep(0.005)
        return n_late

    n_late = 0
    for timeout_s in (0.03, 0.1, 0.2, 0.4):
        with start(tiny, layout, few=True, request_timeout_s=timeout_s) as llm:
            n_late += asyncio.run(all_of(llm))
            check_whole(llm)
    assert n_late > 6


def test_a_server_that_closes_ends_everything(tiny):
    llm = start(tiny, "1E1P1D", few=True)
    instance = parts(llm)

    async def leave():
        streams = [await instance.intake.chat(parse_messages(c, local=True), PARAMS[0]) for c in CHATS]
        await asyncio.sleep(0.02)
        await asyncio.get_running_loop().run_in_executor(None, llm.close)
        return await asyncio.gather(*(s.result() for s in streams), return_exceptions=True)

    for answer in asyncio.run(leave()):
        assert isinstance(answer, list | HydraError), answer
    for pool in instance.pools().values():
        pool.check(idle=True)


def test_a_transport_that_cannot_work_is_refused_in_one_line(tiny):
    with pytest.raises(ConfigError, match="needs caches on CUDA, they are on cpu; use gloo or auto"):
        LLM(tiny, layout="1E1PD", transport="nccl", device="cpu")


def test_a_layout_without_a_stage_is_refused_in_one_line(tiny):
    with pytest.raises(ConfigError, match="no instance that runs decode"):
        LLM(tiny, layout="1E1P")
