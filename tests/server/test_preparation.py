"""Who is prepared next, and how much at once: the line alone, then a server with slow and with no engine."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydrainfer.core import Share
from hydrainfer.scheduler import Policy
from hydrainfer.server.door.preparation import PreparationOrder
from hydrainfer.server.door.queues import Queue
from tests.server.conftest import image_part
from tests.server.test_bad_input import begun
from tests.waiting import PATIENCE_S, wait_until

ONE = Share("", 1.0)


class Paced(Queue):
    def __init__(self, pace):
        super().__init__(10.0)
        self._pace = pace

    def pace(self):
        return self._pace


class Rig:
    def __init__(self, pace=0.0, n_least=4, **policy):
        self.queue, self.gone, self.turns = Paced(pace), [], {}
        self.line = PreparationOrder(self.queue, n_least, Policy(**policy))

    def join(self, name, units=1.0, at_s=0.0, share=ONE, priority=0):
        self.turns[name] = self.line.join(share, at_s, units, priority, lambda: self.gone.append(name))
        self.line.check()

    def leave(self, name):
        self.line.leave(self.turns.pop(name))
        self.line.check()


def test_requests_do_not_wait_unprepared_where_there_is_no_crowd():
    rig = Rig(n_least=4)
    for i in range(4):
        rig.join(i)
        assert rig.gone[-1] == i, "at once"
    rig.join(4)
    assert len(rig.gone) == 4 and rig.line.n_waiting == 1
    rig.leave(2)
    assert rig.gone[-1] == 4 and rig.line.n_waiting == 0
    for i in (0, 1, 3, 4):
        rig.leave(i)
    rig.line.check(idle=True)


def test_requests_of_a_second_of_work_are_prepared_ahead():
    rig = Rig(pace=0.01, n_least=1)
    for i in range(300):
        rig.join(i, at_s=0.001 * i)
    assert rig.gone == list(range(100))
    for i in range(10):
        rig.leave(i)
    assert rig.gone == list(range(110))
    rig.queue._pace = 0.001
    for i in range(10, 20):
        rig.leave(i)
    assert len(rig.gone) == 110 + 10 * 4, "a few at each event"


@pytest.mark.parametrize("order", ["rank", "fcfs"])
def test_a_short_one_passes_the_long_ones_that_it_would_pass_at_the_instance(order):
    rig = Rig(pace=0.01, n_least=2, order=order)
    for i in range(6):
        rig.join(f"long {i}", units=1000.0)
    rig.join("short", units=10.0, at_s=5.0)
    rig.join("later", units=10.0, at_s=5000.0)
    rig.join("urgent", units=1000.0, at_s=5.0, priority=2)
    wanted = ["short", "urgent"] if order == "rank" else []
    assert rig.gone == ["long 0", "long 1", *wanted]
    rig.leave("long 0")
    assert rig.gone[-1] == ("long 2" if order == "fcfs" else "urgent")


def test_a_tenant_has_its_part_of_what_is_ahead():
    rig = Rig(pace=0.01, n_least=1)
    for i in range(500):
        rig.join(i, share=Share("flood", 1.0))
    assert len(rig.gone) == 100
    rig.join("other", share=Share("other", 3.0), at_s=100.0)
    assert rig.gone[-1] == "other", "though all of the flood came before"
    for i in range(100):
        rig.leave(i)
    assert rig.line.n_ahead == 25 + 1
    rig.leave("other")
    rig.leave(100)
    assert rig.line.n_ahead > 25


@settings(max_examples=100, deadline=None)
@given(
    moves=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 20), st.floats(1.0, 900.0), st.integers(0, 4)), max_size=120
    ),
    pace=st.sampled_from([0.0, 1e-4, 0.02]),
    n_least=st.integers(1, 6),
)
def test_everybody_goes(moves, pace, n_least):
    """Whoever leaves, waiting or ahead, in whatever order."""
    rig = Rig(pace, n_least)
    for n, (what, who, units, tenant) in enumerate(moves):
        if what and who not in rig.turns:
            rig.join(who, units, at_s=float(n), share=Share(str(tenant), 1.0 + tenant))
        elif who in rig.turns:
            rig.leave(who)
    while rig.turns:
        ahead = [name for name, turn in rig.turns.items() if turn.ahead]
        assert ahead, "those who wait are forgotten"
        rig.leave(ahead[0])
    rig.line.check(idle=True)


def crowd(line, n_ahead, n, ask):
    """`n` at once, after the first `n_ahead` have gone: one whose body is read late may still go by its age."""
    first = [ask(i) for i in range(n_ahead)]
    wait_until(lambda: line.n_ahead == n_ahead)
    return [*first, *(ask(i) for i in range(n_ahead, n))]


def test_of_a_flood_a_few_are_read_and_prepared_and_all_are_served(start, monkeypatch):
    server = start(max_requests=500)
    n_read, n_prepared, chat, prepare = [], [], server.intake.chat, server.intake.processor.chat
    monkeypatch.setattr(server.intake, "chat", lambda *a, **kw: (n_read.append(1), chat(*a, **kw))[1])
    monkeypatch.setattr(server.intake.processor, "chat", lambda *a: (n_prepared.append(1), prepare(*a))[1])
    server.engine.hold.set()
    line = server.sessions.overload.orders["text"]
    with ThreadPoolExecutor(62) as threads:
        answers = crowd(line, 32, 60, lambda i: threads.submit(server.chat, f"text {i}", max_tokens=2))
        wait_until(lambda: line.n_waiting == 60 - 32 and len(server.engine.submitted) == 32)
        wrong = threads.submit(server.chat, "text", max_tokens=-1)
        wait_until(lambda: line.n_waiting == 61 - 32)
        urgent = threads.submit(server.chat, "urgent", max_tokens=2, priority=2)
        wait_until(lambda: len(server.engine.submitted) == 33)
        assert server.engine.submitted[-1].priority == 2, "by its field"
        assert len(n_prepared) == 33 and len(n_read) <= 40
        assert server.sessions.n_live == 62
        assert server.http.get("/health").status_code == 200
        server.engine.hold.clear()
        assert [a.result().status_code for a in (*answers, urgent)] == [200] * 61
        assert wrong.result().status_code == 400
        waited_s = max(r.arrival_s for r in server.engine.submitted) - min(r.arrival_s for r in server.engine.submitted)
        assert waited_s < 5.0, "it arrived when its headers did"
    server.check_idle()


def test_waiting_requests_are_answered_when_the_server_ends(start):
    server = start(max_requests=500)
    server.engine.hold.set()
    line = server.sessions.overload.orders["text"]
    with ThreadPoolExecutor(40) as threads:
        answers = crowd(line, 32, 40, lambda i: threads.submit(server.chat, f"text {i}", max_tokens=2))
        wait_until(lambda: line.n_waiting == 8)
        server._server.should_exit = True
        assert [a.result().status_code for a in answers] == [503] * 40


@pytest.mark.parametrize("how", ["deadline", "cancel"])
def test_a_request_that_waits_unprepared_ends_at_once_when_it_is_given_up(start, how):
    server = start(max_requests=500)
    server.engine.hold.set()
    line = server.sessions.overload.orders["text"]

    async def flood():
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as http:

            def ask(i, **fields):
                messages = [{"role": "user", "content": f"text {i}"}]
                return asyncio.ensure_future(
                    http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2, **fields})
                )

            first = [ask(i) for i in range(32)]
            while line.n_ahead < 32:
                await asyncio.sleep(0.01)
            late = [ask(i, **({"deadline_s": 1.0} if how == "deadline" else {})) for i in range(32, 40)]
            if how == "cancel":
                while line.n_waiting < 8:
                    await asyncio.sleep(0.01)
                for one in late:
                    one.cancel()
            ended = await asyncio.wait_for(asyncio.gather(*late, return_exceptions=True), PATIENCE_S)
            if how == "deadline":
                assert [a.json()["error"]["code"] for a in ended] == ["deadline_exceeded"] * 8
            while line.n_waiting:
                await asyncio.sleep(0.01)
            assert len(server.engine.submitted) == 32
            server.engine.hold.clear()
            assert [(await one).status_code for one in first] == [200] * 32

    asyncio.run(asyncio.wait_for(flood(), 2 * PATIENCE_S))
    server.check_idle()


def test_pictures_wait_in_a_line_of_their_own(start):
    server = start(max_requests=500)
    server.engine.hold.set()
    orders = server.sessions.overload.orders
    with ThreadPoolExecutor(32) as threads:
        line = orders["pictures"]
        pictures = crowd(line, 16, 24, lambda _: threads.submit(server.chat, [image_part()], max_tokens=2))
        wait_until(lambda: line.n_waiting == 8)
        text = threads.submit(server.chat, "a text", max_tokens=2)
        wait_until(lambda: any(not r.media for r in server.engine.submitted))
        server.engine.hold.clear()
        assert [a.result().status_code for a in (*pictures, text)] == [200] * 25
    server.check_idle()


def test_a_body_over_the_limit_is_refused_unread_in_a_crowd(start, monkeypatch):
    server = start(max_body_bytes=1000)
    monkeypatch.setattr(server.sessions.overload, "crowded", lambda _: True)
    with begun(server, "/v1/chat/completions", 2000, b"{") as client:
        assert b" 413 " in client.recv(4096).partition(b"\r\n")[0]
    server.check_idle()
