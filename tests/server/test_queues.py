"""Queues and turns on a virtual clock: how much work may wait, and who is known again."""

from itertools import pairwise

import pytest

from hydrainfer.core import Share
from hydrainfer.server.door.queues import LATEST_TURN_S, Queue
from hydrainfer.server.door.returns import Mark, Returns


def test_a_queue_is_as_long_as_what_left_it_lately_took():
    queue, now = Queue(10.0), 50.0
    for _ in range(100):
        queue.enter(30.0, now)
    assert queue.seconds(now) == 0.0, "nothing is known"
    for _ in range(40):
        now += 0.25
        queue.leave(30.0, now, done=True)
    assert queue.seconds(now) == pytest.approx(60 * 0.25, rel=0.05)
    assert not queue.has_room(now, favoured=True)
    for _ in range(60):  # ten times faster
        now += 0.025
        queue.leave(30.0, now, done=True)
    assert (queue.n_waiting, queue.seconds(now)) == (0, 0.0)


def test_a_queue_from_which_nothing_leaves_gets_no_longer_than_its_limit():
    queue = Queue(2.0)
    for _ in range(10):
        queue.enter(1.0, 0.0)
    assert queue.has_room(1.9, favoured=False) and not queue.has_room(9.0, favoured=False)


def test_slow_work_is_measured_by_as_many_and_a_standstill_shows():
    queue, now = Queue(1000.0), 0.0
    for _ in range(60):
        queue.enter(64_000.0, now)
    for _ in range(30):
        now += 20.0
        queue.leave(64_000.0, now, done=True)
        assert queue.seconds(now) == pytest.approx(queue.n_waiting * 20.0, rel=0.01)
    before_s = queue.seconds(now)
    assert before_s < queue.seconds(now + 60.0) < 1.5 * before_s


def test_first_tokens_that_come_together_are_measured_together():
    """Four pictures are encoded in one batch, so that all four first tokens come after 1.2 seconds."""
    queue, now = Queue(10.0), 0.0
    for _ in range(6):
        for _ in range(4):
            queue.enter(600.0, now)
        now += 1.2
        for _ in range(4):
            now += 0.01
            queue.leave(600.0, now, done=True)
        now += 5.0
    for _ in range(4):
        queue.enter(600.0, now)
    assert queue.seconds(now) == pytest.approx(1.24, rel=0.05)


def test_the_pace_of_a_queue_is_that_of_its_crowd_also_when_few_are_left():
    queue, now = Queue(10.0), 0.0
    for _ in range(8):
        queue.enter(1.0, now)
    for _ in range(6):
        now += 1.0
        queue.leave(1.0, now, done=True)
    assert queue.pace() == pytest.approx(1.0)
    for _ in range(20):  # two wait all the time, and are done together
        now += 2.0
        for _ in range(2):
            queue.leave(1.0, now, done=True)
        for _ in range(2):
            queue.enter(1.0, now)
    assert 0.8 < queue.pace() <= 1.0


def test_a_crowd_that_goes_away_leaves_no_rate():
    queue = Queue(10.0)
    for _ in range(4):
        queue.enter(1.0, 0.0)
    queue.leave(1.0, 0.0, done=False)
    for _ in range(3):
        queue.leave(1.0, 3.0, done=True)
    assert queue.pace() == 0.0 and queue.seconds(3.0) == 0.0
    for _ in range(5):
        queue.enter(1.0, 4.0)
    assert queue.seconds(9.0) == pytest.approx(5.0), "nothing is known"


