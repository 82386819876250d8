"""The page opens from a disk, has everything in it, and says names as they are."""

import re
from html.parser import HTMLParser

import msgspec
import pytest

from hydrainfer.planner.search import layouts
from hydrainfer.reports.drawing import COLOURS
from hydrainfer.reports.plan.figures import HUES, bars, by_ratio, gain_of, latency_axis, shown_rows
from hydrainfer.reports.plan.opening import in_words
from hydrainfer.reports.plan.page import plan_page, workload_lines
from tests.browser import chromium
from tests.reports.plans import EPD, below, plan, row, whole

pytestmark = pytest.mark.unit
EMPTY = ("meta", "br", "input", "line", "path", "rect", "circle", "polyline")


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


def test_the_page_loads_nothing_and_is_well_formed():
    page = plan_page(whole())
    assert not re.search(r"https?:|//[a-z]|@import|url\(|\bsrc=|<link", page)
    parser = Closed()
    parser.feed(page)
    assert not parser.open


def test_all_layouts_are_in_it():
    page = plan_page(whole())
    cells = re.findall(r"<tr><td>([^<]*)</td>", page)
    assert {str(x) for x in layouts(8)} <= set(cells)


def test_the_page_says_what_was_planned_for():
    page = plan_page(whole())
    for text in ("1E7PD carries most", "seed 7", "hydrainfer 0.1.0", "textcaps", "not measured", "hydrainfer profile"):
        assert text in page
    for heading in (
        "Goodput by layout",
        "Latency by ratio, at 50",
        "best layout by SLO",
        "Predicted and measured",
        "What if",
    ):
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


def test_bars_are_of_what_was_measured_in_the_order_of_the_table():
    assert [r.layout for r in shown_rows(whole())] == ["1E7PD", "8EPD"]
    many = [row(f"{i}E7PD", "E+PD", 90.0 - i, 50.0, 95.0) for i in range(40)]
    assert [r.layout for r in shown_rows(plan(*many, EPD))] == [r.layout for r in (*many[:10], EPD)]
    assert [r.layout for r in shown_rows(plan(below("8EPD", "EPD", 40.0)))] == ["8EPD"]
    assert "less than 40" in bars(shown_rows(plan(below("8EPD", "EPD", 40.0))))


def test_the_page_has_regret_curves_and_use():
    page = plan_page(whole())
    assert "−44 %" in page and "SLO attainment against the rate" in page and "1E7PD: 88/s, 92 %" in page
    assert "1E7PD at 90 requests/s" in page and "kv 50.0 % (75.0 %) of 40 GiB" in page and "80 %" in page


def test_the_page_can_be_read_in_the_dark_and_on_a_phone():
    page = plan_page(whole())
    assert "prefers-color-scheme:dark" in page and "max-width:760px" in page
    hues = set(re.findall(r"(?:fill|stroke|background|color)[:=]\"?(#[0-9a-f]{3,6})", page))
    assert hues <= {*HUES.values(), *COLOURS, "#fff", "#1c2024"}, "all else is said by variables"


def test_what_if_has_the_cells_that_were_simulated():
    page = plan_page(msgspec.structs.replace(whole(), price=16.0))
    (data,) = re.findall(r"const d=(\{.*?\}),e=", page)
    found = msgspec.json.decode(data)
    assert [t["said"] for t in found["ttft"]] == ["100 ms", "8000 ms"] and found["price"] == 16.0
    assert {c["goodput"] for c in found["cells"]} == {30.0, 60.0, 0.0}
    assert all(c["epd_layout"] == "8EPD" for c in found["cells"])
    assert '"hardware":"8 x TP2 of \\u003cb>"' in plan_page(msgspec.structs.replace(whole(), device="TP2 of <b>"))
    assert "What if" not in plan_page(msgspec.structs.replace(whole(), grid=()))


def test_latencies_far_beyond_the_slo_are_cut_off():
    from hydrainfer.reports.plan.figures import Curve

    axis = latency_axis([Curve("E+PD", ["1E1PD"], [10.0]), Curve("EPD", ["2EPD"], [90_000.0])], "ttft", whole().slo)
    assert axis.log and 10.0 / 2 < axis.least < 10.0 and 5_000 < axis.most < 10_000 and axis.limit == 250.0
    figure = by_ratio(whole(), "ttft")
    assert figure.count("<circle") == 7 and "3E5PD" in figure and "5:3" in figure


def test_gains():
    cells = whole().grid
    assert [gain_of(c) for c in cells[:2]] == ["+50 % over EPD", "do not split"]
    assert gain_of(msgspec.structs.replace(cells[0], goodput_epd=0.0)) == "EPD only: nothing"
    assert gain_of(msgspec.structs.replace(cells[0], goodput_epd=5.0)) == "6.0 x EPD"


def test_a_mean_and_its_percentile_are_one_line():
    lines = dict(workload_lines({"dataset": "textcaps", "output_mean": 31.04, "output_p90": 48.0, "requests": 500.0}))
    assert lines == {"dataset": "textcaps", "output tokens, mean": "31.04, p90 48", "requests": "500"}


