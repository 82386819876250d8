"""Lanes on CUDA with a stream that only takes notes."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest
import torch

from hydrainfer.core import DEVICE_LOST, Lane, StepBatch, StepResult
from hydrainfer.runtime import lane as lanes
from tests.cuda.fake import CUDA
from tests.waiting import HELD_S, PATIENCE_S

pytestmark = pytest.mark.cpu

BATCH = StepBatch(1, Lane.LANGUAGE, [], 0)


@pytest.fixture
def notes(monkeypatch):
    """What happens on the stream of a lane, in order."""
    found: list = []

    class Stream:
        def __init__(self, device, priority=0) -> None:
            found.append(("stream", device, priority))

    class Event:
        def record(self, stream) -> None:
            found.append("recorded")

        def synchronize(self) -> None:
            found.append("there")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    return found


def run(work, notes, **options) -> StepResult:
    woken = threading.Event()
    lane = lanes.LaneThread("test", CUDA, woken.set, **options)
    ticket = lane.submit(BATCH, work)
    assert woken.wait(PATIENCE_S)
    notes.append("polled")
    lane.close()
    return ticket.poll(0.0)


@pytest.mark.parametrize("fails", [False, True])
def test_a_batch_ends_when_the_device_is_done_with_it(notes, fails):
    """Also one that samples nothing or raised: its blocks may be another request's next."""

    def work():
        notes.append("launched")
        if fails:
            raise RuntimeError
        return StepResult(BATCH)

    assert (run(work, notes).error is not None) is fails
    assert notes[1:] == ["launched", "recorded", "there", "polled"]


def test_the_next_batch_is_launched_while_the_device_computes_one(notes, monkeypatch):
    """And results are read in the order launched, each once its batch is done."""
    computed = [threading.Event() for _ in range(2)]
    order = iter(computed)

    class Event:
        def __init__(self) -> None:
            self.done = next(order)

        def record(self, stream) -> None:
            pass

        def synchronize(self) -> None:
            assert self.done.wait(HELD_S)

    def work(name, launched):
        def read():
            notes.append(f"read {name}")
            return StepResult(BATCH)

        notes.append(f"launched {name}")
        launched.set()
        return read

    monkeypatch.setattr(torch.cuda, "Event", Event)
    woken, launched = threading.Event(), [threading.Event() for _ in range(2)]
    lane = lanes.LaneThread("test", CUDA, woken.set)
    tickets = [lane.submit(BATCH, lambda i=i: work(i, launched[i])) for i in range(2)]
    assert all(event.wait(PATIENCE_S) for event in launched), "both are on the stream"
    assert tickets[0].result is None and notes[1:] == ["launched 0", "launched 1"]
    computed[0].set()
    assert woken.wait(PATIENCE_S) and tickets[0].result is not None and tickets[1].result is None
    computed[1].set()
    lane.close()
    assert tickets[1].result is not None and notes[3:] == ["read 0", "read 1"]


def test_the_language_lane_goes_first(notes, monkeypatch):
    run(lambda: StepResult(BATCH), notes, priority=-1)
    assert notes[0] == ("stream", CUDA, -1)


def test_an_error_of_the_device_loses_it(notes):
    def work():
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    assert run(work, notes).error.code == DEVICE_LOST


def test_running_out_of_memory_does_not(notes):
    def work():
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert run(work, notes).error.code == "out_of_memory"
