import random

import pytest

from hydrainfer.config import Slo
from hydrainfer.judging import Proportion, judge, quantile_interval

pytestmark = pytest.mark.unit

SLO = Slo(ttft_s=0.5, tpot_s=0.1)


@pytest.mark.parametrize(
    ("ttft_s", "intervals", "met"),
    [
        (0.5, [0.1] * 9 + [9.0], True),  # nine of ten are enough, and equal is within
        (0.5, [0.1] * 8 + [9.0] * 2, False),
        (0.51, [0.0] * 10, False),
        (0.1, [], True),  # a single token has no interval
        (None, [], False),
        (0.1, [9.0], False),
    ],
)
def test_judge(ttft_s, intervals, met):
    assert judge(SLO, ttft_s, intervals, 99.0).met is met


def test_limits_that_are_not_set_are_kept():
    assert judge(Slo(e2e_s=1.0), 9.0, [9.0], 1.0).met and not judge(Slo(e2e_s=1.0), 0.1, [], 1.1).met


def test_quantile_intervals_cover():
    rng, hits = random.Random(1), {0.5: 0, 0.9: 0}
    for _ in range(600):
        ordered = sorted(rng.random() for _ in range(120))
        for q in hits:
            low, high = quantile_interval(ordered, q)
            hits[q] += low <= q <= high
    assert min(hits.values()) >= 0.93 * 600


def test_small_samples_cannot_tell():
    assert quantile_interval([], 0.5) == (None, None) and quantile_interval([1.0], 0.5) == (None, None)
    low, high = quantile_interval([float(i) for i in range(100)], 0.99)
    assert low is not None and high is None


def test_proportion():
    assert Proportion.of(0, 0) == (0, 0, 0.0, 0.0, 1.0)
    assert Proportion.of(90, 100, 20).low < Proportion.of(90, 100).low
