"""Layouts over SLOs, and ratios at one load."""

import msgspec
import pytest

from hydrainfer.config import Slo
from hydrainfer.planner.search.grid import chosen, grid_of
from hydrainfer.planner.search.layouts import layouts, method_of
from hydrainfer.planner.search.plan import Row
from hydrainfer.planner.search.ratios import rate_for_ratios, ratios_of
from tests.planner.search.test_search import study

pytestmark = pytest.mark.unit


def test_a_cell_per_pair_of_limits():
    cells = grid_of(
        lambda slo: study(slo, 60), layouts(2), Slo(ttft_s=1.0, tpot_s=0.1), [1e-4, 0.5], [0.1], n_processes=1
    )
    assert [(c.ttft_s, c.tpot_s) for c in cells] == [(1e-4, 0.1), (0.5, 0.1)]
    assert cells[0].layout == cells[0].method == "" and cells[0].goodput == 0.0
    assert cells[1].goodput >= cells[1].goodput_epd > 0.0 and cells[1].method


def test_a_looser_limit_carries_no_less():
    """The runs are the same, and so are the budgets."""
    s = study(Slo(ttft_s=1.0), 60)
    ttfts = [0.6, 0.15, 0.3]
    cells = grid_of(
        lambda slo: msgspec.structs.replace(s, slo=slo), layouts(2), Slo(ttft_s=1.0, tpot_s=0.1), ttfts, [0.1],
        n_processes=1,
    )  # fmt: skip
    assert [c.ttft_s for c in cells] == ttfts
    last, first, middle = (c.goodput for c in cells)
    assert 0.0 < first <= middle <= last


def test_three_of_each_method_are_tried():
    some = chosen(study(Slo(ttft_s=1.0)), layouts(8))
    assert len({method_of(x) for x in some}) == 9 and len(some) == 25


def test_every_ratio_at_one_rate():
    found = ratios_of(study(Slo(ttft_s=1.0), 40), 3, 5.0, n_processes=1)
    assert [r.layout for r in found] == ["3EPD", "1EP2D", "2EP1D", "1ED2P", "2ED1P", "1E2PD", "2E1PD"]
    assert all(r.rate == 5.0 and r.ttft_p90 and 0.0 <= r.attainment <= 1.0 for r in found)


def test_the_rate_of_ratios_is_what_epd_just_carries():
    epd, split = (Row(layout=x, method=m, goodput=g) for x, m, g in (("2EPD", "EPD", 5.0), ("1E1PD", "E+PD", 10.0)))
    assert rate_for_ratios([split, epd]) == 5.0
    assert rate_for_ratios([split, msgspec.structs.replace(epd, goodput=None)]) == 8.0
    assert rate_for_ratios([]) is None
