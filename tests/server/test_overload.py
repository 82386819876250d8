"""Admission on a virtual clock: what is bounded, what is promised, what is given back."""

import heapq
import math
import random
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydrainfer.core import HydraError, Overloaded, Unavailable
from hydrainfer.metrics import PrometheusRecorder
from hydrainfer.processor import parse_messages
from hydrainfer.server import OverloadControl, Tenants
from hydrainfer.server.door.overload import DECODING, PICTURES, TEXT, Work
from hydrainfer.server.door.returns import Mark
from tests.server.conftest import image_part
from tests.waiting import HELD_S, PATIENCE_S, wait_until

SMALL = Work(TEXT, 100.0)


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Flood:
    """A server of `rate` requests per second behind an `OverloadControl`; clients who are refused come back once.
    `known`: by what a returning one is: "said", its "body", or nothing. `warm_s`: so long before the flood it had as
    much to do as it can; the flood makes it `slowed` times as fast; `uneven`: half as fast and faster in turns."""

    def __init__(self, rate, factor, flood_s, *, known, come_back=True, seed=1, warm_s=0.0, slowed=1.0, uneven=False):
        self.clock = Clock()
        self.overload = OverloadControl(self.clock, longest_s=4.0)
        self.rng, self.rate, self.known, self.come_back = random.Random(seed), rate, known, come_back
        self.start_s, self.busy_until = self.clock.now + warm_s, self.clock.now
        self.slowed, self.uneven = slowed, uneven
        self.served_s, self.back, self.waits = [], [], []
        self.events, self.n = [], 0
        due_s = self.clock.now
        while due_s < self.start_s + flood_s:
            self.at(due_s, self.arrive, self.n, False)
            due_s += self.rng.expovariate(rate * (factor if due_s >= self.start_s else 1.0))

    def mark(self, who):
        mark = Mark(b"/v1/chat/completions", [])
        mark.add(b"body %d" % who)
        return mark

    def at(self, when_s, what, *args):
        self.n += 1
        heapq.heappush(self.events, (when_s, self.n, what, args))

    def run(self):
        while self.events:
            self.clock.now, _, what, args = heapq.heappop(self.events)
            what(*args)
        self.overload.check(idle=True)

    def arrive(self, who, returning):
        now, mark = self.clock.now, self.mark(who)
        known = (returning and self.known == "said") or (self.known == "body" and self.overload.comes(mark))
        try:
            place = self.overload.enter(300, returning=known)
            place = self.overload.claim(place, SMALL)
        except Overloaded as e:
            assert e.retry_after_s is not None
            self.overload.expect(mark, e.retry_after_s)
            if returning:
                self.back.append((now, False))
            elif self.come_back:
                self.at(now + max(1, math.ceil(e.retry_after_s)), self.arrive, who, True)
            return
        if returning:
            self.back.append((now, True))
        rate = self.rate * (self.slowed if now >= self.start_s else 1.0)
        rate *= (0.5, 1.5)[int(self.busy_until) // 4 % 2] if self.uneven else 1.0
        self.busy_until = max(self.busy_until, now) + self.rng.uniform(0.5, 1.5) / rate
        self.waits.append(self.busy_until - now)
        self.at(self.busy_until, self.end, place)

    def end(self, place):
        self.served_s.append(self.clock.now)
        place.begun()
        place.leave()


@pytest.mark.parametrize("known", ["said", "body", ""])
def test_at_ten_times_the_capacity_all_of_it_is_used_and_those_who_obey_are_served(known):
    flood = Flood(100.0, 10.0, 15.0, known=known)
    flood.run()
    during = [s for s in flood.served_s if 1.0 <= s - flood.start_s <= 15.0]
    assert len(during) >= 0.95 * 100.0 * 14.0, "it was idle in between"
    assert sorted(flood.waits)[int(0.99 * len(flood.waits))] <= 4.0 * 1.4, "the queue was longer than it may"
    early = [ok for s, ok in flood.back if s - flood.start_s <= 15.0]
    assert sum(ok for _, ok in flood.back) >= 0.8 * len(flood.back)
    assert not known or sum(early) >= 0.8 * len(early), "who is known to return is served even in the flood"


@pytest.mark.parametrize("slowed, uneven", [(0.6, False), (0.8, False), (0.8, True)])
def test_clients_that_obey_are_served_by_a_server_that_the_flood_makes_slower(slowed, uneven):
    flood = Flood(100.0, 10.0, 30.0, known="body", warm_s=5.0, slowed=slowed, uneven=uneven)
    flood.run()
    early = [ok for s, ok in flood.back if s - flood.start_s <= 30.0]
    assert len(early) > 30.0 * 100.0 * 0.3 and sum(early) >= 0.8 * len(early)


def test_a_client_that_stays_away_is_not_waited_for():
    flood = Flood(50.0, 4.0, 5.0, known="said", come_back=False)
    flood.run()
    now = flood.clock.now
    assert flood.overload.queues[TEXT].has_room(now, favoured=False)
    assert flood.overload.queues[TEXT].promise(now) < 1.0


def full(overload, kind, clock):
    """Fill one queue beyond its limit; the places."""
    places = [overload.claim(None, Work(kind, 100.0, 1, 10.0 if kind is PICTURES else 0.0)) for _ in range(50)]
    for place in places:
        place.prepared(Work(kind, 100.0))
    for place in places[:5]:
        clock.now += 1.0
        place.begun()
    with pytest.raises(Overloaded):
        overload.claim(None, Work(kind, 100.0))
    return places


def test_neither_kind_is_refused_for_the_other():
    clock = Clock()
    overload = OverloadControl(clock, longest_s=5.0)
    pictures = full(overload, PICTURES, clock)
    place = overload.claim(overload.enter(300), SMALL)
    place.leave()
    large = overload.enter(100_000)  # it may be a text
    with pytest.raises(Overloaded, match="pictures"):
        overload.claim(large, Work(PICTURES, 100.0))
    large.leave()
    for place in pictures:
        place.leave()
    clock.now += 1.0
    texts = full(overload, TEXT, clock)
    with pytest.raises(Overloaded, match="text"):
        overload.enter(300)
    large = overload.enter(100_000)
    overload.claim(large, Work(PICTURES, 100.0)).leave()
    with pytest.raises(Overloaded, match="text"):
        overload.claim(overload.enter(100_000), SMALL)
    assert overload.refused == {TEXT: 3, PICTURES: 2}
    page = PrometheusRecorder("m", list, overload.waiting).page().decode()
    assert 'hydrainfer:requests_refused_total{model_name="m",reason="text"} 3.0' in page
    assert 'hydrainfer:admission_queue_seconds{kind="pictures",model_name="m"} 0.0' in page
    for place in texts:
        place.leave()


def test_a_model_without_pictures_refuses_a_large_body_too():
    clock = Clock()
    overload = OverloadControl(clock, longest_s=5.0, pictures=False)
    places = full(overload, TEXT, clock)
    with pytest.raises(Overloaded):
        overload.enter(100_000)
    for place in places:
        place.leave()


def test_requests_are_bounded_whatever_their_work():
    overload = OverloadControl(Clock(), max_requests=3)
    held = [overload.claim(None, SMALL) for _ in range(3)]
    with pytest.raises(Overloaded, match="3 of at most 3"):
        overload.enter(10)
    held.pop().leave()
    with pytest.raises(Overloaded):
        overload.claim(None, Work(TEXT, 1.0, 2))
    for place in held:
        place.leave()
    alone = overload.claim(overload.enter(10), Work(TEXT, 1.0, 9))  # or it could never be served
    assert overload.n_live == 9
    alone.leave()
    overload.closed = True
    with pytest.raises(Unavailable):
        overload.enter(10)
    overload.check(idle=True)


def test_work_is_guessed_from_what_the_client_wrote_and_counted_when_it_is_known():
    assert Work.of_prompt("x" * 400, 2) == (TEXT, 164.0, 2, 0.0)
    assert Work.of_prompt([1, 2, 3], 1).units == 67.0
    assert Work.of_prompt([[1, 2], [3, 4, 5, 6]], 3) == (TEXT, 67.0, 6, 0.0)
    for nonsense in ([], None, {}, 3, [None], [[]], "", [1, None]):
        assert Work.of_prompt(nonsense, 1).units >= 64.0
    assert Work.of_prompt(["x"] * 10_000, 128).n == 128
    chat = parse_messages([{"role": "user", "content": [image_part(), {"type": "text", "text": "y" * 40}]}])
    kind, units, n, n_bytes = Work.of_chat(chat, 1)
    assert (kind, units, n) == (PICTURES, 64 + 576 + 10, 1) and n_bytes > 65536


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 7), st.floats(0.0, 3.0)), max_size=80))
def test_no_work_is_left_whatever_becomes_of_the_requests(moves):
    clock = Clock()
    overload = OverloadControl(clock, longest_s=3.0, max_requests=12)
    places = {}
    for what, who, passed_s in moves:
        clock.now += passed_s
        try:
            if what == 0 and who not in places:
                places[who] = overload.enter(who * 1000, returning=bool(who % 2))
            elif what == 1 and who in places and not places[who].claimed:
                overload.claim(
                    places[who], Work(PICTURES if who > 3 else TEXT, 50.0 + who, 1 + who % 3, 9.0 * (who > 3))
                )
            elif what == 2 and who in places and places[who].claimed:
                places[who].prepared(Work(PICTURES if who > 3 else TEXT, 70.0))
            elif what == 3 and who in places and places[who].claimed:
                places[who].begun()
            elif what == 4 and who in places:
                places.pop(who).leave(answered=passed_s > 1.0)
            elif what == 5:
                assert all(s >= 0.0 for s in overload.seconds().values())
        except HydraError:
            pass
        overload.check()
    for place in places.values():
        place.leave()
        place.leave()
    overload.check(idle=True)
    assert all(queue.units == 0.0 for queue in overload.queues.values())


