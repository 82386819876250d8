"""What a plan says in words, for each way that a search can end."""

import io

import msgspec
import pytest
from rich.console import Console

from hydrainfer.planner.search import DevicePrice, Row
from hydrainfer.reports.plan.page import plan_page
from hydrainfer.reports.plan.prices import hourly
from hydrainfer.reports.plan.tables import answer, carried, conclusions, interval, others, ranked
from tests.reports.plans import EPD, LIMIT, SPLIT, WHY, below, failed, plan, row, whole

pytestmark = pytest.mark.unit


def said(*rows, **more):
    return " ".join(answer(plan(*rows, **more)))


def test_splitting_wins_beyond_the_intervals():
    text = said(SPLIT, EPD)
    assert text.startswith("1E7PD carries most within the SLO: 90 requests/s (95 %: 88 to 95), 80 % more than 8EPD")
    assert "beyond both intervals" in text and "Do not split" not in text
    assert f"Why 1E7PD carries no more: {WHY}." in text


def test_the_runner_up_is_named_and_judged():
    text = said(SPLIT, row("2E6PD", "E+PD", 80.0, 78.0, 86.0), EPD)
    assert "Next comes 2E6PD: 80 requests/s (95 %: 78 to 86); that it carries less is decided." in text
    text = said(SPLIT, row("2E6PD", "E+PD", 89.0, 85.0, 94.0), EPD)
    assert "which carries more is not decided, so try both" in text
    text = said(EPD, row("1E7PD", "E+PD", 40.0, 38.0, 60.0))
    assert "best split layout is 1E7PD: 40 requests/s (95 %: 38 to 60); which carries more is not decided" in text
    assert "Next comes" not in said(SPLIT, EPD)


def test_splitting_wins_but_the_intervals_overlap():
    unsure = row("1E7PD", "E+PD", 60.0, 0.0, 70.0)
    text = said(unsure, EPD)
    assert "20 % more than 8EPD" in text and "500 requests do not prove it" in text and "--requests" in text
    assert "95 %: below 70" in text, "no rate was sure, so there is no lower end"
    assert "beyond" not in text


def test_do_not_split_where_epd_only_is_best():
    text = said(EPD, row("1E7PD", "E+PD", 40.0, 38.0, 44.0))
    assert text.startswith("Do not split: 8EPD carries most") and "best split layout is 1E7PD: 40 requests/s" in text
    text = said(EPD, below("1E7PD", "E+PD", 47.0))
    assert "Do not split: no other layout carries 47 requests/s" in text


@pytest.mark.parametrize(("goodput", "low"), [(51.0, 0.0), (54.0, 49.0)])
def test_do_not_split_where_epd_only_is_within_the_interval(goodput, low):
    text = said(row("1E7PD", "E+PD", goodput, low, 60.0), EPD)
    assert (
        text.startswith("Do not split")
        and "8EPD carries 50 without splitting" in text
        and "Why 8EPD carries no more" in text
    )


def test_epd_only_was_not_measured_to_the_end():
    text = said(SPLIT, below("8EPD", "EPD", 60.0))
    assert "at least 50 % more than 8EPD, which carries less than 60" in text
    assert "where 8EPD carries next to nothing" in said(SPLIT, below("8EPD", "EPD", 0.01))
    assert "9.0 times as much as 8EPD" in said(SPLIT, below("8EPD", "EPD", 10.0))


def test_without_epd_only_nothing_is_said_of_it():
    assert said(SPLIT).startswith("1E7PD carries most") and "EPD" not in said(SPLIT)


def test_nothing_meets_the_slo():
    tried = Row(layout="8EPD", method="EPD", stage="encode", limited_by="TTFT in encode", attempts=(failed(3.0, 42),))
    text = said(tried, below("1E7PD", "E+PD", 40.0, attempts=(failed(5.0, 2, 30, stopped=True),)))
    assert text.startswith("Nothing meets the SLO (TTFT ≤ 250 ms") and "encode makes it impossible" in text
    assert "best attainable is 8EPD at 3 requests/s, where 42.0 % meet it (TTFT p90 400 ms, TPOT p90 20 ms)" in text


