"""The times that are promised to requests for which no place is free, on a virtual clock."""

import heapq
from itertools import count, pairwise

import pytest

from hydrainfer.core import Overloaded
from hydrainfer.server import OverloadControl
from hydrainfer.server.door.overload import TEXT, Work
from hydrainfer.server.door.queues import LATEST_TURN_S
from tests.server.test_overload import SMALL, Clock


def promise_of(overload, work=SMALL):
    with pytest.raises(Overloaded, match="of at most") as refusal:
        overload.claim(None, work)
    return refusal.value.retry_after_s


def steady(overload, clock, life_s):
    """All places held, one of them ending every `life_s / max_requests` seconds; the places, the oldest first."""
    held = []
    for _ in range(10 * overload.max_requests):
        clock.now += life_s / overload.max_requests
        if len(held) == overload.max_requests:
            held.pop(0).leave()
        held.append(overload.claim(overload.enter(10), SMALL))
        held[-1].begun()
    return held


def test_a_place_is_promised_at_the_rate_at_which_requests_end():
    """All of them decode, so nothing waits for a first token."""
    clock = Clock()
    overload = OverloadControl(clock, max_requests=5)
    held = steady(overload, clock, life_s=10.0)
    assert overload.queues[TEXT].n_waiting == 0
    promised = [promise_of(overload) for _ in range(6)]
    assert promised[0] == pytest.approx(2.0 / 0.6)
    assert [b - a for a, b in pairwise(promised)] == pytest.approx([2.0 / 0.6] * 5)
    assert promise_of(overload, SMALL._replace(n=3)) == pytest.approx(promised[-1] + 3 * 2.0 / 0.6), "three places"
    clock.now += 600.0
    assert promise_of(overload) > 100.0, "the ones that hold them now take longer"
    for place in held:
        place.leave()


def test_short_requests_are_told_to_come_back_soon():
    clock = Clock()
    overload = OverloadControl(clock, max_requests=50)
    held = steady(overload, clock, life_s=0.5)
    assert promise_of(overload) == pytest.approx(0.01 / 0.6)
    many = [promise_of(overload) for _ in range(50_000)]
    assert max(many) <= LATEST_TURN_S
    for place in held:
        place.leave()


def test_while_no_request_has_ended_nobody_is_told_to_come_back_within_a_second():
    clock = Clock()
    overload = OverloadControl(clock, max_requests=5)
    held = [overload.claim(overload.enter(10), SMALL) for _ in range(5)]
    promised = [promise_of(overload) for _ in range(12)]
    assert min(promised) == 1.0 and promised == sorted(promised) and promised[-1] == pytest.approx(12 * 0.2 / 0.6)
    clock.now += 30.0
    assert promise_of(overload) == pytest.approx(6.0 / 0.6), "as long again"
    for place in held:
        place.leave()


def test_what_ends_without_an_answer_does_not_tell_how_long_answers_take():
    clock = Clock()
    overload = OverloadControl(clock, max_requests=2)
    for _ in range(100):
        clock.now += 0.001
        overload.take().leave()
        overload.claim(overload.enter(10), SMALL).leave()
    held = [overload.claim(overload.enter(10), SMALL) for _ in range(2)]
    assert promise_of(overload) == 1.0
    for place in held:
        place.leave()


def test_promises_are_void_once_most_places_are_free():
    clock = Clock()
    overload = OverloadControl(clock, max_requests=5)
    held = steady(overload, clock, life_s=10.0)
    assert max(promise_of(overload) for _ in range(100)) > 100.0
    for place in held:
        place.leave()
    held = [overload.claim(overload.enter(10), SMALL) for _ in range(5)]
    assert 2.0 < promise_of(overload) < 4.0
    for place in held:
        place.leave()


def test_clients_that_come_back_when_they_were_told_are_served_within_two_retries():
    """As many as the `openai` client makes. Five places; two requests run at once, for four seconds each."""
    clock, order = Clock(), count()
    overload = OverloadControl(clock, max_requests=5)
    for place in steady(overload, clock, life_s=10.0):
        place.leave()
    busy_until, retries, events = [clock.now] * 2, {}, [(clock.now, next(order), who) for who in range(12)]
    while events:
        clock.now, _, who = heapq.heappop(events)
        if not isinstance(who, int):
            who.leave()
            continue
        retries[who] = retries.get(who, -1) + 1
        try:
            place = overload.claim(overload.enter(10), SMALL)
        except Overloaded as e:
            heapq.heappush(events, (clock.now + e.retry_after_s, next(order), who))
            continue
        end_s = max(heapq.heappop(busy_until), clock.now) + 4.0
        place.begun()
        heapq.heappush(busy_until, end_s)
        heapq.heappush(events, (end_s, next(order), place))
    assert len(retries) == 12 and max(retries.values()) <= 2, retries
    overload.check(idle=True)


def test_a_queue_at_a_standstill_promises_no_turn_within_a_second():
    clock = Clock()
    overload = OverloadControl(clock, longest_s=2.0)
    held = [overload.claim(overload.enter(10), SMALL) for _ in range(100)]
    clock.now += 5.0
    promised = []
    for _ in range(100):
        with pytest.raises(Overloaded, match="s of work") as refusal:
            overload.enter(10)
        promised.append(refusal.value.retry_after_s)
    assert min(promised) == 1.0 and promised[-1] == pytest.approx(5.0 / 0.6)
    for place in held:
        place.leave()


def test_a_queue_longer_than_its_limit_promises_turns_once_it_is_shorter():
    """The work that waits turned out to be larger than it was guessed to be."""
    clock = Clock()
    overload = OverloadControl(clock, longest_s=10.0)
    held = [overload.claim(overload.enter(10), SMALL) for _ in range(100)]
    for place in held[:50]:
        clock.now += 0.1
        place.begun()
    for place in held[50:]:
        place.prepared(Work(TEXT, 1000.0))
    with pytest.raises(Overloaded, match=r"50\.0 s of work") as refusal:
        overload.enter(10)
    assert refusal.value.retry_after_s == pytest.approx(40.0, abs=1.0)
    for place in held:
        place.leave()
