"""A thread that both lanes share: work pauses where it can, and what is due is executed there."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from hydrainfer.core import Lane, StepBatch, StepResult
from hydrainfer.runtime import LaneThread
from tests.waiting import HELD_S, PATIENCE_S

pytestmark = pytest.mark.cpu


class Shared:
    def __init__(self):
        self.woken = threading.Event()
        self.lane = LaneThread("shared", torch.device("cpu"), self.woken.set)
        self.done = []
        self.n_parts = 0
        self.parts_before = {}  # name of tokens -> how many parts of pictures were done before

    def part(self):
        """The work of pictures between two pauses."""
        time.sleep(1e-3)
        self.n_parts += 1

    def batch(self, lane, after_s=0.0):
        return StepBatch(1, lane, [], 1, after_s=after_s)

    def pictures(self, began, go_on, enough=None):
        """Once `go_on` is set: parts, with a pause before each, until `enough` is set, and then 50 more."""
        batch = self.batch(Lane.VISION)

        def work():
            began.set()
            assert go_on.wait(HELD_S)
            end = time.monotonic() + PATIENCE_S
            while enough is not None and not enough.is_set():
                assert time.monotonic() < end
                self.lane.pause()
                self.part()
            for _ in range(50):
                self.lane.pause()
                self.part()
            self.done.append("pictures")
            return StepResult(batch)

        return self.lane.submit(batch, work)

    def tokens(self, name, after_s=0.0, error=None):
        batch = self.batch(Lane.LANGUAGE, after_s)

        def work():
            if error is not None:
                raise error
            time.sleep(0.01)
            self.parts_before[name] = self.n_parts
            self.done.append(name)
            return StepResult(batch)

        return self.lane.submit(batch, work)

    def wait(self, ticket):
        end = time.monotonic() + PATIENCE_S
        while ticket.poll(0.0) is None:
            assert time.monotonic() < end
            self.woken.wait(0.01)
            self.woken.clear()
        return ticket.poll(0.0)


@pytest.fixture
def shared():
    found = Shared()
    yield found
    found.lane.close()


def test_tokens_interrupt_pictures_and_each_has_its_own_time(shared):
    began, go_on, enough = threading.Event(), threading.Event(), threading.Event()
    start_s = time.monotonic()
    pictures = shared.pictures(began, go_on, enough)
    assert began.wait(PATIENCE_S)
    first = shared.tokens("first")
    go_on.set()
    shared.wait(first)
    second = shared.tokens("second")
    shared.wait(second)
    enough.set()
    results = [shared.wait(ticket) for ticket in (pictures, first, second)]
    assert shared.done == ["first", "second", "pictures"]
    assert [result.own_s >= least_s for result, least_s in zip(results, (0.05, 0.01, 0.01))] == [True] * 3
    assert sum(result.own_s for result in results) <= time.monotonic() - start_s


def test_tokens_wait_for_as_long_as_they_are_told_or_for_the_end(shared, monkeypatch):
    part_s = 2.0**-10  # exact sums
    monkeypatch.setattr("hydrainfer.runtime.lane.time", SimpleNamespace(perf_counter=lambda: shared.n_parts * part_s))
    began, go_on, enough = threading.Event(), threading.Event(), threading.Event()
    pictures = shared.pictures(began, go_on, enough)
    later = shared.tokens("later", after_s=20 * part_s)
    go_on.set()
    shared.wait(later)
    assert shared.parts_before == {"later": 19}, "the next pause would be too late"
    assert shared.done == ["later"]
    last = shared.tokens("last", after_s=1e9)
    enough.set()
    shared.wait(pictures)
    shared.wait(last)
    assert shared.done == ["later", "pictures", "last"]


def test_an_error_stays_with_the_batch_that_made_it(shared):
    began, go_on = threading.Event(), threading.Event()
    pictures = shared.pictures(began, go_on)
    assert began.wait(PATIENCE_S)
    broken = shared.tokens("broken", error=RuntimeError("a bug"))
    go_on.set()
    assert shared.wait(broken).error is not None
    assert shared.wait(pictures).error is None and shared.done == ["pictures"]


def test_the_end_waits_for_all_that_was_launched(shared):
    began, go_on = threading.Event(), threading.Event()
    pictures = shared.pictures(began, go_on)
    assert began.wait(PATIENCE_S)
    late = shared.tokens("late", after_s=1e9)
    closer = threading.Thread(target=shared.lane.close)
    closer.start()
    go_on.set()
    closer.join(PATIENCE_S)
    assert not closer.is_alive() and shared.done == ["pictures", "late"]
    assert pictures.poll(0.0) is not None and late.poll(0.0) is not None
