"""Lanes on CUDA with a stream that only takes notes."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest
import torch

from hydrainfer.core import DEVICE_LOST, Lane, StepBatch, StepResult
from hydrainfer.runtime import lane as lanes
from tests.cuda.fake import CUDA

pytestmark = pytest.mark.cpu

BATCH = StepBatch(1, Lane.LANGUAGE, [], 0)


@pytest.fixture
def notes(monkeypatch):
    """What happens on the stream of a lane, in order."""
    found: list = []

    class Stream:
        def __init__(self, device, priority=0) -> None:
            found.append(("stream", device, priority))

        def synchronize(self) -> None:
            found.append("synchronize")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    return found


def run(work, notes, **options) -> StepResult:
    woken = threading.Event()
    lane = lanes.LaneThread("test", CUDA, woken.set, **options)
    ticket = lane.submit(BATCH, work)
    assert woken.wait(10)
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
    assert notes[1:] == ["launched", "synchronize", "polled"]


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
