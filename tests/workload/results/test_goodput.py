"""The search against servers whose goodput is known in closed form."""

import math
import random

import pytest

from hydrainfer.config import Slo
from hydrainfer.core import ConfigError
from hydrainfer.metrics import effective_n, wilson
from hydrainfer.workload.results import Search, next_rate

pytestmark = pytest.mark.unit


def mm1_met(rate, service_rate, limit_s, n, rng):
    """Of `n` requests of an M/M/1 queue in its steady state, how many are through within `limit_s`. Each is drawn by
    itself: the search is tested here, not the queue."""
    if rate >= service_rate:
        return 0
    return sum(rng.random() < 1 - math.exp(-(service_rate - rate) * limit_s) for _ in range(n))


@pytest.mark.parametrize("seed", range(8))
def test_mm1(seed):
    """P(T <= s) = 1 - exp(-(mu - lambda) s), so that 90 % are met up to lambda = mu - ln(10) / s."""
    rng, mu, limit_s = random.Random(seed), 10.0, 0.5
    analytic = mu - math.log(10) / limit_s
    search = Search(1.0, tolerance=0.03)
    n_runs = 0
    while (rate := search.next()) is not None:
        search.tell(rate, mm1_met(rate, mu, limit_s, 400, rng), 400)
        n_runs += 1
    found = search.result()
    assert found.low <= analytic <= found.high and found.low <= found.rate_per_s <= found.high
    assert found.rate_per_s == pytest.approx(analytic, rel=0.08)
    assert n_runs < 40 and not found.note


def test_a_clear_case_needs_one_run_a_rate():
    search, asked = Search(1.0, tolerance=0.1), []
    while (rate := search.next()) is not None:
        asked.append(rate)
        search.tell(rate, 100 if rate <= 5 else 0, 100)
    assert len(set(asked)) == len(asked)
    found = search.result()
    assert 4.5 < found.rate_per_s <= 5 < found.high <= found.rate_per_s * 1.1 and found.low == found.rate_per_s


def test_nothing_can_be_met():
    search = Search(1.0)
    while (rate := search.next()) is not None:
        search.tell(rate, 0, 50)
    found = search.result()
    assert found.rate_per_s == 0 and "not reached at any rate" in found.note and found.low is None


def test_everything_is_met():
    search = Search(1.0, max_rate=20)
    while (rate := search.next()) is not None:
        search.tell(rate, 50, 50)
    found = search.result()
    assert found.rate_per_s == 20 and "still reached at 20" in found.note and found.high is None


def test_a_client_that_cannot_keep_up_is_a_limit():
    search = Search(8.0)
    assert search.next() == 8
    search.tell(8, 50, 50)
    search.give_up_above(search.next(), "the client was late")
    rates = []
    while (rate := search.next()) is not None:
        rates.append(rate)
        search.tell(rate, 50, 50)
    found = search.result()
    assert all(8 < r < 16 for r in rates) and found.note == "the client was late" and 15 < found.rate_per_s < 16


def test_next_rate():
    assert next_rate([], 4, 2, 0.1) == 4
    assert next_rate([(4, True)], 4, 2, 0.1) == 8
    assert next_rate([(4, True), (8, False)], 4, 2, 0.1) == pytest.approx(32**0.5)
    assert next_rate([(4, False)], 4, 2, 0.1) == 2
    assert next_rate([(4, True), (4.2, False)], 4, 2, 0.1) is None
    assert next_rate([(4 / 64, False)], 4, 2, 0.1) is None


@pytest.mark.parametrize("wrong", [{"first": 0.0}, {"first": 1.0, "target": 0}, {"first": 1.0, "max_runs": 0}])
def test_impossible_searches_are_refused(wrong):
    with pytest.raises(ConfigError):
        Search(**wrong)


@pytest.mark.parametrize(
    ("k", "n", "low", "high"), [(90, 100, 0.8256, 0.9448), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0)]
)
def test_wilson(k, n, low, high):
    assert wilson(k / n, n) == pytest.approx((low, high), abs=1e-4)


def test_wilson_covers():
    rng, hits = random.Random(2), 0
    for _ in range(1000):
        low, high = wilson(sum(rng.random() < 0.9 for _ in range(150)) / 150, 150)
        hits += low <= 0.9 <= high
    assert hits >= 930


def test_requests_that_share_their_luck_count_less():
    rng = random.Random(3)
    alone = [rng.random() < 0.9 for _ in range(1200)]
    together = [x for _ in range(60) for x in [rng.random() < 0.9] * 20]
    assert 400 < effective_n(alone) <= 1200 and 20 < effective_n(together) < 150
    assert effective_n([True] * 100) == 100 and effective_n([True, False]) == 2 and effective_n([]) == 0


def test_no_limit_is_refused():
    with pytest.raises(ConfigError, match="at least one limit"):
        Slo()
