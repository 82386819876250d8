"""When one that died is tried again, and when a stage is given up."""

import itertools

import pytest

from hydrainfer.cluster import Restarts
from hydrainfer.core import CheckpointError, ConfigError, ErrorInfo, InternalError, Role, Stage

pytestmark = pytest.mark.unit
DAMAGED = ErrorInfo.of(CheckpointError("/models/x: weight file model.safetensors is missing"))
PASSING = [
    ErrorInfo.of(ConfigError("no memory for caches")),
    ErrorInfo.of(InternalError("P0 cannot start: OSError: 5")),
]
DARK = [Stage.PREFILL]


def restarts(*names, **options):
    return Restarts({name: Role.parse(name[:-1]) for name in names}, **options)


def attempts(made, name, error, n, now=0.0):
    """When each of `n` was made; all fail."""
    times = []
    while len(times) < n:
        if name in made.due(now) or not times:
            times.append(now)
            made.failed(name, error, now)
        now += 0.25
    return times


@pytest.mark.parametrize("error", PASSING)
def test_a_failure_that_may_pass_is_retried_with_longer_and_longer_pauses(error):
    made = restarts("E0", "P0", "D0")
    made.gone("P0", 0.0)
    assert made.lost(DARK, 0.0) is None and made.trouble("P0") == "" and made.due(99.0) == []
    times = attempts(made, "P0", error, 5)
    assert [b - a for a, b in itertools.pairwise(times)] == [1.0, 2.0, 4.0, 8.0]
    assert made.lost(DARK, times[-1]) is None and error.message in made.trouble("P0")
    (last,) = attempts(made, "P0", error, 1, now=times[-1] + 16.0)
    stage, why = made.lost(DARK, last)
    assert stage is Stage.PREFILL and error.message in why and "6 attempts" in why and "\n" not in why


def test_the_launcher_is_asked_about_one_that_is_silent_until_it_says_something():
    made, asked = restarts("P0", "D0"), []
    made.gone("P0", 0.0)
    made.gone("D0", 0.0, for_good=True)
    for now in range(40):
        if now == 21:
            made.failed("P0", PASSING[0], 21.0)
        if now == 37:
            made.back("P0")
        tried = made.due(now)
        assert tried == (["P0"] if now == 22 else [])
        asked += [now] * len(silent := made.silent(now))
        assert set(silent) <= {"P0"}
    assert asked == [5, 10, 15, 20, 27, 32]


def test_a_checkpoint_that_is_gone_is_given_up_at_once_if_nobody_else_runs_the_stage():
    made = restarts("P0", "EPD0", "D0")
    made.gone("P0", 0.0)
    made.failed("P0", DAMAGED, 1.0)
    assert made.lost([], 1.0) is None and made.lost(DARK, 1.0) is None, "EPD0 runs it, or may again"
    assert made.due(2.0) == ["P0"], "it is tried as long as the server lives"
    assert made.due(2.0) == [], "once per failure"
    made.gone("EPD0", 3.0)
    assert made.lost(DARK, 3.0) is None
    made.failed("EPD0", DAMAGED, 4.0)
    stage, why = made.lost(DARK, 4.0)
    assert stage is Stage.PREFILL and why.count("model.safetensors is missing") == 2


def test_pauses_end_growing():
    made = restarts("P0", "P1")
    times = attempts(made, "P0", DAMAGED, 12)
    assert times[-1] - times[-2] == 60.0


def test_an_instance_that_came_back_has_no_failures_any_more():
    made = restarts("P0")
    attempts(made, "P0", PASSING[0], 5)
    made.back("P0")
    assert made.trouble("P0") == "" and made.due(99.0) == []
    made.gone("P0", 100.0)
    assert attempts(made, "P0", PASSING[0], 2, now=101.0) == [101.0, 102.0]
    assert made.lost(DARK, 102.0) is None


@pytest.mark.parametrize(
    ("options", "gone", "at", "says"),
    [
        ({}, {"for_good": True}, 0.0, "P0 has died, and nothing starts it again"),
        ({"timeout_s": 600.0}, {}, 601.0, "P0 has died and is not back after 600 s"),
    ],
)
def test_an_instance_that_stays_away_makes_its_stage_lost_with_the_reason(options, gone, at, says):
    made = restarts("E0", "P0", "D0", **options)
    made.gone("P0", 0.0, **gone)
    assert made.lost(DARK, at) == (Stage.PREFILL, f"no instance can prefill any more: {says}")
    assert made.lost(DARK, at - 2.0) is None or "for_good" in gone
