"""The page opens from a disk, has everything in it, and says names as they are."""

import re
from html.parser import HTMLParser

import msgspec
import pytest

from hydrainfer.planner.search import layouts
from hydrainfer.profiling.figures import by_ratio, gain_of, latency_axis, shown_rows
from hydrainfer.profiling.page import plan_page, plan_png, workload_lines
from tests.profiling.plans import EPD, SPLIT, below, plan, row, whole

pytestmark = pytest.mark.unit
EMPTY = ("meta", "br", "line", "path", "rect", "circle", "polyline")


class Closed(HTMLParser):
    """Every element ends where it should."""

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag in EMPTY:
            return
        while self.open[-1] in ("li", "p") and tag != self.open[-1]:
            self.open.pop()
        assert self.open.pop() == tag


def test_it_loads_nothing_and_is_well_formed():
    page = plan_page(whole())
    assert not re.search(r"https?:|//[a-z]|@import|url\(|\bsrc=|<link", page)
    parser = Closed()
    parser.feed(page)
    assert not parser.open


def test_all_layouts_are_in_it():
    page = plan_page(whole())
    cells = re.findall(r"<tr><td>([^<]*)</td>", page)
    assert {str(x) for x in layouts(8)} <= set(cells)


def test_it_says_what_was_planned_for():
    page = plan_page(whole())
    for text in ("1E+7PD carries most", "seed 7", "hydrainfer 0.1.0", "textcaps", "not measured", "hydrainfer profile"):
        assert text in page
    for heading in ("Goodput by layout", "Latency by ratio, at 50", "best layout by SLO", "Predicted and measured"):
        assert heading in page
    assert "+50 % over EPD" in page and "do not split" in page and "nothing meets it" in page
    assert "97.0 % / 91.0 %" in page and "200 / 250" in page and "-20 %" in page


def test_names_are_escaped():
    evil = "<script>alert(1)</script>"
    strange = msgspec.structs.replace(
        whole(), model=evil, device=evil, command=evil, notes=(evil,), workload={evil: evil}, budgets={evil: {evil: 1}}
    )
    strange = msgspec.structs.replace(strange, layouts=(row(evil, evil, 90.0, 80.0, 95.0), EPD))
    page = plan_page(strange)
    assert evil not in page and "&lt;script&gt;alert(1)" in page


def test_without_extras_and_without_an_answer():
    page = plan_page(plan(below("8EPD", "EPD", 40.0)))
    assert "Latency by ratio" not in page and "by SLO" not in page and "Predicted" not in page
    assert plan_page(plan())


def test_bars_have_the_best_of_each_method():
    rows = shown_rows(whole())
    assert [r.layout for r in rows[:2]] == ["1E+7PD", "8EPD"]
    assert len({r.method for r in rows}) == 9 and len(rows) == 12
    many = [row(f"{i}E+7PD", "E+PD", 90.0 - i, 50.0, 95.0) for i in range(40)]
    assert len(shown_rows(plan(*many, EPD))) == 31


def test_latencies_far_beyond_the_slo_are_cut_off():
    from hydrainfer.profiling.figures import Curve

    axis = latency_axis([Curve("E+PD", ["1E+1PD"], [10.0]), Curve("EPD", ["2EPD"], [90_000.0])], "ttft", whole().slo)
    assert axis.log and 10.0 / 2 < axis.least < 10.0 and 5_000 < axis.most < 10_000 and axis.limit == 250.0
    figure = by_ratio(whole(), "ttft")
    assert figure.count("<circle") == 7 and "3E+5PD" in figure and "5:3" in figure


def test_gains():
    cells = whole().grid
    assert [gain_of(c) for c in cells[:2]] == ["+50 % over EPD", "do not split"]
    assert gain_of(msgspec.structs.replace(cells[0], goodput_epd=0.0)) == "EPD only: nothing"
    assert gain_of(msgspec.structs.replace(cells[0], goodput_epd=5.0)) == "6.0 x EPD"


def test_a_mean_and_its_percentile_are_one_line():
    lines = dict(workload_lines({"dataset": "textcaps", "output_mean": 31.04, "output_p90": 48.0, "requests": 500.0}))
    assert lines == {"dataset": "textcaps", "output tokens, mean": "31.04, p90 48", "requests": "500"}


def test_a_picture_if_there_is_matplotlib(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    assert plan_png(whole(), tmp_path / "a.png") and (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert plan_png(plan(SPLIT), tmp_path / "b.png")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert not plan_png(whole(), tmp_path / "c.png") and not (tmp_path / "c.png").exists()
