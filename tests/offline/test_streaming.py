"""`AsyncLLM`: many streams at once, what each output holds, and the ends of requests."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time

import httpx
import pytest
from rich.console import Console

from hydrainfer import LLM, AsyncLLM, InvalidRequest, RequestOutputKind, SamplingParams, Unavailable
from hydrainfer.config import load
from hydrainfer.serving import serve_in_background
from tests.checkpoints import make_llava
from tests.equivalence.mixed import image, user
from tests.parts import parts
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(180)]
OPTIONS = {"threads": 1, "dtype": "float32", "native_kernels": False, "log_level": "warning", "launcher": "inproc"}
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_llava(tmp_path_factory.mktemp("llava"))


def chats(n):
    return [user(f"Question {i}.") if i % 4 else user(image(i), f"What is {i}?") for i in range(n)]


async def read(stream):
    return [output async for output in stream]


def n_leased(llm):
    return sum(leased for caches in parts(llm).pools().values() for _, leased, _ in caches.usage().values())


def run(path, work, **options):
    async def main():
        async with AsyncLLM(path, **OPTIONS | options) as llm:
            found = await work(llm)
            async with asyncio.timeout(PATIENCE_S):
                while parts(llm).sessions.n_live or n_leased(llm):  # the engine tells an end before it lets go
                    await asyncio.sleep(0.01)
            for caches in parts(llm).pools().values():
                caches.check(idle=True)
            return found

    return asyncio.run(main())


@pytest.mark.parametrize("layout", ["1EPD", "1E1P1D"])
def test_thirty_two_at_once_have_the_servers_tokens(path, layout):
    greedy = SamplingParams(temperature=0.0, max_tokens=12)

    async def work(llm):
        return await asyncio.gather(*(read(llm.chat(chat, greedy)) for chat in chats(32)))

    found = [outputs[-1].outputs[0] for outputs in run(path, work, layout=layout)]
    with LLM(path, **OPTIONS) as llm:
        whole = [out.outputs[0] for out in llm.chat(chats(32), greedy, use_tqdm=False)]
    assert [(one.token_ids, one.text, one.finish_reason) for one in found] == [
        (one.token_ids, one.text, one.finish_reason) for one in whole
    ]
    if layout == "1EPD":
        loaded = load({"model": str(path), "port": 0, **OPTIONS})
        with serve_in_background(loaded, Console(quiet=True)) as (url, _), httpx.Client(timeout=60) as http:
            for chat, one in list(zip(chats(32), found))[1:4]:
                body = {"messages": chat, "max_tokens": 12, "temperature": 0, "return_token_ids": True}
                answer = http.post(f"{url}/v1/chat/completions", json=body).json()
                assert tuple(answer["choices"][0]["token_ids"]) == one.token_ids


def test_what_an_output_holds(path):
    def params(kind, n=1):
        return SamplingParams(n=n, temperature=0.9, seed=4, max_tokens=9, logprobs=1, ignore_eos=True, output_kind=kind)

    async def work(llm):
        return [await read(llm.generate("Once", params(kind, 2))) for kind in RequestOutputKind]

    def values(logprobs):
        return pytest.approx([one.logprob for one in logprobs], abs=1e-4)  # three runs, in batches of their own

    grown, new, last = run(path, work)
    assert len(last) == 1 and last[0].finished
    assert [one.finished for one in grown] == [False] * (len(grown) - 1) + [True]
    for choice in last[0].outputs:
        whole = grown[-1].outputs[choice.index]
        assert (whole.text, whole.token_ids, whole.finish_reason) == (choice.text, choice.token_ids, "length")
        assert [one.logprob for one in whole.logprobs] == values(choice.logprobs)
        pieces = [one.outputs[choice.index] for one in new]
        assert "".join(piece.text for piece in pieces) == choice.text
        assert sum((piece.token_ids for piece in pieces), ()) == choice.token_ids
        assert [one.logprob for piece in pieces for one in piece.logprobs] == values(choice.logprobs)
        assert len(choice.logprobs) == 9
        lengths = [len(one.outputs[choice.index].token_ids) for one in grown]
        assert lengths == sorted(lengths)
    assert {one.prompt for one in (*grown, *new, *last)} == {"Once"}
    assert last[0].outputs[0].token_ids != last[0].outputs[1].token_ids


def test_requests_end_when_they_are_aborted_or_no_longer_read(path):
    async def work(llm):
        seen = []
        async for output in llm.chat(chats(2)[1], LONG, request_id="mine"):
            seen.append(output)
            with pytest.raises(InvalidRequest, match="'mine' is live"):
                await anext(llm.generate("x", request_id="mine"))
            if len(seen) == 2:
                await llm.abort(["mine", "nobody's"])
        assert seen[-1].finished and seen[-1].outputs[0].finish_reason == "abort"
        assert len(seen[-1].outputs[0].token_ids) < 400
        left = llm.chat(chats(1)[0], LONG)
        await anext(left)
        await left.aclose()
        early = llm.generate("Once", LONG, request_id="early")
        task = asyncio.ensure_future(read(early))
        await asyncio.sleep(0)
        await llm.abort("early")
        assert (await task)[-1].outputs[0].finish_reason == "abort"
        return await read(llm.generate("Once", SamplingParams(max_tokens=2), request_id="mine"))

    assert run(path, work)[-1].finished


def test_reset_prefix_cache(path):
    async def work(llm):
        outputs = []
        for reset in (False, False, True):
            assert not reset or await llm.reset_prefix_cache() is True
            outputs += await read(llm.chat(user("Once upon a time, " * 20), SamplingParams(max_tokens=1)))
        return [one.num_cached_tokens for one in outputs]

    first, again, reset = run(path, work)
    assert first == reset == 0 < again


def test_an_id_can_be_taken_again_at_once(path):
    """While the engine, which is slow here, still ends the earlier request of this id."""

    async def work(llm):
        handle = parts(llm).sessions.handle
        cancel = handle.cancel
        handle.cancel = lambda ids: threading.Timer(0.2, cancel, (ids,)).start()
        for _ in range(40):
            stream = llm.generate("Once", LONG, request_id="mine")
            assert (await anext(stream)).request_id == "mine"
            await stream.aclose()
        handle.cancel = cancel
        return await read(llm.generate("Once", SamplingParams(max_tokens=2)))

    assert run(path, work)[-1].finished


def test_the_last_output_of_an_aborted_stream_of_news_holds_no_old_ones(path):
    async def work(llm):
        params = SamplingParams(max_tokens=400, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
        found = []
        async for output in llm.generate("Once", params, request_id="mine"):
            found.append(output.outputs[0])
            if len(found) == 3:
                await llm.abort("mine")
        assert (found[-1].finish_reason, found[-1].token_ids, found[-1].text) == ("abort", (), "")
        return found

    assert len(run(path, work)) >= 4


def test_a_request_is_aborted_while_its_picture_is_fetched(path):
    async def work(llm):
        with socket.create_server(("127.0.0.1", 0)) as silent:
            url = f"http://127.0.0.1:{silent.getsockname()[1]}/a.png"
            chat = user({"type": "image_url", "image_url": {"url": url}}, "What is this?")
            task = asyncio.ensure_future(read(llm.chat(chat, LONG, request_id="mine")))
            await asyncio.sleep(0.3)
            begin_s = time.monotonic()
            await llm.abort("mine")
            (output,) = await task
            assert time.monotonic() - begin_s < 8.0  # a read that nobody ends takes 10
            return output

    output = run(path, work, media_hosts="any", image_fetch_s=100)
    assert output.finished and output.outputs[0].finish_reason == "abort" and output.request_id == "mine"


def test_wrong_ones_fail_alone(path):
    async def work(llm):
        good = read(llm.generate("Once", SamplingParams(max_tokens=5, temperature=0.0)))
        grammar = {"structured_outputs": {"regex": "("}}
        bad = [read(llm.generate("Once", SamplingParams(**one))) for one in ({"stop_token_ids": [10**9]}, grammar)]
        found = await asyncio.gather(good, *bad, return_exceptions=True)
        with pytest.raises(InvalidRequest, match="must be a SamplingParams"):
            await read(llm.generate("Once", {"max_tokens": 5}))
        with pytest.raises(InvalidRequest):
            llm.chat([{"role": "user"}])
        return found

    good, *bad = run(path, work)
    assert good[-1].finished and all(isinstance(one, InvalidRequest) for one in bad)


def test_closed_while_requests_are_prepared(path):
    async def main():
        llm = AsyncLLM(path, **OPTIONS)
        tasks = [asyncio.ensure_future(read(llm.chat(chat, LONG))) for chat in chats(40)]
        await asyncio.sleep(0.01)
        await asyncio.to_thread(llm.close)
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert {type(one) for one in asyncio.run(main())} <= {Unavailable}


def test_after_the_end(path):
    async def main():
        llm = AsyncLLM(path, **OPTIONS)
        stream = llm.generate("Once", LONG)
        await anext(stream)
        await asyncio.to_thread(llm.shutdown)
        with pytest.raises(Unavailable):
            await read(stream)
        with pytest.raises(Unavailable, match="closed"):
            await read(llm.generate("Once"))

    asyncio.run(main())


def test_the_last_reference_closes_it(path):
    """It is closed at once, or by the thread that collects it as a part of a cycle."""

    def engines():
        return [thread for thread in threading.enumerate() if thread.name.startswith("engine-")]

    llm = LLM(path, **OPTIONS)
    (answer,) = llm.generate("x", SamplingParams(max_tokens=2), use_tqdm=False)
    assert answer.finished and len(engines()) == 1
    del llm
    assert engines() == []
    held = [LLM(path, **OPTIONS)]
    held.append(held)
    assert len(engines()) == 1
    held = None
    collector = threading.Thread(target=gc.collect)
    collector.start()
    collector.join(PATIENCE_S)
    for engine in engines():
        engine.join(PATIENCE_S)
    assert engines() == []