def test_requests_that_are_answered_with_errors_refuse_nobody():
    """Eight clients send what is wrong, 0.1 s of preparation each. Then come right ones, which take 0.2 s each."""
    queue, now = Queue(10.0), 0.0
    for _ in range(8):
        queue.enter(1.0, now)
    for _ in range(600):
        now += 0.1
        queue.leave(1.0, now, done=False, answered=True)
        queue.enter(1.0, now)
        assert queue.seconds(now) < 0.2
    entered = [now] * 8
    for _ in range(8):
        queue.leave(1.0, now, done=False, answered=True)
        queue.enter(1.0, now)
    for _ in range(100):
        now += 0.2
        queue.leave(1.0, now, done=True, waited_s=now - entered.pop(0))
        queue.enter(1.0, now)
        entered.append(now)
        assert queue.seconds(now) <= 8 * 0.2 * 1.01
    assert queue.pace() == pytest.approx(0.2)


def test_requests_that_are_answered_with_errors_hide_no_slow_work():
    """A flood of them goes by while each right one, which waits for all before it, takes a second."""
    queue, now = Queue(10.0), 0.0
    entered = [now] * 8
    for _ in entered:
        queue.enter(1.0, now)
    for _ in range(30):
        for _ in range(50):
            queue.enter(1.0, now)
            now += 0.02
            queue.leave(1.0, now, done=False, answered=True)
        queue.leave(1.0, now, done=True, waited_s=now - entered.pop(0))
        queue.enter(1.0, now)
        entered.append(now)
    assert queue.pace() == pytest.approx(1.0)
    before_s = queue.seconds(now)
    assert queue.seconds(now + 3.0) > before_s, "nothing is done or answered"


def test_the_few_are_never_refused():
    """One request after the other, each slow: that is no measure of what many would take."""
    queue, now = Queue(1.0), 0.0
    for _ in range(20):
        queue.enter(64_000.0, now)
        now += 30.0
        queue.leave(64_000.0, now, done=True)
    for _ in range(3):
        queue.enter(64_000.0, now)
    assert queue.has_room(now + 100.0, favoured=False)


def test_a_slow_time_does_not_shut_a_queue():
    """Only a crowd is measured, so that a crowd must be let in although the last one was slow."""
    queue, now = Queue(10.0), 0.0
    for _ in range(10):
        queue.enter(1.0, now)
    for _ in range(10):
        now += 60.0
        queue.leave(1.0, now, done=True)
    most = 0
    for _ in range(1000):  # one leaves, three come
        now += 0.05
        if queue.n_waiting:
            queue.leave(1.0, now, done=True)
        for _ in range(3):
            if queue.has_room(now, favoured=False):
                queue.enter(1.0, now)
        most = max(most, queue.n_waiting)
    assert most > 100, "200 are 10 s of work"


def test_a_burst_of_first_tokens_makes_no_room():
    """The first requests of a crowd begin together, for nobody decodes yet; that is no rate that lasts."""
    queue, now = Queue(10.0), 0.0
    for _ in range(100):
        queue.enter(1.0, now)
    for _ in range(100):  # 10 a second
        now += 0.1
        queue.leave(1.0, now, done=True)
    n = 0
    while queue.has_room(now, favoured=False):
        queue.enter(1.0, now)
        n += 1
    for _ in range(20):
        now += 0.01
        queue.leave(1.0, now, done=True)
    assert queue.seconds(now) < 5.0, "by the rate of now"
    while queue.has_room(now, favoured=False):
        queue.enter(1.0, now)
        n += 1
    assert 100 <= n <= 140


def test_a_tenant_within_its_share_of_the_queue_is_not_refused_for_another():
    queue, now, flood, other = Queue(10.0), 0.0, Share("flood"), Share("other", 0.5)
    for _ in range(20):
        queue.enter(1.0, now, flood)
    for _ in range(8):  # one a second
        now += 1.0
        queue.leave(1.0, now, flood, done=True)
    assert queue.seconds(now) > 10.0 and not queue.has_room(now, flood, favoured=False)
    n = 0
    while queue.has_room(now, other, favoured=False):
        queue.enter(1.0, now, other)
        n += 1
    assert 3 <= n <= 4, "a third of ten seconds"
    for _ in range(n):
        queue.leave(1.0, now, other, done=False)
    assert not queue.has_room(now, flood, favoured=False)