def test_a_rate_that_runs_cannot_decide_is_not_denied():
    text = said(below("8EPD", "EPD", 40.0, attempts=(failed(20.0, 100),)), objective="devices", rate=20.0)
    assert text.startswith("No layout certainly meets the SLO") and "at 20 requests/s: runs of up to 100" in text


def test_a_bound_is_not_blamed_for_the_slo():
    text = said(below("1E7PD", "E+PD", 40.0, attempts=(failed(5.0, 2, 30, stopped=True),)))
    assert "Nothing meets" in text and "impossible" not in text
    text = said(below("1E7PD", "E+PD", 40.0), objective="ttft", rate=100.0)
    assert "at 100 requests/s: prefill does not allow for it; at most 40 requests/s can last" in text
    assert answer(plan())


def test_fewest_devices():
    best, epd = row("1E1PD", "E+PD", 20.0, 20.0, 25.0), row("2EPD", "EPD", 20.0, 20.0, 25.0)
    asked = {"objective": "devices", "rate": 20.0, "devices": 2}
    assert said(best, below("2EPD", "EPD", 18.0), **asked).startswith("2 devices carry 20 requests/s within the SLO,")
    assert "no fewer do for certain: as 1E1PD (93.0 % of" in said(best, epd, **asked)
    assert "You need not split: 2EPD carries it as well" in said(best, epd, **asked)
    assert "2EPD does not carry that rate" in said(best, below("2EPD", "EPD", 18.0), **asked)
    assert "whether 2EPD carries that rate is undecided" in said(best, below("2EPD", "EPD", 25.0), **asked)
    assert "Do not split" in said(epd, best, **asked)
    one = said(row("1EPD", "EPD", 20.0, 20.0, 25.0), **asked | {"devices": 1})
    assert one == "1 device carries 20 requests/s within the SLO: as 1EPD (93.0 % of the requests meet it)."


@pytest.mark.parametrize("name", ["ttft", "tpot"])
def test_least_latency(name):
    def at(layout, method, seconds):
        return Row(layout=layout, method=method, goodput=20.0, **{f"{name}_p90": seconds}, attainment=0.99)

    asked, split = {"objective": name, "rate": 20.0}, at("1E7PD", "E+PD", 0.08)
    text = said(split, at("8EPD", "EPD", 0.16), **asked)
    assert f"1E7PD has the least {name.upper()} p90 at 20 requests/s: 80 ms, 50 % less than 8EPD (160 ms)" in text
    assert said(split, at("8EPD", "EPD", 0.0801), **asked).startswith("Do not split: 8EPD has")
    assert said(at("8EPD", "EPD", 0.07), split, **asked).startswith("Do not split: 8EPD has the least")
    assert "8EPD does not carry that rate" in said(split, below("8EPD", "EPD", 18.0), **asked)


def test_layouts_that_are_not_in_the_table_are_one_line():
    assert others(whole()) == "139 others: less than 40 requests/s for certain."
    assert others(whole(), 1).startswith("1 more was measured (50 to 50 requests/s); 139 others")
    assert others(plan(SPLIT, EPD)) == ""
    rows = (SPLIT, below("8EPD", "EPD", 18.0), below("7EPD+1D", "EPD", 25.0))
    assert others(plan(*rows, objective="ttft", rate=20.0)) == (
        "1 others do not carry 20 requests/s within the SLO; 1 undecided at 20 requests/s: repeat it with more "
        "--requests."
    )
    lines = conclusions(whole())
    assert lines[0].startswith("1E7PD carries most") and lines[-1] == whole().notes[0]


def test_layouts_that_may_carry_more_than_the_choice_are_counted_apart():
    """The search compared them with the best of that moment, which later runs found to carry less."""
    able = [below(name, "E+PD", high, limit="failed") for name, high in (("2E6PD", 104.0), ("3E5PD", 97.0))]
    less = [below("4E4PD", "E+PD", 80.0, limit="failed"), below("5E3PD", "E+PD", 60.0, limit="bound")]
    text = others(plan(SPLIT, EPD, *able, *less))
    assert text == (
        "2 layouts were not measured to the end and may carry up to 104 requests/s; 2 others: less than 80 requests/s, "
        "1 of them by one short run each."
    )
    assert others(plan(SPLIT, EPD, *less[1:])) == "1 others: less than 60 requests/s for certain."
    assert "may carry up to 97 requests/s" in others(plan(EPD, able[1]), 3)
    assert "may carry" not in others(plan(*able, *less)), "there is no choice that they could exceed"
    assert "less than that for certain" not in plan_page(plan(SPLIT, EPD, *able))


