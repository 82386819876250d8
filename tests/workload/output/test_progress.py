"""What a load says while it runs: where there is no terminal, a line every while."""

import io
import re

import pytest
from rich.console import Console

from hydrainfer.workload.output import Shown, ticking
from tests.waiting import wait_until

pytestmark = pytest.mark.unit


def test_a_load_says_that_it_goes_on(monkeypatch):
    """Also before the first request, while a server starts, and between two runs."""
    monkeypatch.setattr(ticking, "EVERY_S", 0.2)
    console = Console(file=io.StringIO(), width=200)

    def told():
        return [re.sub(r"( \(|, ).*", "", line) for line in console.file.getvalue().splitlines()]

    def wait_for(line):
        wait_until(lambda: line in told(), say=told)

    with Shown(console, None) as watch:
        wait_for("preparing")
        watch.begins("server", "at 5/s", 40)
        wait_for("server  at 5/s: 0 of 40")
        watch.ended("server", None)
        wait_for("between two runs")
    assert list(dict.fromkeys(told())) == [
        "preparing",
        "server  at 5/s: 40 requests",
        "server  at 5/s: 0 of 40",
        "between two runs",
    ]
