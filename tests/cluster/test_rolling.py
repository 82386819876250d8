"""One instance after the other, each only when all are there."""

import pytest

from hydrainfer.cluster.rolling import Rolling

pytestmark = pytest.mark.unit
BUSY, IDLE = {"P0": False, "D0": False}, {"P0": True, "D0": True}


def test_one_at_a_time_when_idle_or_after_its_rest():
    rolling, there = Rolling(), {"P0": 1, "D0": 1}
    assert rolling.turn(0.0, there, IDLE) is None and rolling.resting is None, "nobody asked"
    rolling.begin(["P0", "D0"])
    assert rolling.turn(1.0, there, BUSY) is None and rolling.resting == "P0"
    assert rolling.turn(5.9, there, BUSY) is None
    assert rolling.turn(6.0, there, BUSY) == ("P0", 1) == rolling.ended and rolling.resting is None
    assert rolling.turn(6.1, there, IDLE) is None and rolling.resting is None, "its death is not known yet"
    assert rolling.turn(7.0, {"D0": 1}, IDLE) is None and rolling.resting is None
    there["P0"] = 2
    assert rolling.turn(8.0, there, BUSY) is None and rolling.resting == "D0"
    assert rolling.turn(8.1, there, IDLE) == ("D0", 1)
    there["D0"] = 2
    assert rolling.turn(9.0, there, IDLE) is None and rolling.resting is None, "all have been"


def test_an_instance_that_dies_while_it_rests_is_not_ended_again():
    rolling = Rolling()
    rolling.begin(["P0", "D0"])
    rolling.turn(0.0, {"P0": 1, "D0": 1}, BUSY)
    assert rolling.turn(0.1, {"D0": 1}, BUSY) is None and rolling.resting is None
    assert rolling.turn(0.2, {"P0": 2, "D0": 1}, BUSY) is None and rolling.resting == "D0"
