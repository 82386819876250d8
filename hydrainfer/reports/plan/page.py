"""The report of a plan as one HTML page that needs no network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from hydrainfer.planner.search import LayoutPlan, Live, RoleUse, Row
from hydrainfer.reports.drawing import document, ms, percent, table
from hydrainfer.reports.plan import whatif
from hydrainfer.reports.plan.figures import (
    attainment,
    bars,
    by_ratio,
    colour_of,
    grid,
    legend_of,
    methods_of,
    shown_rows,
)
from hydrainfer.reports.plan.opening import STYLE as OPENING
from hydrainfer.reports.plan.opening import opening
from hydrainfer.reports.plan.prices import thousand
from hydrainfer.reports.plan.tables import interval, only_epd, others, regret, said, validations

_STYLE = """
th[role=button]{cursor:pointer;user-select:none}th[role=button]:hover{background:var(--tint)}.all td:first-child i,.all
td:nth-child(2) i{display:inline-block;width:9px;height:9px;border-radius:2px;margin-right:6px}
.all{max-height:640px;overflow:auto;border:1px solid var(--line);padding:0 10px}.all thead th{position:sticky;top:0;
background:var(--paper)}.all th{white-space:normal;vertical-align:bottom}.use td.n,.use th.n{white-space:normal}
.all table{font-size:12px}
.all td{white-space:nowrap}.all td:last-child{white-space:normal;min-width:150px}.all td,.all th{padding-right:7px}
.all .scroll{overflow:visible}
.plain thead{display:none}.empty{fill:var(--tint);stroke:var(--rule)}.phone{display:none}
.two{display:grid;grid-template-columns:minmax(0,5fr) minmax(0,6fr);gap:0 34px}
@media(max-width:760px){.two{grid-template-columns:minmax(0,1fr)}.desk{display:none}.phone{display:block}
.use td:last-child{min-width:96px}}
.all td:first-child{position:sticky;left:0;background:var(--paper)}
"""
_SORT = """
for(const t of document.querySelectorAll('.all table')){const b=t.tBodies[0];
[...t.tHead.rows[0].cells].forEach((h,i)=>{h.setAttribute('role','button');h.title='sort by this';let up=false;
h.onclick=()=>{up=!up;const v=r=>{const s=r.cells[i].textContent,n=parseFloat(s.replace(/[^0-9.]*/,''));
return h.className=='n'?(isNaN(n)?(up?1/0:-1/0):n):s};[...b.rows].sort((p,q)=>{const x=v(p),y=v(q);
return(x<y?-1:x>y?1:0)*(up?1:-1)}).forEach(r=>b.append(r))}})}
"""
_USE = ("role", "vision lane works", "language lane works", "requests at once", "weights, GiB", "caches: held (most)")
_HOW_FAR = {"pruned": "not at all", "screened": "a short trace", "final": "to the end"}
_BUDGETS = {
    "tokens": "the most tokens of prompts and answers in a batch",
    "images": "the most pictures in a vision batch",
    "image_tokens": "the most picture tokens in it",
    "running": "the most requests that may hold caches at once",
    "step_s": "how long a batch may take, in seconds",
    "enough_s": "a batch is large enough when it takes this long, in seconds",
    "gap_s": "how long a sequence may wait for its next token, in seconds",
    "wait_s": "how long pictures and prompts wait for a pause of decoding, in seconds",
}
_WORDS = {"text": "text tokens", "picture": "picture tokens", "prompt": "prompt tokens", "output": "output tokens"}


def plan_page(plan: LayoutPlan) -> str:
    """The report as a whole HTML document."""
    return document(
        title_of(plan), "".join(_sections(plan)) + f"<script>{_SORT}</script>", OPENING + _STYLE + whatif.STYLE
    )


def title_of(plan: LayoutPlan) -> str:
    return f"Which layout of {plan.hardware} serves {plan.model} best"


def _sections(plan: LayoutPlan) -> Iterator[str]:
    asked = {
        "goodput": "most requests per second",
        "devices": f"fewest devices for {said(plan.rate)} requests/s",
        "ttft": f"least TTFT p90 at {said(plan.rate)} requests/s",
        "tpot": f"least TPOT p90 at {said(plan.rate)} requests/s",
    }.get(plan.objective, plan.objective)
    facts = [
        plan.date.partition("T")[0],
        f"asked for: {asked}",
        f"SLO: {plan.slo}, for {plan.target * 100:g} % of the requests",
    ]
    yield f"<h1>{escape(title_of(plan))}</h1><p class=sub>{escape(' · '.join(f for f in facts if f))}</p>"
    yield from opening(plan)
    if plan.layouts:
        yield from _goodput(plan)
        yield from _at_work(plan)
    if plan.ratios:
        yield from _ratios(plan)
    if plan.grid:
        yield from whatif.what_if(plan)
        yield from _grid(plan)
    if plan.live:
        yield "<h2>Predicted and measured</h2>" + _live(plan.live)
        yield "".join(f"<p>{escape(line)}</p>" for line in validations(plan))
    yield f"<h2>All {len(plan.layouts)} layouts</h2>" + _layouts(plan)
    yield from _given(plan)


def _goodput(plan: LayoutPlan) -> Iterator[str]:
    rows = shown_rows(plan)
    epd = only_epd(plan)
    yield "<h2>Goodput by layout</h2>" + legend_of(methods_of(rows))
    yield f"<div class=desk>{bars(rows, epd)}</div><div class=phone>{bars(rows, epd, 430)}</div>"
    dashed = ""
    if epd is not None and epd.goodput:
        dashed = f" Dashed line: {epd.layout}, which splits nothing."
    pale = ""
    if _has_pale(rows):
        pale = " Pale: not measured to the end; an upper limit is all that is known."
    less = ""
    if len(rows) > 1 and rows[0].goodput:
        less = " At the right: how much less than the best."
    yield (
        f"<p class=sub>Requests per second within the SLO, and between which rates it lies (95 %): runs begin with "
        f"{plan.requests} requests. An arrow: the interval goes on.{less}"
    )
    yield f"{escape(dashed)}{pale} {escape(others(plan))}</p>"


def _at_work(plan: LayoutPlan) -> Iterator[str]:
    """Attainment against the rate, and the utilization of lanes and caches."""
    curves = attainment(plan)
    used = [_use(u) for u in plan.use]
    if not curves and not used:
        return
    if curves:
        yield (
            f"<h2>SLO attainment against the rate</h2><div class=pair><div>{curves}</div><p class=sub>Dashed: the "
            "share that has to meet the SLO. A rate above it may still not last: a queue that grows breaks the SLO "
            "only in a longer run.</p></div>"
        )
    if used:
        yield f"<h2>{escape(plan.layouts[0].layout)} at {said(plan.layouts[0].goodput)} requests/s</h2>"
        yield f"<div class=use>{_transposed(_USE, used)}</div>"
        yield (
            "<p class=sub>Shares of the time in which a lane works, in brackets the least possible for this work; "
            "requests that an instance runs, of the most that it may; shares of a cache that requests hold, and the "
            "most at any time.</p>"
        )


def _use(u: RoleUse) -> list[str]:
    caches = (
        f"{escape(name)} {percent(c.mean)} ({percent(c.most)}) of {c.n_bytes / (1 << 30):.3g} GiB"
        for name, c in u.caches.items()
    )
    lanes = [_works(u.vision, u.vision_least), _works(u.language, u.language_least)]
    running = "–"
    if u.places:
        running = f"{u.running:.3g} of {u.places}"
    return [f"{u.n}&nbsp;{escape(u.role)}", *lanes, running, f"{u.weight_bytes / (1 << 30):.3g}", "<br>".join(caches)]


def _transposed(names: Sequence[str], columns: Sequence[Sequence[str]], last: Sequence[str] = ()) -> str:
    """A table with a row for each of `names` and a column for each role, so that it fits a narrow window. A column
    begins with its role; `last`: a column of text at the end."""
    head = [names[0], *(column[0] for column in columns)]
    rows = [[name, *(column[i] for column in columns)] for i, name in enumerate(names)][1:]
    if last:
        head = [*head, ""]
        rows = [[*row, text] for row, text in zip(rows, last)]
    return table(head, rows, n_left=1, n_last=bool(last))


def _works(share: float | None, least: float) -> str:
    if share is None:
        return "–"
    return f"{share * 100:.0f} % ({least * 100:.0f} %)"


def _has_pale(rows: Sequence[Row]) -> bool:
    return any(not row.goodput for row in rows)


def _ratios(plan: LayoutPlan) -> Iterator[str]:
    rate = plan.ratios[0].rate
    yield f"<h2>Latency by ratio, at {said(rate)} requests/s</h2>"
    yield legend_of(methods_of(plan.ratios))
    yield f"<div class=pair><div>{by_ratio(plan, 'ttft')}</div><div>{by_ratio(plan, 'tpot')}</div></div>"
    first = next((r for r in plan.ratios if r.method != "EPD"), plan.ratios[0])
    yield (
        f"<p class=sub>The same requests at the same rate for all: on the left {escape(first.layout)} and its like. "
        "Dashed: the SLO. Latencies far beyond it are drawn at the edge. These are single short runs at one rate, "
        "so they compare layouts with each other; whether a layout keeps the SLO at a rate, its goodput says.</p>"
    )


def _grid(plan: LayoutPlan) -> Iterator[str]:
    yield (
        "<h2>The best layout by SLO</h2>"
        + legend_of(methods_of([c for c in plan.grid if c.goodput]))
        + f"<div class=scroll>{grid(plan.grid)}</div>"
    )
    yield "<p class=sub>Approximate: of a short trace and the most promising layouts of each method.</p>"


def _live(live: Sequence[Live]) -> str:
    def both(pair: tuple[float, float]) -> list[str]:
        predicted, measured = pair
        error = "–"
        if measured:
            error = f"{(predicted / measured - 1) * 100:+.0f} %"
        return [f"{ms(predicted)} / {ms(measured)}", error]

    rows = []
    for run in live:
        predicted, measured = run.attainment
        goodputs = " / ".join(map(said, run.goodput))
        cells = [escape(run.layout), goodputs, said(run.rate), f"{percent(predicted)} / {percent(measured)}"]
        for pair in (run.ttft_p50, run.ttft_p90, run.tpot_p50, run.tpot_p90):
            cells += both(pair)
        rows.append(cells)
    head = ["layout", "goodput, /s", "at, /s", "SLO met"]
    for name in ("TTFT p50", "TTFT p90", "TPOT p50", "TPOT p90"):
        head += [f"{name}, ms", "error"]
    note = "<p class=sub>Predicted by the simulation / measured on the real deployment, at the same rate.</p>"
    return f"<div class=whole>{table(head, rows)}</div>{note}"


def _layouts(plan: LayoutPlan) -> str:
    rows = []
    for row in plan.layouts:
        carried = said(row.goodput) if row.goodput else f"&lt; {said(row.goodput_high or row.bound)}"
        latencies = (
            (row.ttft_p90, row.tpot_p90, row.interval_p90) if row.goodput else (None,) * 3
        )  # other rows only have latencies of a short trace
        rows.append(
            [
                escape(row.layout),
                f'<i style="background:{colour_of(row.method)}"></i>{escape(row.method)}',
                carried,
                escape(interval(row)),
                regret(row, plan.layouts[0]) if row is not plan.layouts[0] else "",
                *([thousand(row)] if plan.price is not None else []),
                *map(ms, latencies),
                said(row.bound),
                _HOW_FAR.get(row.search, ""),
                escape(row.limited_by),
            ]
        )
    head = [
        "layout",
        "method",
        "goodput, /s",
        "95 %",
        "below the first",
        *(["per 1,000 requests"] if plan.price is not None else []),
        "TTFT p90, ms",
        "TPOT p90, ms",
        "interval p90, ms",
        "bound, /s",
        "simulated",
        "why it carries no more",
    ]
    aside = (
        "<p class=sub>Latencies: of the runs at the goodput. Bound: no schedule carries more. Simulated: how far the "
        "search followed a layout.</p><p class='sub phone'>The table goes on to the right.</p>"
    )
    return f"{aside}<div class=all>{table(head, rows, n_left=2, n_last=2)}</div>"


def _given(plan: LayoutPlan) -> Iterator[str]:
    """The inputs of the plan, and how to repeat it."""
    yield "<h2>What was planned for</h2><div class=two><div><h3>Workload</h3>"
    pairs = [[escape(name), escape(value)] for name, value in workload_lines(plan.workload)]
    yield f"<div class=plain>{table(['', ''], pairs)}</div>"
    yield "</div><div><h3>Budgets of the best layout</h3>" + _budgets(plan) + "</div></div>"
    known = "described by its published numbers, not measured"
    if plan.measured:
        known = "measured"
    facts = {
        "model": plan.model,
        "devices": f"{plan.hardware}, {known}",
        "SLO": f"{plan.slo}, for {plan.target * 100:g} % of the requests",
        "trace": f"{plan.requests} requests, seed {plan.seed}",
        "search": f"{plan.took_s:.3g} s",
        "version": f"hydrainfer {plan.version}",
    }
    yield "<h2>To repeat it</h2>" + (f"<p><code>{escape(plan.command)}</code></p>" if plan.command else "")
    yield "<p class=sub>" + "<br>".join(f"{escape(k)}: {escape(v)}" for k, v in facts.items()) + "</p>"


def workload_lines(workload: dict[str, str | float]) -> Iterator[tuple[str, str]]:
    """Lines of a name in words and a value; a mean and its 90th percentile share one line."""
    for name, value in workload.items():
        what, _, kind = name.rpartition("_")
        shown = value if isinstance(value, str) else f"{value:.5g}"
        if kind == "mean" and what:
            p90 = workload.get(f"{what}_p90")
            more = ""
            if isinstance(p90, int | float):
                more = f", p90 {p90:.5g}"
            yield f"{_WORDS.get(what, what)}, mean", f"{shown}{more}"
        elif not (kind == "p90" and f"{what}_mean" in workload):
            yield name.replace("_", " "), shown


def _budgets(plan: LayoutPlan) -> str:
    names = list(dict.fromkeys(name for budgets in plan.budgets.values() for name in budgets))
    columns = [[escape(role), *(_limit(b.get(name)) for name in names)] for role, b in plan.budgets.items()]
    meanings = [_BUDGETS.get(name, "") for name in names]
    return _transposed(["role", *(escape(name.replace("_", " ")) for name in names)], columns, meanings)


def _limit(value: float | None) -> str:
    """A budget: a number of things as it is, seconds to three digits."""
    if value is None:
        return "–"
    if isinstance(value, int):
        return str(value)
    return f"{value:.3g}"