def test_turns_come_one_after_the_other_and_are_void_when_the_queue_has_eased():
    queue, now = Queue(1.0), 0.0
    for _ in range(200):
        queue.enter(1.0, now)
    for _ in range(50):
        now += 0.1
        queue.leave(1.0, now, done=True)
    promised = [queue.promise(now) for _ in range(100)]
    gaps = [b - a for a, b in pairwise(promised)]
    assert min(gaps) == pytest.approx(max(gaps)) and gaps[0] == pytest.approx(0.1 / 0.6, rel=0.05)
    many = [queue.promise(now) for _ in range(10_000)]
    assert max(many) <= LATEST_TURN_S and len({round(s) for s in many[-3000:]}) > 100, "spread, however many"
    while queue.n_waiting:
        now += 0.1
        queue.leave(1.0, now, done=True)
    assert queue.has_room(now, favoured=False) and queue.promise(now) < 1.0


def test_each_turn_is_known_once_by_the_same_request():
    returns = Returns()

    def mark(body=b"{}", path=b"/v1/completions", key=b"Bearer a"):
        mark = Mark(path, [(b"host", b"x"), (b"authorization", key)])
        for at in range(0, len(body), 7):  # in whatever pieces it comes
            mark.add(body[at : at + 7])
        return mark

    for turn_s in (10.0, 10.5):
        returns.expect(mark(), turn_s, 0.0)
    assert not returns.comes(mark(), 9.0), "too early"
    assert not any(returns.comes(m, 10.2) for m in (mark(b"[]"), mark(path=b"/v1"), mark(key=b"Bearer b")))
    assert [returns.comes(mark(), 11.0) for _ in range(3)] == [True, True, False] and not returns.n
    large = [mark(b"x" * 200_000 + end) for end in (b"a", b"b")]
    assert large[0].done and large[0].value == large[1].value, "only the beginning counts"
    for i in range(100_000):  # nobody comes
        returns.expect(mark(b"%d" % i), 100.0 + i, 0.01 * i)
    assert returns.n <= 1 << 15
    returns.expect(mark(b"soon"), 1020.0, 1000.0)
    assert returns.comes(mark(b"soon"), 1021.0), "the latest turns are forgotten first"
    returns.expect(mark(b"late"), 300_100.0, 300_000.0)
    assert returns.n == 1 and returns.comes(mark(b"late"), 300_101.0) and not returns.n
    for now in range(400_000, 400_100):  # each comes back before the next is refused
        returns.expect(mark(), now + 1.0, now)
        assert returns.comes(mark(), now + 1.0)
    assert not returns._turns


def test_of_too_many_turns_only_the_latest_are_forgotten():
    returns, marks = Returns(), [Mark(b"%d" % i, []) for i in range((1 << 15) + 100)]
    for mark in marks[:-100]:
        returns.expect(mark, 100.5, 0.0)
    for mark in marks[-100:]:
        returns.expect(mark, 99.5, 0.0)
    assert returns.n == 1 << 15
    assert sum(returns.comes(mark, 101.0) for mark in marks) == 1 << 15
    assert all(mark.returns for mark in marks[-100:]) and not returns.n and not returns._turns


def test_a_nearer_turn_is_not_forgotten_for_a_later_one():
    """Also after who had the latest turn has come."""
    returns, marks = Returns(), [Mark(b"%d" % i, []) for i in range(1 << 15)]
    for mark in marks[:-1]:
        returns.expect(mark, 100.5, 0.0)
    returns.expect(last := Mark(b"last", []), 200.5, 0.0)
    assert returns.comes(last, 201.0)
    returns.expect(marks[-1], 100.5, 0.0)
    returns.expect(late := Mark(b"late", []), 150.5, 0.0)
    assert sum(returns.comes(mark, 101.0) for mark in marks) == 1 << 15
    assert not returns.comes(late, 151.0)
