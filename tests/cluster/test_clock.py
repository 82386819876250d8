"""The hub's clock as another machine hears it."""

import pytest

from hydrainfer.cluster.node import HubClock

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("uptime_s", [10.0, 1e6])
def test_a_machine_that_has_been_up_for_longer_or_shorter(uptime_s):
    local = [uptime_s]
    clock = HubClock(lambda: local[0], same=False)
    clock()
    assert not clock.known
    clock.hear(5000.0)
    assert clock.known and clock() == pytest.approx(5000.0)
    local[0] += 3.0
    assert clock() == pytest.approx(5003.0)


def test_the_least_delayed_message_tells_the_shift_and_time_never_runs_backwards():
    local = [100.0]
    clock = HubClock(lambda: local[0], same=False)
    seen = []
    for hub_s, travel_s in [(1000.0, 0.5), (1001.0, 0.001), (1002.0, 0.3), (1003.0, 0.002)]:
        local[0] = hub_s - 900.0 + travel_s
        clock.hear(hub_s)
        seen.append(clock())
    assert seen == sorted(seen)
    assert clock() == pytest.approx(local[0] + 900.0, abs=0.005)


def test_the_hub_clock_is_the_local_clock_on_one_machine():
    clock = HubClock(lambda: 7.0, same=True)
    clock.hear(6.9)
    assert clock.known and clock() == 7.0
