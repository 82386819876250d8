import itertools
import statistics

import pytest

from hydrainfer.core import ConfigError
from hydrainfer.workload.sources import Closed, Constant, Poisson, due_times_s

pytestmark = pytest.mark.unit


def gaps(times):
    return [b - a for a, b in itertools.pairwise(times)]


def test_constant_gaps_are_equal():
    times = due_times_s(Constant(8.0), 17, seed=3)
    assert times[0] == 0.0 and times[-1] == 2.0
    assert all(g == pytest.approx(0.125) for g in gaps(times))


def test_poisson_gaps_are_exponential():
    drawn = gaps(due_times_s(Poisson(5.0), 20_001, seed=1))
    mean = statistics.fmean(drawn)
    assert mean == pytest.approx(0.2, rel=0.03)
    assert statistics.pstdev(drawn) == pytest.approx(mean, rel=0.05)  # an exponential's standard deviation is its mean
    assert sum(g > 0.2 for g in drawn) / len(drawn) == pytest.approx(0.3679, abs=0.02)  # 1 / e


def test_seed_decides():
    assert due_times_s(Poisson(5.0), 50, seed=7) == due_times_s(Poisson(5.0), 50, seed=7)
    assert due_times_s(Poisson(5.0), 50, seed=7) != due_times_s(Poisson(5.0), 50, seed=8)


@pytest.mark.parametrize("kind", [Poisson, Constant])
@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_rates_are_refused(kind, rate):
    with pytest.raises(ConfigError, match="positive"):
        kind(rate)


def test_no_clients_are_refused():
    with pytest.raises(ConfigError, match="at least 1"):
        Closed(0)