def test_a_refused_request_is_answered_before_its_body_is_read(start):
    """Only the headers are sent: an answer that waits for the body never comes."""
    server = start(max_requests=1)
    place = server.sessions.overload.take()
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=PATIENCE_S) as raw:
        raw.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: 3000000\r\n\r\n"
        )
        answer = raw.recv(65536)
    assert answer.startswith(b"HTTP/1.1 429 ")
    headers = dict(line.split(b": ", 1) for line in answer.lower().split(b"\r\n\r\n")[0].split(b"\r\n")[1:])
    assert int(headers[b"retry-after"]) >= 1 and int(headers[b"retry-after-ms"]) >= 1000, "nothing has ended yet"
    assert b'"code":"overloaded"' in answer
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/v1/models").status_code == 200
    place.leave()
    server.check_idle()


def test_places_come_back_from_requests_that_never_get_as_far_as_to_use_them(start):
    server = start(tenants=Tenants(["k"]))
    assert server.chat().status_code == 401
    server.http.headers["authorization"] = "Bearer k"
    assert server.http.post("/v1/chat/completions", content=b"{").status_code == 400
    assert server.chat(model="another").status_code == 404
    assert server.http.get("/v1/chat/completions").status_code == 405
    assert server.chat(max_tokens=1).status_code == 200
    server.check_idle()


