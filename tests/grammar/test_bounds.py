"""Compiling a client's grammar has bounds that the library does not know."""

import asyncio
import json
import os
import signal
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from hydrainfer.core import Grammar, InvalidRequest, Overloaded, Unavailable
from hydrainfer.grammar import bounds, library
from hydrainfer.grammar import compile as compiling
from tests.waiting import HELD_S, PATIENCE_S, wait_until

pytestmark = pytest.mark.cpu
ENDLESS = [Grammar("json", json.dumps({"type": "integer", "multipleOf": n})) for n in (99999989, 99999971)]
SIMPLE = Grammar("json", '{"type":"object","properties":{"a":{"type":"integer"}}}')
WIDE = bounds.TrialBounds(n_bytes=8 << 30, cpu_s=600.0, wall_s=600.0)  # no machine is fast enough to reach them


def remainders(n):
    """A grammar that takes about n / 2 KiB."""
    return Grammar("json", json.dumps({"type": "integer", "multipleOf": n}))


def children(grammars):
    pid = grammars._trials._process.pid
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def states(grammars):
    """What the kernel says of the process and its trials: to be shown by a test that fails."""
    pids = [str(grammars._trials._process.pid), *children(grammars)]
    return [Path(f"/proc/{pid}/{name}").read_text() for pid in pids for name in ("stat", "wchan")]


def wait_until_none(grammars):
    wait_until(lambda: not children(grammars), say=lambda: states(grammars))


async def until_trials(grammars, n):
    async with asyncio.timeout(HELD_S):
        while not (grammars._trials._process and len(children(grammars)) == n):
            await asyncio.sleep(0.01)


def test_endless_grammars_are_refused(make_grammars):
    grammars = make_grammars(bounds=bounds.TrialBounds(n_bytes=1 << 30))

    async def ask():
        return await asyncio.gather(*map(grammars.check, ENDLESS), return_exceptions=True)

    for error in asyncio.run(ask()):
        assert isinstance(error, InvalidRequest) and "takes more than 1 s or 1024 MiB" in error.message
    wait_until_none(grammars)
    grammars.close()


def test_a_simple_grammar_does_not_wait_for_endless_ones(make_grammars):
    grammars = make_grammars(bounds=WIDE)

    async def ask():
        endless = [asyncio.ensure_future(grammars.check(grammar)) for grammar in ENDLESS]
        await until_trials(grammars, len(ENDLESS))
        simple = asyncio.ensure_future(grammars.check(SIMPLE))
        done, _ = await asyncio.wait([simple, *endless], timeout=HELD_S, return_when=asyncio.FIRST_COMPLETED)
        assert done == {simple}, (done, states(grammars))
        await simple
        for task in endless:
            task.cancel()
        await asyncio.gather(*endless, return_exceptions=True)
        wait_until_none(grammars)

    asyncio.run(ask())
    grammars.close()


def test_a_grammar_that_took_too_long_is_remembered(make_grammars):
    grammars = make_grammars(bounds=bounds.TrialBounds(cpu_s=0.2, wall_s=60.0))
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=r"0\.2 s"):
            asyncio.run(grammars.check(ENDLESS[0]))
        grammars._trials.close()  # so the second time nothing is tried
    grammars.close()


def test_memory_is_bounded(make_grammars):
    grammars = make_grammars(bounds=bounds.TrialBounds(n_bytes=24 << 20, cpu_s=10.0, wall_s=60.0))
    asyncio.run(grammars.check(remainders(10007)))
    with pytest.raises(InvalidRequest, match="24 MiB"):
        asyncio.run(grammars.check(remainders(99991)))
    grammars.close()


def test_hanging_up_ends_the_trial(make_grammars):
    grammars = make_grammars(bounds=WIDE)

    async def leave():
        asked = [asyncio.ensure_future(grammars.check(ENDLESS[0])) for _ in range(2)]
        await until_trials(grammars, 1)
        await asyncio.sleep(0.1)
        asked[0].cancel()
        await asyncio.sleep(0.1)
        assert children(grammars), "another request waits for it"
        asked[1].cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        wait_until_none(grammars)

    asyncio.run(leave())
    assert not grammars._running
    grammars.close()


def test_too_many_that_wait_are_refused(make_grammars):
    grammars = make_grammars(bounds=WIDE)

    async def flood():
        asked = [asyncio.ensure_future(grammars.check(remainders(99999000 + i))) for i in range(200)]
        async with asyncio.timeout(HELD_S):
            while sum(task.done() for task in asked) < 200 - bounds.MAX_WAITING:
                await asyncio.sleep(0.01)
        for task in asked:
            task.cancel()
        ends = await asyncio.gather(*asked, return_exceptions=True)
        assert sum(isinstance(end, Overloaded) for end in ends) == 200 - bounds.MAX_WAITING

    asyncio.run(flood())
    grammars.close()