def test_budgets_of_seconds_are_rounded():
    page = plan_page(msgspec.structs.replace(whole(), budgets={"EPD": {"tokens": 20480, "wait_s": 2 / 3}}))
    assert "0.667" in page and "0.66666" not in page and ">20480<" in page


CUT_OFF = "[...document.querySelectorAll('.scroll,.all')].filter(x => x.scrollWidth > x.clientWidth).length"


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1060, 1280])
def test_the_page_fits_a_window(tmp_path, width):
    """A narrow one scrolls its tables, and nothing else."""
    (tmp_path / "report.html").write_text(plan_page(whole()), "utf-8")
    with chromium() as browser:
        page = browser.new_page(viewport={"width": width, "height": 900})
        page.goto(f"file://{tmp_path}/report.html")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert width < 760 or page.evaluate(CUT_OFF) == 0


CONTRAST = """
() => {
  const parts = c => (c.match(/[0-9.]+/g) || []).map(Number);
  const over = (top, under) => {
    const a = top.length > 3 ? top[3] : 1;
    return under.map((u, i) => a * top[i] + (1 - a) * u);
  };
  const light = c => { const [r, g, b] = c.map(x => (x /= 255) <= .04045 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b };
  const ratio = (a, b) => {
    const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
    return (x + .05) / (y + .05);
  };
  const behind = e => {
    const found = [];
    for (let n = e; n; n = n.parentElement) found.unshift(parts(getComputedStyle(n).backgroundColor));
    return found.filter(c => c.length == 3 || c[3] > 0).reduce((under, c) => over(c, under), paper);
  };
  const paper = matchMedia('(prefers-color-scheme:dark)').matches ? [0, 0, 0] : [255, 255, 255];
  const low = [];
  document.querySelector('details').open = true;
  for (const e of document.querySelectorAll('body *')) {
    if (e.closest('script,title,style') || !e.getClientRects().length) continue;
    if (![...e.childNodes].some(n => n.nodeType == 3 && n.textContent.trim())) continue;
    const style = getComputedStyle(e);
    let ground = behind(e.closest('svg') ? e.closest('svg').parentElement : e);
    let ink = style.color;
    if (e.tagName == 'text') {
      ink = style.fill;
      const box = e.getBBox(), x = box.x + box.width / 2, y = box.y + box.height / 2;
      for (const r of e.closest('svg').querySelectorAll('rect')) {
        const b = r.getBBox(), s = getComputedStyle(r);
        if (b.x <= x && x <= b.x + b.width && b.y <= y && y <= b.y + b.height && !e.matches('.halo'))
          ground = over([...parts(s.fill).slice(0, 3), +s.fillOpacity], ground);
      }
    }
    const found = ratio(over(parts(ink), ground), ground);
    if (found < 4.5) low.push(`${e.textContent.trim().slice(0, 40)}: ${found.toFixed(2)}`);
  }
  return low;
}
"""


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_stands_out_from_what_is_behind_it(tmp_path, scheme):
    """A contrast of 4.5, as WCAG 2 asks for."""
    cells = tuple(
        msgspec.structs.replace(whole().grid[0], method=method, tpot_s=float(i)) for i, method in enumerate(HUES)
    )
    (tmp_path / "report.html").write_text(plan_page(msgspec.structs.replace(whole(), grid=cells)), "utf-8")
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme=scheme)
        page.goto(f"file://{tmp_path}/report.html")
        assert page.evaluate(CONTRAST) == []


def test_the_page_opens_with_the_choice_the_command_and_what_is_uncertain():
    launch = "hydrainfer serve MODEL --layout plan/layout.yaml"
    page = plan_page(msgspec.structs.replace(whole(), launch=launch, price=20.0))
    parts = (
        "1E7PD carries most",
        "1E7PD is 1 instance that encodes and 7 that prefill and decode.",
        "Why 1E7PD carries no more: prefill is busy",
        "To start it",
        launch,
        "What is uncertain",
        "Model error",
        "The device is described",
        "What the words mean",
        "Goodput by layout",
    )
    places = [page.index(part) for part in parts]
    assert places == sorted(places)
    assert "To start it" not in plan_page(whole())


def test_layouts_are_said_in_words():
    assert in_words("4EPD") == "4 instances that encode, prefill and decode"
    assert in_words("1E1P2D") == "1 instance that encodes, 1 that prefills and 2 that decode"
    assert in_words("1E@h20+7PD@h800") == "1 instance on h20 that encodes and 7 on h800 that prefill and decode"


def test_every_word_of_the_tables_is_explained():
    page = plan_page(whole())
    meanings = page[page.index("<dl>") : page.index("</dl>")]
    for word in ("SLO", "TTFT", "TPOT", "interval", "p90", "goodput", "95 %", "lane", "least possible", "1E3PD", "kv"):
        assert re.search(f"<dt>[^<]*{word}", meanings), word
