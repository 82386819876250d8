"""What the throughput model gives of Prefill-as-a-Service (all of it: `python -m benchmarks.prfaas`)."""

import json

import pytest

from benchmarks.prfaas import fig5a, fig5b, price, table3, table6
from benchmarks.prfaas.report import row, write_readme

pytestmark = pytest.mark.unit


def verdicts(part):
    return {cell["cell"]: cell["verdict"] for cell in part.compute()["rows"]}


def test_every_cell_of_table_6_holds_that_the_model_was_not_fitted_to():
    found = verdicts(table6)
    assert set(found.values()) == {"holds", "calibrated"}
    assert sum(verdict == "calibrated" for verdict in found.values()) == 5


def test_a_queue_carries_less_than_the_equations_promise_and_the_ratios_stand():
    ours, queue = table6.rates("mean_length"), table6.rates("mean_time")
    for name in ("rate", "homogeneous_rate", "naive_rate"):
        assert 0.95 < queue[name] / ours[name] < 0.99
    assert queue["ratio"] == pytest.approx(1.54, rel=0.02) and queue["naive_ratio"] == pytest.approx(1.16, rel=0.02)


def test_egress_of_large_clusters_is_within_three_percent():
    found = verdicts(table3)
    assert {verdict for cell, verdict in found.items() if "without" not in cell} == {"holds"}


def test_the_split_peaks_at_3_p_and_5_d():
    assert verdicts(fig5a)["P at the peak, of 8"] == "holds"


def test_the_prefill_stages_cross_between_19_4k_and_19_8k():
    assert 19_400 <= fig5b.crossing("mean_length") <= 19_800


def test_the_gain_at_equal_cost_ends_at_0_4_cent_per_gb():
    found = price.costs("mean_length")
    assert found["break_even"] == pytest.approx(0.40, abs=0.02)
    assert found["break_even_fixed"] == pytest.approx(0.40, abs=0.02)


def test_the_equations_miss_the_gain_at_equal_cost_and_a_queue_misses_it_on_the_other_side():
    """The paper has 15 %, from its own rounded rates."""
    assert price.costs("mean_length")["gain_at_equal_cost"] == pytest.approx(1.136, abs=0.002)
    assert price.costs("mean_time")["gain_at_equal_cost"] == pytest.approx(1.165, abs=0.002)


def test_a_cell_beyond_its_tolerance_says_so():
    assert row("cell", 100.0, 104.0)["verdict"] == "holds"
    assert "does not hold" in row("cell", 100.0, 106.0)["verdict"]
    assert row("cell", None, 1.0)["verdict"] == "not in the paper"


def test_the_page_shows_each_cell_with_its_ratio(tmp_path):
    document = {"results": {"rows": [row("length, tokens", 27_000, 27_486, 27_000)]}, "revision": "abc"}
    (tmp_path / "table6.json").write_text(json.dumps(document))
    page = write_readme(tmp_path, {"table6": table6, "price": price}).read_text()
    assert "| length, tokens | 27,000 | 27,486 | 1.018 | 27,000 | 1.000 | holds |" in page
    assert price.TITLE not in page
