"""Budgets of an instance, from options."""

import pytest

from hydrainfer.assemble.sizes import budgets_of
from hydrainfer.config import ServeConfig

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("slo", "gap_s", "wait_s"),
    [
        (None, 0.0, 0.0),
        ("a-file.yaml", 0.0, 0.0),
        ("ttft=1.0", 0.0, 0.0),
        ("tpot=0.02", 0.02, 0.4),
        ("ttft=3.0,tpot=0.02", 0.02, 0.4),
        ("ttft=0.6,tpot=0.02", 0.02, 0.2),
    ],
)
def test_slices_follow_the_limits_of_an_slo_if_it_has_any(slo, gap_s, wait_s):
    config = ServeConfig(model="", token_budget=64, image_budget=2, slo=slo)
    budgets = budgets_of(config, "slice")
    assert (budgets.gap_s, budgets.wait_s) == (gap_s, pytest.approx(wait_s))
    assert budgets_of(config, "off").gap_s is None
