"""Who waits when nobody runs a stage: newcomers and orphans, until somebody is back, for so long, or never again."""

import itertools

import pytest

from hydrainfer.core import CheckpointError, ErrorInfo, Unavailable
from tests.cluster.test_lives import PULSE, Rig, incarnations, out

pytestmark = pytest.mark.unit
DAMAGED = ErrorInfo.of(CheckpointError("/models/x: config.json is missing"))


@pytest.mark.parametrize("stage", ["E", "P"])
def test_a_new_request_waits_for_an_instance_to_come_back(stage):
    rig = Rig("E0", "P0", "D0")
    rig.die(f"{stage}0")
    rig.submit(pictures=[1] if stage == "E" else [])
    rig.wait(PULSE.patience_s - 2.0)
    assert rig.submitted() == [] and rig.told == []
    rig.hello(f"{stage}0")
    rig.side.tick(rig.now)
    assert rig.submitted() == [(f"{stage}0", "r", [])], "its first life: it has lost nothing"
    rig.wait(3 * PULSE.patience_s)
    assert rig.end() is None and rig.side.lives.n_recovered == 0


def test_newcomers_go_in_the_order_in_which_they_came():
    rig = Rig("EPD0")
    rig.die("EPD0")
    for name in ("a", "b", "c"):
        rig.submit(name)
        rig.wait(1.0)
    rig.hello("EPD0")
    rig.side.tick(rig.now)
    rig.submit("d")
    assert [name for _, name, _ in rig.submitted()] == ["a", "b", "c", "d"]


def test_a_new_request_whose_patience_ends_is_a_503():
    rig = Rig("E0", "D0", "P0")
    rig.die("P0")
    rig.submit()
    rig.wait(PULSE.patience_s + 2.0)
    error = rig.end().error
    assert (error.status, error.retry_after_s) == (503, 5.0) and "prefill" in error.message
    assert rig.side.lives.n_live == 0


def test_a_request_whose_instance_died_waits_for_one_to_come_back():
    rig = Rig("P0", "D0")
    rig.submit()
    rig.says("P0", out(0, 7))
    rig.die("P0")
    rig.wait(PULSE.patience_s - 2.0)
    assert rig.told[1:] == []
    rig.hello("P0")
    rig.wait(PULSE.beat_s)
    assert rig.submitted()[-1] == ("P0", "r~1", [7])
    rig.wait(3 * PULSE.patience_s)
    assert rig.end() is None


def test_a_request_whose_instance_died_is_a_503_once_its_patience_ends():
    rig = Rig("P0", "D0")
    rig.submit()
    rig.die("P0")
    rig.wait(PULSE.patience_s + 2.0)
    assert (rig.end().error.status, rig.end().error.retry_after_s) == (503, 5.0)
    assert rig.side.lives.n_live == 0


@pytest.mark.parametrize(
    ("lost", "goes_on"),
    [("E0", ["waits for P", "prefills", "decodes"]), ("P0", ["decodes"]), ("D0", [])],
)
def test_a_lost_stage_ends_who_needs_it_and_nobody_else(lost, goes_on):
    rig = Rig("E0", "P0", "D0")
    rig.submit("waits for E", pictures=[1])
    for name, pictures, moves in [
        ("waits for P", [2], ["E0", "P0"]),
        ("prefills", [], ["P0"]),
        ("decodes", [3], ["E0", "P0", "D0"]),
    ]:
        rig.submit(name, pictures=pictures)
        for hops, (giver, taker) in enumerate(itertools.pairwise(moves)):
            rig.says(taker, moved=(rig.gives(giver, taker, hops + 1, of=name),))
    rig.says("D0", out(0, 7, life="decodes"))
    rig.die(lost)
    rig.wait(PULSE.beat_s)
    rig.side.census.failed(lost, next(incarnations), DAMAGED, rig.now)
    rig.wait(PULSE.beat_s)
    assert rig.side.census.lost.stage.value[0].upper() == lost[0] and DAMAGED.message in rig.side.census.lost.why
    for name in ("waits for E", "waits for P", "prefills", "decodes"):
        end = rig.end(name)
        assert (end is None) == (name in goes_on), name
        if end is not None:
            assert (end.error.status, end.error.code, end.error.retry_after_s) == (503, "stage_lost", None)
            assert rig.side.census.lost.stage.value in end.error.message and "/models" not in end.error.message
    rig.submitted()
    assert {name for name in rig.cancelled if "~" not in name} >= {"waits for E"} - set(goes_on)
    with pytest.raises(Unavailable, match="none can be started again"):
        rig.submit("later")


def test_the_last_words_of_a_running_instance_are_no_failed_start():
    rig = Rig("P0", "D0")
    rig.side.census.failed(*rig.who("P0"), DAMAGED, rig.now)
    rig.die("P0")
    rig.side.census.failed(*rig.who("P0"), DAMAGED, rig.now)
    rig.wait(2.0)
    assert rig.side.census.lost is None and rig.side.census.restarts.trouble("P0") == ""
    rig.side.census.failed("P0", rig.incarnation["P0"] + 1, DAMAGED, rig.now)
    assert DAMAGED.message in rig.side.census.restarts.trouble("P0")


def test_a_cancelled_request_without_an_instance_ends_at_once_and_for_good():
    rig = Rig("P0", "D0")
    rig.submit()
    rig.die("P0")
    rig.side.lives.cancel(["r", "unknown"], rig.now)
    assert rig.end().finish_reason == "abort"
    rig.hello("P0")
    rig.wait(5.0)
    assert rig.submitted() == []