def test_bodies_that_do_not_come_keep_nobody_out(start):
    """They have been let in, but hold nothing that others wait for."""
    server = start(max_requests=4)
    kind = b"content-type: application/json\r\n"
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n" + kind + b"content-length: 100\r\n\r\n{"
    slow = [socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) for _ in range(20)]
    for one in slow:
        one.sendall(head)
    queue = server.sessions.overload.queues[TEXT]
    for _ in range(3):
        assert server.chat(max_tokens=1).status_code == 200
    wait_until(lambda: queue.n_waiting == 0)
    assert server.sessions.n_live == 0
    for one in slow:
        one.close()
    server.check_idle()


def test_pictures_that_are_decoded_keep_no_text_waiting(start, monkeypatch):
    server = start()
    media, done = server.intake.processor.media, threading.Event()
    prepare = media.prepare
    monkeypatch.setattr(media, "prepare", lambda parts, *rest: (parts and done.wait(HELD_S), prepare(parts, *rest))[1])
    queue = server.sessions.overload.queues[DECODING]
    with ThreadPoolExecutor(4) as threads:
        pictures = [threads.submit(server.chat, [image_part()], max_tokens=2) for _ in range(4)]
        try:
            wait_until(lambda: queue.n_waiting == 4)
            assert server.chat("a text", max_tokens=2).status_code == 200
        finally:
            done.set()
        assert [p.result().status_code for p in pictures] == [200] * 4
    server.check_idle()
