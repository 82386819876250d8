"""A table of prefill times and KV bytes, between and beyond its points."""

import numpy as np
import pytest

from hydrainfer.core import ConfigError
from hydrainfer.planner.clusters import Times, TimesPoint

pytestmark = pytest.mark.unit

TABLE = Times(points=(TimesPoint(1000, 1e8, 0.5), TimesPoint(4000, 2e8, 1.0), TimesPoint(16000, 6e8, 4.0)))


def test_a_point_has_the_values_that_were_measured():
    for point in TABLE.points:
        assert TABLE.prefill_s(point.tokens) == pytest.approx(point.prefill_s)
        assert TABLE.kv_bytes(point.tokens) == pytest.approx(point.kv_bytes)


def test_between_two_points_logarithms_are_linear():
    assert TABLE.prefill_s(2000) == pytest.approx((0.5 * 1.0) ** 0.5)
    assert TABLE.kv_bytes(8000) == pytest.approx((2e8 * 6e8) ** 0.5)


def test_beyond_the_points_the_nearest_line_goes_on_and_the_table_says_that_it_guesses():
    assert TABLE.prefill_s([500, 64000]) == pytest.approx([0.5 / 2**0.5, 16.0])
    assert list(TABLE.covers([500, 1000, 16000, 64000])) == [False, True, True, False]


def test_equation_1_is_bytes_per_second_of_prefill():
    assert TABLE.kv_bytes_per_s([1000, 16000]) == pytest.approx([2e8, 1.5e8])


def test_a_table_can_be_the_samples_of_a_curve():
    table = Times.sampled(list(np.geomspace(100, 1e5, 200)), lambda n: 1e6 + 100 * n, lambda n: 0.1 + 1e-4 * n)
    assert table.prefill_s(7777) == pytest.approx(0.8777, rel=1e-3)
    assert table.kv_bytes(7777) == pytest.approx(1.7777e6, rel=1e-3)


@pytest.mark.parametrize(
    ("points", "part"),
    [
        ([(1000, 1e8, 0.5)], "at least 2"),
        ([(1000, 1e8, 0.5), (1000, 1e8, 0.6)], "must ascend"),
        ([(1000, 1e8, 0.5), (2000, 1e8, 0.0)], "must be positive"),
        ([(1000, 1e8, 0.5), (2000, float("nan"), 1.0)], "must be positive"),
    ],
)
def test_a_table_that_cannot_be_is_refused(points, part):
    with pytest.raises(ConfigError, match=part):
        Times(points=tuple(TimesPoint(*point) for point in points))