def test_the_table_has_what_was_measured():
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(ranked(whole(), 12))
    text = console.export_text()
    assert "1E7PD" in text and "88 to 95" in text and LIMIT in text and "2E6PD" not in text
    assert interval(below("8EPD", "EPD", 18.0)) == "–"


def test_the_plan_chooses_what_its_answer_recommends():
    unsure = plan(row("1E7PD", "E+PD", 54.0, 49.0, 60.0), EPD)
    assert plan(SPLIT, EPD).choice is SPLIT
    assert unsure.choice is EPD and "Do not split" in answer(unsure)[0]
    assert plan(SPLIT, EPD, objective="devices", rate=40.0).choice is EPD, "it need not be split"
    assert plan(below("1E7PD", "E+PD", 5.0)).choice is None


def test_runs_for_real_are_told():
    (line,) = [x for x in conclusions(whole()) if x.startswith("Run for real")]
    assert "At 70 requests/s 91.0 % met the SLO (predicted 97.0 %)" in line
    assert "p90 250 ms (predicted 200)" in line


PRICES = (DevicePrice(device="h800", n=8, per_hour=2.5),)


def test_the_answer_says_what_requests_cost_and_how_that_comes_about():
    """20 an hour ÷ (90/s × 3,600 s) × 1,000 = 0.0617; ÷ 31 tokens = 1.99 a million."""
    cost = 20.0 / (90.0 * 3600.0)
    best = msgspec.structs.replace(SPLIT, request_cost=cost, million_cost=cost / 31.0 * 1e6, request_wh=5600 / 324e3)
    lines = conclusions(plan(best, EPD, price=20.0, prices=PRICES, watts=5600.0))
    assert "Price of 1E7PD's devices: 8 h800 × 2.5 an hour each = 20 an hour, in the currency of --price." in lines
    text = " ".join(lines)
    assert "1,000 requests cost 0.0617: 20 an hour ÷ (90 requests/s × 3,600 s) × 1,000, with every device paid" in text
    assert "1,000,000 answer tokens cost 1.99: 0.0617 ÷ (1,000 × 31 answer tokens of a request) × 1,000,000." in text
    assert (
        "1,000 requests take 0.0173 kWh: 5.6 kW, every board at its limit and hosts not counted, ÷ (90 requests/s"
        in text
    )
    assert "cost" not in " ".join(conclusions(plan(SPLIT, EPD)))


def test_the_price_of_unlike_devices_is_a_sum():
    prices = (DevicePrice(device="h20", n=4, per_hour=1.2), DevicePrice(device="h800", n=4, per_hour=2.5))
    assert hourly(prices, 14.8) == "4 h20 × 1.2 + 4 h800 × 2.5 an hour each = 14.8 an hour"


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [(70.0, 90.0, " (70 to 90 for certain)"), (None, 90.0, " (below 90 for certain)"), (None, None, "")],
)
def test_a_run_for_real_says_what_was_carried(low, high, words):
    live = msgspec.structs.replace(whole().live[0], goodput_low=low, goodput_high=high)
    assert carried(live, None) == f"Run for real, 1E7PD carries 81 requests/s{words}, predicted 90."
    assert carried(live, 0.2).endswith("That is within the stated model error.")
    assert "That is NOT within" in carried(live, 0.1)
    unsure = msgspec.structs.replace(live, goodput=(90.0, 0.0))
    assert "too short to tell" in carried(unsure, 0.2)
    assert "That is NOT within" in carried(msgspec.structs.replace(unsure, goodput_high=60.0), 0.2)
    beside = carried(msgspec.structs.replace(live, planned=120.0), None)
    assert beside.endswith("predicted 90 with this client on the same cores (120 without).")
