"""Sessions and intake without HTTP, as the offline API uses them: one event loop per call, or one for ever."""

import asyncio
import threading
import time

import pytest

from hydrainfer.core import (
    DeadlineExceeded,
    ErrorInfo,
    HydraError,
    InternalError,
    InvalidRequest,
    Output,
    Overloaded,
    SamplingParams,
    Unavailable,
)
from hydrainfer.processor import PixelStore, Processor, parse_messages
from hydrainfer.server import Intake, Sessions
from hydrainfer.server.door.overload import Work
from tests.server.conftest import image_part
from tests.server.fakes import FakeEngine
from tests.waiting import HELD_S, PATIENCE_S, wait_until

pytestmark = pytest.mark.cpu
CHAT = parse_messages([{"role": "user", "content": [image_part(), {"type": "text", "text": "hi"}]}])
LONG = SamplingParams(max_tokens=200, ignore_eos=True)


class Bench:
    def __init__(self, model, **engine):
        self.pixels = PixelStore(1 << 20)
        self.sessions = Sessions(model.vocabulary, self.pixels, time.monotonic)
        self.said = model.tokenizer.encode("one two three").ids
        self.engine = FakeEngine(self.sessions.sink, lambda r: [*self.said, 2], pixels=self.pixels.get, **engine)
        self.sessions.attach(self.engine)
        self.intake = Intake(Processor(model, self.pixels, weights=b"", dtype="float32"), self.sessions)

    def at_rest(self):
        self.sessions.check()  # takes in what came after the last loop had ended
        return self.sessions.n_live == 0 and len(self.pixels) == 0

    def check_idle(self):
        wait_until(lambda: self.engine.n_live == 0 and not self.engine.ended)
        wait_until(self.at_rest)
        self.sessions.check(idle=True)
        self.pixels.check(idle=True)

    async def idle(self):
        """Waits in the loop that hands outputs over."""
        await happens(self.at_rest)
        self.check_idle()

    def close(self):
        self.intake.close()
        self.engine.close()
        self.sessions.settle_all()
        self.check_idle()


async def happens(condition):
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture
def make(model):
    made = []

    def bench(**engine):
        made.append(Bench(model, **engine))
        return made[-1]

    yield bench
    for one in made:
        one.close()


async def answer(bench, sampling=None, **kw):
    stream = await bench.intake.chat(CHAT, sampling or SamplingParams(max_tokens=50), **kw)
    return await stream.result()


def test_a_loop_per_call(make):
    bench = make()
    for _ in range(3):
        (done,) = asyncio.run(answer(bench))
        assert done.text == "one two three" and done.finish_reason == "stop" and done.token_ids == [*bench.said, 2]
        bench.check_idle()


def test_a_loop_that_ends_before_its_requests_leaves_nothing(make):
    bench = make(step_s=0.01)

    async def walk_away():
        await bench.intake.chat(CHAT, LONG)

    asyncio.run(walk_away())
    assert bench.sessions.n_live == 1
    bench.engine.cancel([r.id for r in bench.engine.submitted])
    bench.check_idle()
    assert asyncio.run(answer(bench))[0].text == "one two three"


async def test_cancelling_the_reader_cancels_the_request(make):
    bench = make(step_s=0.005)
    task = asyncio.ensure_future(answer(bench, LONG))
    while not bench.engine.n_steps:
        await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await bench.idle()
    assert len(bench.engine.cancelled) == 1


async def test_closing_while_somebody_waits_ends_the_iteration(make):
    bench = make()
    bench.engine.hold.set()
    stream = await bench.intake.chat(CHAT, LONG)
    reader = asyncio.ensure_future(anext(stream, None))
    await asyncio.sleep(0.01)
    stream.close()
    stream.close()
    assert await reader is None
    await bench.idle()


async def test_outputs_that_wait_for_their_reader_are_merged(make):
    bench = make(tokens_per_step=1)
    stream = await bench.intake.chat(CHAT, SamplingParams(max_tokens=50))
    await happens(bench.at_rest)
    (first,) = await anext(stream)
    assert first.token_ids == [*bench.said, 2] and first.text == "one two three" and first.finish_reason == "stop"
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


