"""The watchdog's exception finds its thread in the watched call, whichever of the two is held up, and wherever."""

import sys
import threading
import time
from queue import SimpleQueue

import pytest

from hydrainfer.processor.text import watchdog
from hydrainfer.processor.text.watchdog import TooSlow, Watchdog
from tests.waiting import wait_until

pytestmark = [pytest.mark.unit, pytest.mark.timeout(120)]


@pytest.fixture
def dog(monkeypatch):
    """A watchdog without a thread: the test calls `_stop_slow`, which finds every watched call too slow."""
    monkeypatch.setattr(watchdog, "_cpu_s", lambda clock: 0.0)
    dog = Watchdog(-1.0)
    dog._thread = threading.current_thread()
    return dog


class Worker(threading.Thread):
    """Runs `work` under the watchdog, and says in `outcome` what `run` gave or raised."""

    def __init__(self, dog, work):
        super().__init__(daemon=True)
        self.dog, self.work, self.outcome = dog, work, None

    def run(self):
        try:
            self.outcome = self.dog.run(self.work)
        except BaseException as e:
            self.outcome = type(e)

    def is_in(self, function):
        frame = sys._current_frames().get(self.ident)
        while frame is not None and frame.f_code.co_name != function:
            frame = frame.f_back
        return frame is not None


def check_free(dog):
    assert not dog._watched
    assert dog._changed.acquire(blocking=False), "the lock is held for ever"
    dog._changed.release()
    assert dog.run(lambda: "next") == "next"


def test_a_call_that_ends_before_the_watchdog_claims_it_is_not_stopped(dog, monkeypatch):
    """The watchdog is held up once it has judged the call too slow."""
    judged, ended = threading.Event(), threading.Event()
    worker = Worker(dog, lambda: judged.wait(60) and "done")
    cpu_s = watchdog._cpu_s

    def judge(clock):
        if threading.current_thread() is not worker:
            judged.set()
            ended.wait(60)
        return cpu_s(clock)

    monkeypatch.setattr(watchdog, "_cpu_s", judge)
    worker.start()
    wait_until(lambda: worker.is_in("wait"))
    watching = threading.Thread(target=dog._stop_slow, daemon=True)
    watching.start()
    worker.join(60)
    ended.set()
    watching.join(60)
    assert worker.outcome == "done"
    check_free(dog)


def test_a_call_that_ends_once_it_is_claimed_waits_for_the_exception(dog, monkeypatch):
    """The watchdog is held up between its claim and the exception."""
    claimed, waits, raise_in = threading.Event(), threading.Event(), watchdog._raise_in
    worker = Worker(dog, lambda: claimed.wait(60) and "done")

    def hold(thread, exception):
        if threading.current_thread() is not worker:
            claimed.set()
            waits.wait(60)
        return raise_in(thread, exception)

    monkeypatch.setattr(watchdog, "_raise_in", hold)
    worker.start()
    wait_until(lambda: worker.is_in("wait"))
    watching = threading.Thread(target=dog._stop_slow, daemon=True)
    watching.start()
    wait_until(lambda: worker.is_in("_end"))
    assert worker.is_alive()
    waits.set()
    worker.join(60)
    watching.join(60)
    assert worker.outcome is TooSlow
    check_free(dog)


def test_a_call_that_swallows_the_exception_ends(dog):
    def swallow():
        try:
            while True:
                time.sleep(0.001)
        except BaseException:
            return "swallowed"

    worker = Worker(dog, swallow)
    worker.start()
    wait_until(lambda: worker.is_in("swallow"))
    dog._stop_slow()
    worker.join(60)
    assert worker.outcome == "swallowed"
    check_free(dog)


class Watched(dict):
    """The watched calls. `at` is called before and after a worker takes its own out."""

    def __init__(self, at):
        super().__init__()
        self.at = at

    def pop(self, *args):
        self.at("before the claim")
        value = super().pop(*args)
        self.at("after the claim")
        return value


@pytest.mark.parametrize(
    "point, outcome",
    [
        ("before the limit", "done"),
        ("in the call", TooSlow),
        ("before the claim", TooSlow),
        ("after the claim", "done"),
        ("after the call", "done"),
    ],
)
def test_wherever_the_watchdog_looks_its_exception_stays_within_the_call(dog, monkeypatch, point, outcome):
    asks, answers, points = SimpleQueue(), SimpleQueue(), []

    def answer():
        while asks.get():
            dog._stop_slow()
            answers.put(None)

    def at(name):
        if threading.current_thread() is worker:
            points.append(name)
            if name == point:
                asks.put(True)
                answers.get()

    class Going(Worker):
        def run(self):
            super().run()
            at("after the call")

    worker = Going(dog, lambda: at("in the call") or "done")
    dog._watched = Watched(at)
    monkeypatch.setattr(watchdog, "_cpu_s", lambda clock: at("before the limit") or 0.0)
    helper = threading.Thread(target=answer, daemon=True)
    helper.start()
    worker.start()
    worker.join(60)
    asks.put(False)
    helper.join(60)
    assert worker.outcome == outcome
    assert points[0] == "before the limit" and points[-1] == "after the call"
    check_free(dog)


def test_an_exception_that_comes_as_the_call_returns_is_the_calls(dog):
    """The call is one of C, so nothing of it can catch the exception any more."""
    gate = threading.Lock()
    gate.acquire()
    worker = Worker(dog, gate.acquire)
    worker.start()
    wait_until(lambda: any(watch.end_s < 0.0 for watch in list(dog._watched)))
    dog._stop_slow()
    gate.release()
    worker.join(60)
    assert worker.outcome is TooSlow
    check_free(dog)
