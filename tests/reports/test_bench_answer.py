"""The first sentences of a benchmark name the winner, or say that it is not decided."""

import re

import msgspec
import pytest

from hydrainfer.config import Slo
from hydrainfer.judging import Goodput, Proportion
from hydrainfer.reports.bench import answer, conclusions, page_of
from hydrainfer.workload.results import BenchResult, Server
from hydrainfer.workload.sources import Workload

pytestmark = pytest.mark.unit
TALKS = Workload(dataset="talks", n_pictures=0)


def goodput(rate, low, high):
    return Goodput(rate_per_s=rate, low=low, high=high, target=0.9, curve=())


def result(goodputs, failed=(), **more):
    return BenchResult(
        title="A comparison",
        command="hydrainfer bench compare",
        date="2026-11-28",
        seeds=(0,),
        workload=TALKS,
        like="",
        slo=Slo(ttft_s=0.25, tpot_s=0.04),
        hardware={},
        versions={},
        servers=tuple(Server(name=n, failed="no server" if n in failed else "") for n in (*goodputs, *failed)),
        runs=(),
        goodput=goodputs,
        **more,
    )


def test_the_winner_is_named_with_its_lead_its_slo_and_that_it_is_decided():
    found = result({"8EPD": goodput(16.0, 14.0, 17.0), "4EP4D": goodput(20.0, 18.0, 22.0)})
    (sentence,) = answer(found)
    assert sentence == (
        "4EP4D carries most: 20 requests/s with 90 % of the requests within TTFT ≤ 250 ms, TPOT ≤ 40 ms for 90% of the "
        "intervals, 25 % more than 8EPD (16). That is decided: the 95 % intervals do not overlap (4EP4D 18 to 22; 8EPD "
        "14 to 17)."
    )


def test_overlapping_intervals_are_not_decided():
    found = result(
        {"8EPD": goodput(16.0, 15.0, 18.0), "1E7PD": goodput(8.0, 4.0, 12.0), "4EP4D": goodput(18.0, 16.0, 22.0)}
    )
    (sentence,) = answer(found)
    assert sentence.startswith("Not decided: 4EP4D carries most: 18 requests/s with 90 %")
    assert "12 % more than 8EPD (16), but the 95 % intervals overlap" in sentence
    assert sentence.endswith("; only 1E7PD surely less.")


def test_equals_are_not_decided():
    found = result({"a": goodput(16.0, 12.0, None), "b": goodput(16.0, 16.0, None), "c": goodput(12.0, 8.0, 16.0)})
    (sentence,) = answer(result({**found.goodput, "c": goodput(8.0, 6.0, 10.0)}))
    assert sentence.startswith("a and b carry most") and sentence.endswith("Among a and b nothing is.")
    (sentence,) = answer(found)
    assert sentence.startswith("Not decided: a and b carry most: 16 requests/s") and "33 % more than c (12)" in sentence
    assert (
        "all the same on the rates that were run"
        in answer(result({"a": found.goodput["a"], "b": found.goodput["b"]}))[0]
    )


def test_a_rate_that_nobody_else_carries_has_no_percentage():
    found = result({"a": goodput(0.25, 0.1, 0.4), "b": goodput(0.0, None, 0.4)})
    assert "where b carried none of the rates that were run" in answer(found)[0]
    nobody = result({"a": goodput(0.0, None, 0.4), "b": goodput(0.0, None, 0.4)})
    assert answer(nobody)[0].startswith("Not decided: none of a and b carries a rate that was run")


def test_what_speaks_against_it_comes_second():
    found = result({"a": goodput(8.0, 6.0, 9.0)}, failed=("vllm",), stopped="interrupted")
    first, second = answer(found)
    assert first.startswith("a has a goodput of 8 requests/s (95 %: 6 to 9), with 90 %")
    assert second == "Against it: vllm could not be measured; it was stopped before the end (interrupted)."
    assert answer(msgspec.structs.replace(found, goodput={}, stopped=""))[0] == "Nothing was measured."


def test_a_rate_whose_runs_were_too_short_is_not_beyond_what_was_tried():
    """The row of that rate reads 54 %, so that it was tried; but it is not certain that it is not carried."""
    curve = ((45.0, Proportion.of(450, 450)), (91.0, Proportion.of(245, 450, 4.0)))
    unsure = msgspec.structs.replace(goodput(60.0, 45.0, None), curve=curve)
    found = result({"a": unsure})
    words = "45 to an end that is not certain, as the runs at 91/s were too short to tell"
    assert f"(95 %: {words})" in answer(found)[0] and f"(95 %: {words})" in conclusions(found)[0]
    kept = msgspec.structs.replace(unsure, curve=curve[:1])
    assert "45 to beyond what was tried" in answer(result({"a": kept}))[0]
    known = msgspec.structs.replace(unsure, high=91.0)
    assert "(95 %: 45 to 91)" in answer(result({"a": known}))[0]


def test_the_page_opens_with_it():
    found = result({"8EPD": goodput(16.0, 14.0, 17.0), "<b>4EP4D": goodput(20.0, 18.0, 22.0)})
    page = page_of(found)
    first = re.search(r"<p class=sub>.*?</p>(.*?)<h2>", page, re.DOTALL)[1]
    assert first.startswith("<div class=answer><p>&lt;b&gt;4EP4D carries most: 20 requests/s")
    assert conclusions(found)[-1] == "8EPD carries 16 requests/s: clearly less."


def test_committed_pages_are_of_todays_code():
    from benchmarks.report_pages import pages

    made = pages()
    assert made
    for page, text in made.items():
        assert page.read_text() == text, f"{page} is old: python -m benchmarks.report_pages"