@pytest.mark.parametrize("tokens_per_step", [1, 4])
async def test_a_stop_string_counts_to_its_last_token(make, tokens_per_step):
    bench = make(tokens_per_step=tokens_per_step)
    (done,) = await answer(bench, SamplingParams(max_tokens=50, stop=("two",), logprobs=1))
    assert done.text == "one " and done.stop_reason == "two"
    whole = bench.said[: len(done.token_ids)]
    assert done.token_ids == whole and len(done.logprobs) == len(whole) < len(bench.said)


async def test_a_stop_string_ends_its_choice_at_once_and_no_other(make):
    bench = make(step_s=0.005)
    # the first choice meets the stop string; the second would run to its end
    stream = await bench.intake.chat(CHAT, SamplingParams(n=2, max_tokens=200, ignore_eos=True, stop=("two",)))
    first, second = (r.id for r in bench.engine.submitted)
    bench.engine.live[second] = (bench.engine.submitted[1], [], 0)
    async for deltas in stream:
        if any(d.finish_reason for d in deltas):
            break
    await happens(lambda: bench.engine.cancelled == [first])
    assert [d.choice for d in await anext(stream)] == [1]
    stream.close()
    await happens(lambda: bench.engine.cancelled == [first, second])
    await bench.idle()


async def test_one_failed_choice_ends_all(make):
    bench = make(step_s=0.005)
    stream = await bench.intake.chat(CHAT, SamplingParams(n=3, max_tokens=200, ignore_eos=True))
    bench.sessions.sink([Output(bench.engine.submitted[1].id, finish_reason="error", error=ErrorInfo(500, "no"))])
    with pytest.raises(HydraError, match="no"):
        await stream.result()
    assert set(bench.engine.cancelled) == {bench.engine.submitted[0].id, bench.engine.submitted[2].id}
    bench.engine.cancel([bench.engine.submitted[1].id])
    await bench.idle()


async def test_many_that_end_in_one_step_leave_the_loop_its_turns(make):
    bench = make()
    bench.engine.hold.set()
    streams = [await bench.intake.chat(CHAT, SamplingParams(max_tokens=200)) for _ in range(16)]
    answers = [asyncio.create_task(stream.result()) for stream in streams]
    ids = [r.id for r in bench.engine.submitted]
    await asyncio.sleep(0)
    bench.sessions.sink([Output(i, bench.said) for i in ids])
    bench.sessions.sink([Output(i, bench.said[:1], finish_reason="length") for i in ids])
    bench.sessions.sink([Output(ids[0], [], finish_reason="length")])  # of one that is gone
    steps = []
    while not all(task.done() for task in answers):
        await asyncio.sleep(0)
        steps.append(len(bench.sessions._streams))
    assert all(a - b <= 4 for a, b in zip([16, *steps], steps)), steps
    assert {task.result()[0].text for task in answers} == {"one two three one"}
    bench.engine.cancel(ids)
    await bench.idle()


async def test_a_bug_as_one_request_ends_is_of_no_consequence_to_others(make, caplog):
    bench = make()
    bench.engine.hold.set()
    streams = [await bench.intake.chat(CHAT, SamplingParams(max_tokens=200)) for _ in range(7)]
    ids, ended = [r.id for r in bench.engine.submitted], []
    bench.sessions.on_ended = lambda stream: 1 / 0 if stream is streams[1] else ended.append(stream)
    bench.sessions.sink([Output(i, bench.said, finish_reason="length") for i in ids[:6]])
    await asyncio.sleep(0.02)
    bench.sessions.sink([Output(ids[6], bench.said, finish_reason="length")])
    answers = await asyncio.wait_for(asyncio.gather(*(stream.result() for stream in streams)), PATIENCE_S)
    assert [answer[0].token_ids for answer in answers] == [bench.said] * 7
    assert ended == [streams[0], *streams[2:]] and ids[1] in caplog.text
    bench.engine.cancel(ids)
    await bench.idle()


async def test_a_request_for_a_whole_answer_is_not_woken_by_each_token(make):
    bench = make()
    bench.engine.hold.set()
    stream = await bench.intake.chat(CHAT, SamplingParams(max_tokens=200))
    answer = asyncio.create_task(stream.result())
    await asyncio.sleep(0)
    for _ in range(3):
        bench.sessions.sink([Output(bench.engine.submitted[0].id, bench.said)])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not stream._news.is_set() and stream.n_tokens[0]
    bench.sessions.sink([Output(bench.engine.submitted[0].id, [], finish_reason="length")])
    assert (await answer)[0].token_ids == bench.said * 3
    bench.engine.cancel([bench.engine.submitted[0].id])
    await bench.idle()


