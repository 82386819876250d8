"""What a plan says while it is made: a line for each phase, and one every while, where there is no terminal."""

import io
import re

import pytest
from rich.console import Console

from hydrainfer.profiling import progress
from tests.waiting import wait_until

pytestmark = pytest.mark.unit


def lines_of(work, monkeypatch, every_s, console=None):
    monkeypatch.setattr(progress, "EVERY_S", every_s)
    console = console or Console(file=io.StringIO(), width=200)
    with progress.shown(console) as on_progress:
        work(on_progress)
    return console.file.getvalue().splitlines()


def test_a_phase_begins_and_ends_with_a_line(monkeypatch):
    def work(on_progress):
        for done in range(1, 41):
            on_progress("screen", done, 40)
        on_progress("explain", 0, 1)

    lines = [re.sub(r" \(\d+ s\)$", "", line) for line in lines_of(work, monkeypatch, 10.0)]
    assert lines == [
        "reading what each step takes, and drawing requests of the workload",
        "bounds and short simulations of every layout: 1 of 40",
        "bounds and short simulations of every layout: 40 of 40",
        "why each layout carries no more: 0 of 1",
    ]


def test_a_long_phase_says_that_it_goes_on(monkeypatch):
    def work(on_progress):
        on_progress("measure", 1, 3)
        wait_until(lambda: len(console.file.getvalue().splitlines()) >= 4)

    console = Console(file=io.StringIO(), width=200)
    lines = lines_of(work, monkeypatch, 0.2, console)
    assert all(line.startswith("long simulations of layouts that may be best: 1 of 3") for line in lines[1:])


def test_a_hundred_batches_are_not_a_hundred_lines(monkeypatch):
    def work(on_progress):
        for done in range(101):
            on_progress(f"decode {done} × 64", done, 100)
        on_progress("decode 2 × 64", 100, 100)

    lines = lines_of(work, monkeypatch, 10.0)
    assert len(lines) == 2 and lines[-1].startswith("decode 100 × 64: 100 of 100")
