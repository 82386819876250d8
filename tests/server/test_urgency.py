"""Priorities and deadlines of single requests, by field and by header."""

import pytest

from hydrainfer.core import DeadlineExceeded
from hydrainfer.server import OverloadControl
from hydrainfer.server.door.overload import TEXT, Urgency, Work
from tests.server.test_overload import Clock

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    ("fields", "headers", "priority", "within_s"),
    [
        ({}, {}, 0, 60.0),
        ({"priority": 2, "deadline_s": 9}, {}, 2, 9.0),
        ({}, {"x-priority": "-1", "x-deadline-s": "7.5"}, -1, 7.5),
        ({"priority": 0, "deadline_s": 9.0}, {"x-priority": "2", "x-deadline-s": "7.5"}, 0, 7.5),
        ({"deadline_s": 1e6}, {"x-deadline-s": "inf"}, 0, 60.0),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_fields_and_headers_reach_the_engine(server, path, fields, headers, priority, within_s):
    prompt = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    answer = server.http.post(path, json={**prompt, "max_tokens": 1, **fields}, headers=headers)
    assert answer.status_code == 200
    request = server.engine.submitted[-1]
    assert request.priority == priority
    assert request.deadline_s - request.arrival_s == pytest.approx(within_s)


@pytest.mark.parametrize(
    ("fields", "headers", "param"),
    [
        ({"priority": 3}, {}, "priority"),
        ({"priority": 1.5}, {}, "priority"),
        ({"priority": True}, {}, "priority"),
        ({"deadline_s": 0}, {}, "deadline_s"),
        ({"deadline_s": "soon"}, {}, "deadline_s"),
        ({}, {"x-priority": "high"}, "priority"),
        ({}, {"x-priority": "-inf"}, "priority"),
        ({}, {"x-deadline-s": "-1"}, "deadline_s"),
        ({}, {"x-deadline-s": "soon"}, "deadline_s"),
    ],
)
def test_impossible_priorities_and_timeouts_are_400(server, fields, headers, param):
    answer = server.http.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], **fields}, headers=headers
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert "nan" not in answer.json()["error"]["message"]


@pytest.mark.parametrize("by", ["field", "header"])
def test_a_deadline_ends_the_request(start, monkeypatch, by):
    monkeypatch.setattr("hydrainfer.server.live.session.DEADLINE_GRACE_S", 0.1)
    server = start()
    server.engine.hold.set()
    server.http.headers.update({"x-deadline-s": "0.3"} if by == "header" else {})
    answer = server.chat(**({"deadline_s": 0.3} if by == "field" else {}))
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    server.check_idle()


def test_a_request_that_waits_longer_than_it_may_ends_before_it_costs_anything():
    clock = Clock()
    overload = OverloadControl(clock, longest_s=100.0)
    places = [overload.claim(None, Work(TEXT, 100.0)) for _ in range(30)]
    for place in places[:10]:
        clock.now += 1.0
        place.begun()
    assert overload.seconds()[TEXT] == pytest.approx(20.0, rel=0.1)
    with pytest.raises(DeadlineExceeded):
        overload.enter(10, urgency=Urgency(0, 10.0))
    with pytest.raises(DeadlineExceeded):
        overload.claim(None, Work(TEXT, 100.0), Urgency(0, 10.0))
    assert overload.refused["deadline"] == 2 and overload.n_live == 30
    places += [overload.enter(10, urgency=Urgency(0, 50.0)), overload.enter(10, urgency=Urgency(1, 10.0))]
    for place in places:
        place.leave()
    overload.check(idle=True)


def test_behind_the_few_nobody_is_too_late():
    """By a slow time long ago nobody knows how long the few take."""
    clock = Clock()
    overload = OverloadControl(clock, longest_s=100.0)
    places = [overload.claim(None, Work(TEXT, 100.0)) for _ in range(10)]
    for place in places:
        clock.now += 60.0
        place.begun()
        place.leave()
    clock.now += 3600.0
    for _ in range(4):
        overload.claim(None, Work(TEXT, 100.0), Urgency(0, 10.0))
    with pytest.raises(DeadlineExceeded):
        overload.claim(None, Work(TEXT, 100.0), Urgency(0, 10.0))
