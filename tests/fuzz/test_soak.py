"""A soak of a few seconds: everything but the kills, which `tests/cluster` has."""

import asyncio

import pytest
from rich.console import Console

from benchmarks.b29_soak import arguments, experiment, report, violations

pytestmark = [pytest.mark.multi, pytest.mark.timeout(120)]


def test_nothing_is_lost_or_left():
    short = "--minutes 0.06 --layout 1EP1D --launcher inproc --kill-s 0 --burst 60 --burst-s 2 --sample-s 1 --rate 6"
    results = asyncio.run(experiment(arguments(short.split()), Console(quiet=True)))
    summary = results["summary"]
    assert not violations(summary), violations(summary)
    assert summary["requests"] > 40 and summary["verdicts"]["text"]["answered"]
    assert "nothing is lost or left behind" in report(summary, results["command"])
