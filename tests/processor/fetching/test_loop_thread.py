"""Work on a loop of its own ends with who asked for it, and with the loop."""

import asyncio
import threading

import pytest

from hydrainfer.core import Overloaded, Unavailable
from hydrainfer.processor.fetching.loop_thread import LoopThread

pytestmark = pytest.mark.unit


@pytest.fixture
def there():
    there = LoopThread("there", 1)
    yield there
    there.close()
    there.close()
    assert there.n_tasks == 0 and not [t for t in threading.enumerate() if t.name.startswith("there")]


async def where():
    return threading.current_thread().name


async def test_the_loop_thread_returns_and_raises_what_the_work_does(there):
    assert await there.run(where()) == "there"

    async def breaks():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await there.run(breaks())
    assert there.n_tasks == 0


def test_loops_come_and_go(there):
    assert [asyncio.run(there.run(where())) for _ in range(3)] == ["there"] * 3


async def test_work_of_a_caller_that_is_cancelled_has_ended_when_the_caller_has(there):
    began, ended = threading.Event(), []

    async def work():
        began.set()
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            ended.append(True)

    caller = asyncio.ensure_future(there.run(work()))
    await asyncio.to_thread(began.wait)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended and there.n_tasks == 0


async def test_a_caller_that_is_cancelled_twice_waits_no_longer(there):
    began, release = threading.Event(), asyncio.Event()

    async def stubborn():
        loops.append(asyncio.get_running_loop())
        began.set()
        try:
            await asyncio.sleep(60)
        finally:
            await release.wait()

    loops: list[asyncio.AbstractEventLoop] = []
    caller = asyncio.ensure_future(there.run(stubborn()))
    await asyncio.to_thread(began.wait)
    for _ in range(2):
        caller.cancel()
        await asyncio.sleep(0.05)
    assert caller.cancelled()
    loops[0].call_soon_threadsafe(release.set)
    while there.n_tasks:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("asyncio.new_event_loop", OSError(24, "Too many open files")),
        ("threading.Thread.start", RuntimeError("can't start new thread")),
    ],
)
async def test_no_room_for_a_thread_is_told_and_passes(there, monkeypatch, name, error):
    def refuses(*_):
        raise error

    with monkeypatch.context() as m:
        m.setattr(name, refuses)
        with pytest.raises(Overloaded):
            await there.run(where())
    assert await there.run(where()) == "there"


async def test_work_that_was_cancelled_before_it_began_never_begins(there):
    await there.run(where())
    held, release = threading.Event(), threading.Event()

    async def hold():
        held.set()
        release.wait()

    async def never():
        pytest.fail("it began")

    holder = asyncio.ensure_future(there.run(hold()))
    await asyncio.to_thread(held.wait)
    caller = asyncio.ensure_future(there.run(never()))
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.sleep(0)
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    await holder


async def test_closing_ends_what_runs_and_refuses_the_rest(there):
    callers = [asyncio.ensure_future(there.run(asyncio.sleep(60))) for _ in range(3)]
    while there.n_tasks < 3:
        await asyncio.sleep(0.01)
    await asyncio.to_thread(there.close)
    for caller in callers:
        with pytest.raises(Unavailable):
            await caller
    with pytest.raises(Unavailable):
        await there.run(where())