async def test_an_engine_that_refuses_leaves_nothing(make, monkeypatch):
    bench = make(step_s=0.005)
    submit = bench.engine.submit

    def refuse_the_third(request):
        if request.choice == 2:
            raise Unavailable("closing")
        submit(request)

    monkeypatch.setattr(bench.engine, "submit", refuse_the_third)
    with pytest.raises(Unavailable, match="closing"):
        await bench.intake.chat(CHAT, SamplingParams(n=4, max_tokens=200, ignore_eos=True))
    await bench.idle()


async def test_refusals_hold_no_place_and_no_picture(make):
    bench = make()
    with pytest.raises(InvalidRequest):
        await bench.intake.chat(CHAT, SamplingParams(max_tokens=5000))
    with pytest.raises(InvalidRequest):
        await bench.intake.complete([], SamplingParams())
    overload = bench.sessions.overload
    place = overload.claim(None, Work("text", 1.0, overload.max_requests))
    with pytest.raises(Overloaded):
        await bench.intake.chat(CHAT, SamplingParams())
    place.leave()
    bench.sessions.close()
    with pytest.raises(Unavailable):
        await bench.intake.chat(CHAT, SamplingParams())
    bench.check_idle()


async def test_a_closed_intake_refuses_and_holds_nothing(make):
    bench = make()
    bench.intake.close()
    for work in (bench.intake.chat(CHAT, SamplingParams()), bench.intake.run(lambda: 1)):
        with pytest.raises(Unavailable):
            await work
    bench.check_idle()


async def test_a_request_that_is_still_prepared_at_its_deadline_ends_then(make):
    bench = make()
    intake = Intake(bench.intake.processor, bench.sessions, timeout_s=0.1)
    prepare, may_prepare, prepared = intake.processor.chat, threading.Event(), threading.Event()

    def slow(*args, **options):
        assert may_prepare.wait(HELD_S)
        try:
            return prepare(*args, **options)
        finally:
            prepared.set()

    intake.processor.chat = slow
    with pytest.raises(DeadlineExceeded):
        await intake.chat(CHAT, SamplingParams())
    assert not prepared.is_set()
    bench.sessions.check(idle=True)
    may_prepare.set()  # a picture that nobody wants any more
    assert await asyncio.to_thread(prepared.wait, PATIENCE_S)
    intake.close()
    bench.check_idle()
    assert not bench.engine.submitted


async def test_requests_prepared_while_the_sessions_close_do_not_start(make):
    bench = make()
    prepare, begun, may_prepare = bench.intake.processor.chat, threading.Event(), threading.Event()

    def slow(*args, **options):
        begun.set()
        assert may_prepare.wait(HELD_S)
        return prepare(*args, **options)

    bench.intake.processor.chat = slow
    task = asyncio.ensure_future(answer(bench))
    assert await asyncio.to_thread(begun.wait, PATIENCE_S)
    bench.sessions.close()
    may_prepare.set()
    with pytest.raises(Unavailable):
        await task
    bench.check_idle()
    assert not bench.engine.submitted


async def test_a_bug_in_one_answers_text_ends_that_answer_only(make):
    bench = make(step_s=0.005)
    bench.engine.hold.set()
    bad, good = [await bench.intake.chat(CHAT, SamplingParams(max_tokens=50)) for _ in range(2)]
    bad._texts[0].push = lambda *_, **__: 1 / 0
    bench.engine.hold.clear()
    assert (await good.result())[0].text == "one two three"
    with pytest.raises(InternalError):
        await bad.result()
    await bench.idle()


async def test_closing_the_sessions_ends_streams(make):
    bench = make(step_s=0.005)
    task = asyncio.ensure_future(answer(bench, LONG))
    while not bench.engine.n_steps:
        await asyncio.sleep(0.005)
    bench.sessions.close()
    with pytest.raises(Unavailable):
        await task
    await bench.idle()
