"""Lines that strangers cause: the first ones are written, the others counted."""

import logging

import pytest

from hydrainfer.core import SeldomLog

pytestmark = pytest.mark.unit


def test_a_flood_is_a_few_lines_and_a_number(caplog):
    now = 100.0
    seldom = SeldomLog(logging.getLogger("seldom"), n_lines=3, every_s=60.0, clock=lambda: now)
    for i in range(1000):
        seldom("refused %d", i)
        now += 0.05
    assert caplog.messages == ["refused 0", "refused 1", "refused 2"]
    now += 60.0
    for i in range(2):
        seldom("again %d", i)
    assert caplog.messages[3:] == ["997 more lines like the next one were left out", "again 0", "again 1"]
    now += 61.0
    seldom("late")
    assert caplog.messages[6:] == ["late"], "none was left out"
