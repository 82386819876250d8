"""Distributions of prompt lengths."""

import math
import statistics

import pytest

from hydrainfer.core import ConfigError
from hydrainfer.planner.clusters import Lengths, log_normal

pytestmark = pytest.mark.unit


def test_a_log_normal_that_is_hardly_truncated_has_the_textbook_mean_and_median():
    lengths = log_normal(7.0, 0.5, 1.0, 1e6)
    assert lengths.mean_tokens == pytest.approx(math.exp(7.0 + 0.125), rel=1e-5)
    assert lengths.quantile(0.5) == pytest.approx(math.exp(7.0), rel=1e-3)


def test_a_truncated_log_normal_has_the_mean_of_the_lengths_that_are_left():
    normal = statistics.NormalDist(9.9, 1.0)
    moved = statistics.NormalDist(10.9, 1.0)
    a, b = math.log(128), math.log(131072)
    mean = math.exp(10.4) * (moved.cdf(b) - moved.cdf(a)) / (normal.cdf(b) - normal.cdf(a))
    lengths = log_normal(9.9, 1.0, 128, 131072)
    assert lengths.mean_tokens == pytest.approx(mean, rel=1e-5)
    assert lengths.shares.sum() == pytest.approx(1.0)
    assert lengths.shortest >= 128 and lengths.longest <= 131072


def test_a_far_tail_keeps_its_shape():
    """Ten deviations above the median, a normal distribution has 1e-23 of its weight."""
    lengths = log_normal(0.0, 1.0, math.exp(10.0), math.exp(11.0))
    assert math.exp(10.0) < lengths.quantile(0.5) < math.exp(10.1)


def test_a_sample_counts_each_of_its_lengths_once():
    lengths = Lengths.of([3000, 1000, 1000, 5000])
    assert lengths.mean_tokens == 2500.0
    assert [lengths.quantile(q) for q in (0.25, 0.5, 0.75, 1.0)] == [1000, 1000, 3000, 5000]


def test_a_quantile_of_values_need_not_grow_with_length():
    lengths = Lengths.of([1, 2, 3, 4])
    assert lengths.quantile(0.75, 10.0 - lengths.tokens) == 8.0


@pytest.mark.parametrize("sample", [[], [0], [100, float("nan")]])
def test_a_sample_without_lengths_is_refused(sample):
    with pytest.raises(ConfigError):
        Lengths.of(sample)


@pytest.mark.parametrize("numbers", [(9.9, 0.0, 128, 1e5), (9.9, 1.0, 1e5, 128), (900.0, 1.0, 128, 1e5)])
def test_a_log_normal_that_cannot_be_is_refused(numbers):
    with pytest.raises(ConfigError):
        log_normal(*numbers)