def test_the_same_wrong_grammar_at_once(grammars):
    """All wait for one trial, and all are told."""

    async def ask():
        return await asyncio.gather(*(grammars.check(Grammar("regex", "a(")) for _ in range(3)), return_exceptions=True)

    assert [type(error) for error in asyncio.run(ask())] == [InvalidRequest] * 3


def test_tables_that_the_first_step_fills_are_found_in_the_trial(grammars):
    for one in (Grammar("regex", "a{70000}"), Grammar("json", '{"type":"string","pattern":"^a{70000}$"}')):
        with pytest.raises(InvalidRequest, match="too many"):
            asyncio.run(grammars.check(one))


def test_a_grammar_without_any_text(grammars):
    with pytest.raises(InvalidRequest, match="no text matches it"):
        asyncio.run(grammars.check(Grammar("regex", r"[^\s\S]")))


@pytest.mark.parametrize("n_kills", [1, 2])
def test_a_trial_that_is_killed_says_nothing_of_its_grammar(make_grammars, n_kills):
    """As when the machine runs out of memory."""
    grammars, endless = make_grammars(bounds=WIDE), ENDLESS[0]

    async def ask():
        asked = asyncio.ensure_future(grammars.check(endless))
        killed = set()
        async with asyncio.timeout(HELD_S):
            while len(killed) < n_kills:
                for pid in set(children(grammars) if grammars._trials._process else ()) - killed:
                    os.kill(int(pid), signal.SIGKILL)
                    killed.add(pid)
                await asyncio.sleep(0.01)
            while n_kills == 1 and not set(children(grammars)) - killed:
                await asyncio.sleep(0.01)
        if n_kills == 1:  # it is tried again
            asked.cancel()
        else:
            with pytest.raises(Unavailable):
                await asked
        await asyncio.gather(asked, return_exceptions=True)

    asyncio.run(ask())
    assert not grammars._has(endless)
    grammars.close()


def test_a_process_that_stands_still_does_not_hold_up_the_server(make_grammars):
    grammars = make_grammars(bounds=WIDE)

    async def flood():
        await grammars.check(SIMPLE)
        pid = grammars._trials._process.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            for i in range(10_000):
                asked = asyncio.ensure_future(grammars.check(Grammar("regex", f"a{{{i}}}")))
                for _ in range(4):
                    await asyncio.sleep(0)
                asked.cancel()
                (end,) = await asyncio.gather(asked, return_exceptions=True)
                if isinstance(end, Overloaded):
                    return
        finally:
            os.kill(pid, signal.SIGCONT)
        pytest.fail("nothing was refused")

    async def comes_back():
        """Once it has read something of what waits for it."""
        async with asyncio.timeout(HELD_S):
            while True:
                with suppress(Overloaded):
                    return await grammars.check(Grammar("regex", "b+"))
                await asyncio.sleep(0.01)

    asyncio.run(flood())
    asyncio.run(comes_back())
    grammars.close()


def test_who_waits_for_a_grammar_is_told_of_the_end(make_grammars, monkeypatch):
    grammars, begun, go_on = make_grammars(), threading.Event(), threading.Event()
    compiled = library.compiled

    def slow(*of):
        begun.set()
        go_on.wait(HELD_S)
        return compiled(*of)

    monkeypatch.setattr(library, "compiled", slow)
    waiting = [grammars.expect(Grammar("regex", text)) for text in ("a+", "b+")]
    assert begun.wait(PATIENCE_S)
    grammars.close()
    assert all(isinstance(future.exception(PATIENCE_S), Unavailable) for future in waiting)
    go_on.set()


def test_the_process_is_started_again_when_it_was_killed(grammars):
    asyncio.run(grammars.check(SIMPLE))
    os.kill(grammars._trials._process.pid, 9)
    asyncio.run(grammars.check(Grammar("regex", "a+")))
    with pytest.raises(InvalidRequest, match="cannot be used"):
        asyncio.run(grammars.check(Grammar("regex", "a(")))


def test_the_cache_of_grammars_stays_within_its_bytes(grammars, monkeypatch):
    monkeypatch.setattr(compiling, "KEPT_BYTES", 10 << 20)
    for n in (10007, 10009, 10037, 10039, 10061):  # a few MiB each
        grammars.compiled(remainders(n))
        kept = [future.result().n_bytes for future in grammars._kept.values()]
        assert sum(kept[:-1]) <= 10 << 20
    assert 1 <= len(grammars._kept) < 5


def test_its_process_ends_with_it(make_grammars):
    grammars = make_grammars()
    grammars.warm()
    pid = grammars._trials._process.pid
    grammars.close()
    grammars.close()
    assert not Path(f"/proc/{pid}").exists()
